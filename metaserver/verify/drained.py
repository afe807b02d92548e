"""Has a group drained nothing before what it continues.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ...protocol.routing import PartitionState
from .views import GroupRow, SqlView


def drained_too_early(view: SqlView, group: GroupRow) -> Iterator[str]:
    """
    Sentences that say where it has: whatever continues such a partition can be read beside what is before it.

    A parent that has expired or was forsaken holds nobody up.  One with a higher token was granted or set again since:
    an operator may set one partition alone.
    """
    for partition_id in sorted(group.drained):
        one = view.partitions.get(partition_id)
        token = group.tokens.get(partition_id, 0)
        for parent_id in () if one is None else one.partition.parents:
            parent = view.partitions.get(parent_id)
            if parent is None or parent_id in group.drained:
                continue
            if parent.forsaken or parent.partition.state is PartitionState.EXPIRED:
                continue
            if not group.tokens.get(parent_id, 0) > token > 0:
                yield (
                    f"partition {partition_id}, group {group.name!r}: drained before partition "
                    f"{parent_id}, which it continues"
                )

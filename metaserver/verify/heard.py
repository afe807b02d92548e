"""Do brokers keep the groups that the database counts on, so that retention waits for them.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ...protocol.control import PartitionStatus, Retention
from ...protocol.routing import PartitionState
from .views import GroupRow, PartitionView, SubjectView


def missing_at_broker(
    subject: SubjectView, one: PartitionView, status: PartitionStatus, groups: list[GroupRow]
) -> Iterator[str]:
    """
    Sentences that say which groups the broker of a partition does not list, and may lose messages of.

    Args:
        groups: those of the subject, as the database had them before the broker was asked.
    """
    if subject.retention is Retention.TIME:
        return
    partition_id = one.partition.partition_id
    listed = {each.group for each in status.groups}
    served = one.partition.state in {PartitionState.OPEN, PartitionState.SEALED}
    needing = [group for group in groups if partition_id not in group.drained]
    for group in needing:
        if not served or group.name in listed:
            continue
        if partition_id in group.heard:
            yield f"partition {partition_id}: its broker has lost group {group.name!r}"
        elif group.tokens.get(partition_id, 0):
            yield (
                f"partition {partition_id}, group {group.name!r}: granted, and its broker has not "
                "heard of the group"
            )
    if served and needing and not status.groups_told:
        yield f"partition {partition_id}: its broker was never told all groups, and removes nothing"

"""Sealed partitions that a consumer group has not acked to the end: the partitions that continue
them wait for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ..protocol.control import PartitionStatus
from ..protocol.parked import FailingMessage
from ..protocol.routing import Partition


class UndrainedPartition(Struct, frozen=True, kw_only=True):
    """A sealed partition whose end a consumer group has not reached, or whose broker does not
    answer.
    """

    partition_id: int
    name: str
    group: str | None
    """None with a `problem`."""
    offset: int | None
    """The cursor: the first message that is not acked."""
    end_offset: int | None
    lag: int | None
    """Messages that are not acked."""
    failing: FailingMessage | None = None
    """The oldest of them that fails."""
    problem: str | None = None
    """Why the broker's fields are unknown."""


def undrained_partitions(
    sealed: Iterable[Partition], statuses: Mapping[int, PartitionStatus | str]
) -> list[UndrainedPartition]:
    """
    Of sealed partitions those that a group has not acked to the end.

    Args:
        statuses: partition id → its status, or why there is none.
    """
    undrained = []
    for partition in sealed:
        status = statuses[partition.partition_id]
        if isinstance(status, str):
            unknown = UndrainedPartition(
                partition_id=partition.partition_id,
                name=partition.name,
                group=None,
                offset=None,
                end_offset=None,
                lag=None,
                problem=status,
            )
            undrained.append(unknown)
            continue
        undrained += [
            UndrainedPartition(
                partition_id=partition.partition_id,
                name=partition.name,
                group=progress.group,
                offset=progress.cursor,
                end_offset=status.next_offset,
                lag=progress.lag,
                failing=progress.failing,
            )
            for progress in status.groups
            if progress.lag or progress.failing
        ]
    return undrained

"""Finds sealed partitions that a consumer group has not fully acked. Until it has, it cannot read
the partitions that continue them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ..protocol.control import PartitionStatus
from ..protocol.parked import FailingMessage
from ..protocol.routing import Partition


class UndrainedPartition(Struct, frozen=True, kw_only=True):
    """A sealed partition that a consumer group has not fully acked, or whose status is unknown
    because its broker does not respond.
    """

    partition_id: int
    name: str
    group: str | None
    """The consumer group; None if there is a `problem`."""
    offset: int | None
    """The cursor: the offset of the first unacked message."""
    end_offset: int | None
    lag: int | None
    """Number of unacked messages."""
    failing: FailingMessage | None = None
    """The oldest failing message, with its last error."""
    problem: str | None = None
    """The reason why the fields reported by the broker are unknown."""


def undrained_partitions(
    sealed_partitions: Iterable[Partition], statuses: Mapping[int, PartitionStatus | str]
) -> list[UndrainedPartition]:
    """
    Return the sealed partitions that a group has not fully acked.

    Args:
        statuses: maps each partition id to its status, or to the reason why it is unknown.
    """
    undrained = []
    for partition in sealed_partitions:
        status = statuses[partition.partition_id]
        if isinstance(status, str):
            unreachable = UndrainedPartition(
                partition_id=partition.partition_id,
                name=partition.name,
                group=None,
                offset=None,
                end_offset=None,
                lag=None,
                problem=status,
            )
            undrained.append(unreachable)
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

"""Sealed partitions that a consumer group has not acked to the end: the partitions that continue them wait for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ..protocol.control import PartitionStatus
from ..protocol.ids import check_name
from ..protocol.parked import FailingMessage
from ..protocol.routing import Partition, PartitionState
from .calls import ClusterCalls


class UndrainedPartition(Struct, frozen=True, kw_only=True):
    """A sealed partition whose end a consumer group has not reached, or whose broker does not answer."""

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


class UndrainedCalls(ClusterCalls):
    """The call of an admin about what partitions wait for after a change of partitions."""

    async def undrained(self, subject: str) -> list[UndrainedPartition]:
        """
        What the consumer groups of a subject have not acked of its sealed partitions, by partition and group.

        That includes parked messages which fail again while they are redriven.

        A group gets nothing of the partitions that continue a sealed one before it has acked all of that, or parked it.
        A broker that does not answer is no error: its partitions have a `problem`.

        Raises:
            SubjectUnknownError
        """
        route = (await self._meta.subject(check_name("subject", subject))).route
        sealed = [part for part in route.partitions if part.state is PartitionState.SEALED]
        return undrained_partitions(sealed, await self._statuses(sealed))


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

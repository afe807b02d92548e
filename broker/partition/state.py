"""The state of a broker: its hosted partitions, and the damage to its log. Pure.

The same records lead to the same state during recovery (`store/replay.py`) and in operation
(`store/store.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.control import HostPartition
from ...protocol.errors import (
    CorruptLogError,
    InvalidRequestError,
    PartitionUnknownError,
    Reason,
    StorageError,
)
from .dropped import DroppedPartitions
from .partition import HostedPartition
from .records import DroppedBody
from .table import PartitionTable

AHEAD_MS_MAX = 24 * 3_600_000
"""How far ahead of the wall clock a partition may begin, in milliseconds. This is enough for a
wrong time zone, and has passed within a day.
"""
PROBLEMS_MAX = 100
MORE = "there are more problems: stop the broker, then `keylane broker verify` lists them"


class BrokerState:
    """The hosted partitions by id, and the damage to the log. `now_ms` is the clock of the pull
    locks.
    """

    def __init__(self, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.partitions = PartitionTable(now_ms)
        self._warm_partitions = self.partitions.warm
        self.hosting: set[int] = set()
        """The partitions whose facts are not durable yet. They are omitted from lists."""
        self.orphans: dict[int, int] = {}
        """Maps the id of each partition whose facts are lost to the position of its first
        record.
        """
        self.problems: list[str] = []
        """Descriptions of damage, the newest last."""
        self.repaired_by_restart: set[str] = set()
        """The problems that will be repaired at the next start. Snapshots omit them."""
        self.retained = 0
        """The start of the log for which the first offsets are valid. If the log begins later, they
        are raised when the broker starts.
        """
        self.damaged: set[int] = set()
        """The partitions that have lost messages."""
        self.dropped = DroppedPartitions()

    def partition(self, partition_id: int) -> HostedPartition:
        """Return the partition with this id. Raises PartitionUnknownError or CorruptLogError."""
        partition = self._warm_partitions.get(partition_id) or self.partitions.get(partition_id)
        if partition is None:
            self.check_no_orphan(partition_id)
            raise PartitionUnknownError(partition_id=partition_id)
        return partition

    def check_no_orphan(self, partition_id: int) -> None:
        """Raise CorruptLogError if the log has records of this partition but has lost its facts."""
        if partition_id in self.orphans:
            position = self.orphans[partition_id]
            raise CorruptLogError(
                f"damage has lost the facts of partition {partition_id}; "
                f"its records begin at position {position}",
                partition_id=partition_id,
                position=position,
            )

    def check_not_dropped(self, partition_id: int) -> None:
        """Raise InvalidRequestError if a partition with this id was dropped."""
        if partition_id in self.dropped:
            raise InvalidRequestError(
                Reason.PARTITION_IN_USE,
                f"partition {partition_id} was dropped with its subject",
                partition_id=partition_id,
            )

    def apply_dropped(self, body: DroppedBody) -> None:
        """Drop the partitions listed in a durable record."""
        self.dropped.add(body)
        if sum(end - start for start, end in body.ranges) == 1:
            self.forget_partition(body.ranges[0][0])
            return
        for partition_id in [*self.partitions.ids(), *self.orphans]:
            if partition_id in self.dropped:
                self.forget_partition(partition_id)

    def forget_partition(self, partition_id: int) -> None:
        """Forget everything about a partition."""
        self.partitions.remove(partition_id)
        self.orphans.pop(partition_id, None)
        self.damaged.discard(partition_id)

    def add_lost_range(
        self, partition: HostedPartition, start: int, end: int, *, position: int
    ) -> None:
        """Record that a partition has lost the offsets `[start, end)`; see
        `HostedPartition.add_lost_range`.
        """
        partition.add_lost_range(start, end, position=position)
        self.damaged.add(partition.partition_id)
        self.mark_dirty(partition)

    def record_damage(self, partition: HostedPartition, error: StorageError) -> None:
        """Record damage that was found by a read. The partition loses the damaged offsets, as it
        would at a restart.
        """
        # Make the partition warm again, because only warm partitions may be changed, and it may
        # have become cold while the disk was read.
        self.partitions.get(partition.partition_id)
        if not isinstance(error, CorruptLogError) or error.end_offset is None:
            self.add_problem(error.message)
            return
        assert error.offset is not None
        assert error.position is not None
        start = max(error.offset, partition.first_offset)
        self.add_lost_range(partition, start, error.end_offset, position=error.position)

    def add_problem(self, text: str, *, count_max: int = PROBLEMS_MAX) -> None:
        """Add a problem to the health report, unless it is already there. If there are `count_max`
        problems, only add that there are more.
        """
        if text in self.problems:
            return
        if len(self.problems) < count_max:
            self.problems.append(text)
        elif MORE not in self.problems:
            self.problems.append(MORE)

    def mark_dirty(self, partition: HostedPartition) -> None:
        """Mark the partition as changed, so that it is included in the next snapshot."""
        self.partitions.dirty.add(partition.partition_id)

    def host(self, facts: HostPartition) -> HostedPartition:
        """Add a new partition with these facts."""
        partition = HostedPartition(facts)
        self.partitions.add(partition)
        return partition

    def first_time_ms(self, partition: HostedPartition, now_ms: int) -> int:
        """Return the earliest possible time of a partition's first message: the present time or, if
        it is later, the time at which its parents on this broker ended.
        """
        parents = map(self.partitions.peek, partition.facts.partition.parents)
        ends_ms = [parent.appended_at_ms for parent in parents if parent is not None]
        return max([now_ms, *(at_ms for at_ms in ends_ms if is_plausible_end(at_ms, now_ms))])

    def undo_host(self, partition_id: int) -> None:
        """Remove a new partition whose record could not be written."""
        self.hosting.discard(partition_id)
        self.partitions.remove(partition_id)


def is_plausible_end(at_ms: int, now_ms: int) -> bool:
    """Return True if `at_ms`, when a partition ended, is plausible as a lower bound for the times
    of its children: not too far ahead of `now_ms`, the broker's wall-clock time.
    """
    return at_ms <= now_ms + AHEAD_MS_MAX

"""The state of a broker: the hosted partitions, and what damage has taken.  Pure.

The same records give the same state, in recovery (`store/replay.py`) as in service (`store/store.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.control import HostPartition
from ...protocol.errors import CorruptLogError, PartitionUnknownError, StorageError
from .partition import HostedPartition
from .table import PartitionTable

PROBLEMS_MAX = 100
MORE = "there is more that is wrong: `keylane broker verify` on the stopped broker's folder tells"


class BrokerState:
    """The hosted partitions, by id; `now_ms` is the clock of their pull locks."""

    def __init__(self, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.partitions = PartitionTable(now_ms)
        self.hosting: set[int] = set()
        """Partitions whose facts are on their way to the disk: no answer names them yet."""
        self.orphans: dict[int, int] = {}
        """Partitions that have records, while their facts are lost: id → position of the first such record."""
        self.problems: list[str] = []
        """Damage that was met, as text; the newest last."""
        self.until_restart: set[str] = set()
        """Those of the problems that the next start repairs: no snapshot keeps them."""
        self.retained = 0
        """The beginning of the log that first offsets were raised to; a start raises them if the log begins later."""
        self.damaged: set[int] = set()
        """Partitions that have lost messages."""

    def partition(self, partition_id: int) -> HostedPartition:
        """The partition of this id.  Raises PartitionUnknownError, CorruptLogError."""
        partition = self.partitions.get(partition_id)
        if partition is None:
            self.check_no_orphan(partition_id)
            raise PartitionUnknownError(partition_id=partition_id)
        return partition

    def check_no_orphan(self, partition_id: int) -> None:
        """Raises CorruptLogError if the log has records of this partition and has lost its facts."""
        if partition_id in self.orphans:
            position = self.orphans[partition_id]
            raise CorruptLogError(
                f"what partition {partition_id} is was lost by damage; "
                f"its records begin at position {position}",
                partition_id=partition_id,
                position=position,
            )

    def lose(self, partition: HostedPartition, start: int, end: int, *, position: int) -> None:
        """Offsets `[start, end)` of the partition are lost; see `HostedPartition.lose`."""
        partition.lose(start, end, position=position)
        self.damaged.add(partition.partition_id)
        self.touch(partition)

    def met_damage(self, partition: HostedPartition, error: StorageError) -> None:
        """A read met damage: as at a start, the partition loses the damaged offsets, and health says so."""
        # The partition may have cooled while the disk was read: it has to be warm to be changed.
        self.partitions.get(partition.partition_id)
        if not isinstance(error, CorruptLogError) or error.end_offset is None:
            self.problem(error.message)
            return
        assert error.offset is not None
        assert error.position is not None
        start = max(error.offset, partition.first_offset)
        self.lose(partition, start, error.end_offset, position=error.position)

    def problem(self, text: str, *, room: int = PROBLEMS_MAX) -> None:
        """Keep a problem for health, once, if there are fewer than `room` already."""
        if text in self.problems:
            return
        if len(self.problems) < room:
            self.problems.append(text)
        elif MORE not in self.problems:
            self.problems.append(MORE)

    def touch(self, partition: HostedPartition) -> None:
        """Have the next snapshot contain the partition: it was changed, or is about to be."""
        self.partitions.dirty.add(partition.partition_id)

    def host(self, facts: HostPartition) -> HostedPartition:
        """A new partition with these facts."""
        partition = HostedPartition(facts)
        self.partitions.add(partition)
        return partition

    def unhost(self, partition_id: int) -> None:
        """Take back the newest partition."""
        self.hosting.discard(partition_id)
        self.partitions.remove(partition_id)

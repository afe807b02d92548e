"""The interface of consume queues, which find the batches of a partition in the commit log. Pure.

Invariants
    Consume queues are derived data: they may be deleted, and are then rebuilt from the log.
    They contain each durable batch once, in the order of offsets, without gaps.
    Times never decrease within a partition: a batch with an earlier time than the previous one gets
    the previous batch's time.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple, Protocol

from ....protocol.control import TimeBound
from ....protocol.errors import CorruptLogError
from ....protocol.record import Header

FIND_UNITS_MAX = 4096
"""The maximum number of units that one call of `find` returns."""


class Unit(NamedTuple):
    """The index entry of a batch with the offsets `[base_offset, base_offset + message_count)`,
    which occupies `length` bytes at `position` of the log.
    """

    base_offset: int
    message_count: int
    position: int
    length: int
    appended_at_ms: int
    """The time at which the batch was stored, in milliseconds since 1970. It never decreases within
    a partition.
    """

    @property
    def next_offset(self) -> int:
        """The offset that follows the last message of the batch."""
        return self.base_offset + self.message_count

    @property
    def end_position(self) -> int:
        """The log position that follows the batch."""
        return self.position + self.length


def unit_of(header: Header) -> Unit:
    """Return the unit of a stored batch."""
    return Unit(
        header.base_offset, header.count, header.position, header.length, header.appended_at_ms
    )


class ConsumeQueues(Protocol):
    """The consume queues of all partitions of a broker. One thread writes; many threads may read.
    All calls block.
    """

    @property
    def dispatches_in_memory(self) -> bool:
        """True if `dispatch` would currently not block, so that it may run on an event loop."""
        ...

    @property
    def position(self) -> int:
        """The log position up to which every batch has been dispatched."""
        ...

    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        """
        Add the units of one group commit, as (partition id, unit), in order within a partition.

        Raises:
            CorruptLogError: a unit does not follow its partition's last unit; no unit was added.
            DiskFullError: the units remain in memory, where readers find them, until a later call
                writes them.
        """
        ...

    def find(self, partition_id: int, offset: int, *, end: int, bytes_max: int) -> list[Unit]:
        """
        Return the units of contiguous batches, beginning with the one that contains `offset`, or an
        empty list if there is none.

        All batches begin before offset `end`. They cover up to `bytes_max` bytes or FIND_UNITS_MAX
        batches, but at least one batch.
        """
        ...

    def find_by_time(self, partition_id: int, at_ms: int, bound: TimeBound) -> Unit | None:
        """Return the first batch stored at `at_ms` or later (LOWER), or the last batch stored at
        `at_ms` or earlier (UPPER).
        """
        ...

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """Return the first offset and the next offset of a partition, or None if no batch of the
        partition was ever dispatched.
        """
        ...

    def partitions(self) -> list[int]:
        """Return the sorted ids of all partitions that have bounds."""
        ...

    def first_offsets_at(self, position: int) -> Iterator[list[tuple[int, int]]]:
        """
        Yield the first offsets that `retain` would set, without changing anything. Any thread may
        call this.

        Each step examines some partitions, and yields (partition id, new first offset) for those
        that would lose batches.
        """
        ...

    def retain(
        self, position: int, *, dropped: Container[int] = ()
    ) -> Iterator[list[tuple[int, int]]]:
        """
        Forget the batches below this log position. Every step must run in the thread that
        dispatches.

        Each step handles some partitions, and yields (partition id, new first offset) for those
        that have lost batches.

        Args:
            dropped: the ids of partitions whose drop is durable. They lose their bounds in the
                first call in which they have no batches.
        """
        ...

    def truncate(self, position: int) -> None:
        """Forget all units at or above this log position."""
        ...

    def recover(self, position: int, *, first_position: int = 0) -> int:
        """
        Prepare for dispatching. Must be called once, before the first dispatch.

        Units that may be damaged are forgotten. All units are forgotten if units are missing
        between `first_position`, where the log begins, and the end of the index.

        Args:
            position: the log position at which the replay begins.

        Returns:
            The log position, at most `position`, from which batches must be dispatched again; 0
            means a complete rebuild.
        """
        ...

    def checkpoint(self, position: int) -> None:
        """
        Make all units below this log position durable, before a snapshot at this position is
        written. May run concurrently with `dispatch`, in another thread.
        """
        ...

    def flush(self) -> None:
        """Write all units that are in memory."""
        ...

    def close_unflushed(self) -> None:
        """Close all files without writing."""
        ...

    def close(self) -> None:
        """Flush the units, and close all files."""
        ...


def gap_error(partition_id: int, unit: Unit, next_offset: int) -> CorruptLogError:
    """Return the error for a unit that does not begin at its partition's next offset."""
    return CorruptLogError(
        f"a batch of partition {partition_id} begins at offset {unit.base_offset}, not at "
        f"{next_offset}",
        partition_id=partition_id,
        position=unit.position,
    )


def offset_at(unit: Unit | None, bound: TimeBound) -> int | None:
    """Convert the result of `find_by_time` to an offset, or to None if there is no unit."""
    if unit is None:
        return None
    return unit.base_offset if bound is TimeBound.LOWER else unit.next_offset - 1

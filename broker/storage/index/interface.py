"""The interface of consume queues, which find the batches of a partition in the commit log. Pure.

Invariants
    Consume queues are derived: they may be deleted, and are rebuilt from the log.
    They have durable batches only, each once, in the order of their offsets, without a gap.
    Times never fall within a partition: a batch with an earlier time than the previous one gets the
    time of that one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple, Protocol

from ....protocol.control import TimeBound
from ....protocol.errors import CorruptLogError
from ....protocol.record import Header

FIND_UNITS_MAX = 4096
"""The most units that a call of `find` returns."""


class Unit(NamedTuple):
    """A batch: offsets `[base_offset, base_offset + message_count)`, `length` bytes of log from
    `position` on.
    """

    base_offset: int
    message_count: int
    position: int
    length: int
    appended_at_ms: int
    """The time at which the batch was stored, in milliseconds. It never falls within a
    partition.
    """

    @property
    def next_offset(self) -> int:
        """The offset after the last message of the batch."""
        return self.base_offset + self.message_count

    @property
    def end_position(self) -> int:
        """The position after the batch."""
        return self.position + self.length


def unit_of(header: Header) -> Unit:
    """Return the unit of a stored batch."""
    return Unit(
        header.base_offset, header.count, header.position, header.length, header.appended_at_ms
    )


class ConsumeQueues(Protocol):
    """The consume queues of all partitions of a broker. One thread writes, and many read. All calls
    block.
    """

    @property
    def dispatches_in_memory(self) -> bool:
        """True if `dispatch` may run on an event loop now: it changes only memory, and waits for
        nothing.
        """
        ...

    @property
    def position(self) -> int:
        """The log position up to which every batch has been dispatched."""
        ...

    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        """
        Add the batches of one group commit: pairs of (partition id, unit), each partition's in
        order.

        Raises:
            CorruptLogError: a unit does not follow its partition's last unit; no unit was added.
            DiskFullError: the units are kept in memory, where readers find them; a later call
                writes them.
        """
        ...

    def find(self, partition_id: int, offset: int, *, end: int, bytes_max: int) -> list[Unit]:
        """
        Return contiguous batches, beginning with the batch that contains `offset`; the list is
        empty if there is no such batch.

        All begin below offset `end`. At least one batch is returned, and up to `bytes_max` bytes or
        FIND_UNITS_MAX batches.
        """
        ...

    def by_time(self, partition_id: int, at_ms: int, bound: TimeBound) -> Unit | None:
        """Return the first batch stored at `at_ms` or later (LOWER), or the last batch stored at
        `at_ms` or earlier (UPPER).
        """
        ...

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """Return the first offset and the next offset of a partition, or None if no batch of it was
        ever dispatched.
        """
        ...

    def partitions(self) -> list[int]:
        """Return the ids of all partitions that have bounds, sorted."""
        ...

    def firsts_behind(self, position: int) -> Iterator[list[tuple[int, int]]]:
        """
        Yield the first offsets that `retain` would leave, without changing anything. Any thread may
        call it.

        Each step examines some partitions, and yields (partition id, new first offset) for those
        that would lose batches.
        """
        ...

    def retain(
        self, position: int, *, dropped: Container[int] = ()
    ) -> Iterator[list[tuple[int, int]]]:
        """
        Forget batches below this log position. The thread that dispatches must make every step.

        Each step handles some partitions, and yields (partition id, new first offset) for those
        that have lost batches.

        Args:
            dropped: partitions that are durably never hosted again. Those that have had no batches
                since an earlier call lose their bounds.
        """
        ...

    def truncate(self, position: int) -> None:
        """Forget every unit at or above this log position; 0 forgets all."""
        ...

    def recover(self, position: int, *, first_position: int = 0) -> int:
        """
        Prepare for dispatching; called once, before the first dispatch.

        Units that may be damaged are forgotten. If the log begins at `first_position` and units
        above it are missing, all units are forgotten.

        Args:
            position: the log position at which the replay begins.

        Returns:
            The log position, `<= position`, from which units have to be dispatched again. 0 means
            a complete rebuild.
        """
        ...

    def checkpoint(self, position: int) -> None:
        """
        Make every unit below this log position durable, before a snapshot at this position is
        written.

        It is called in a different thread from `dispatch`, which may run at the same time.
        """
        ...

    def flush(self) -> None:
        """Write all units that are in memory."""
        ...

    def leave(self) -> None:
        """Close all files without writing."""
        ...

    def close(self) -> None:
        """Flush, and close all files."""
        ...


def misfit(partition_id: int, unit: Unit, next_offset: int) -> CorruptLogError:
    """Return the error for a unit that does not follow the last unit of its partition."""
    return CorruptLogError(
        f"a batch at offset {unit.base_offset} of partition {partition_id} follows offset "
        f"{next_offset}",
        partition_id=partition_id,
        position=unit.position,
    )


def offset_at(unit: Unit | None, bound: TimeBound) -> int | None:
    """Return the result of a lookup by time as an offset, or None if there is no unit."""
    if unit is None:
        return None
    return unit.base_offset if bound is TimeBound.LOWER else unit.next_offset - 1

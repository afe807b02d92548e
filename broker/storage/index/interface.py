"""Consume queues: where the batches of each partition lie in the commit log.  The interface.  Pure.

Invariants
    Derived: whatever is in it can be deleted and comes back from the log.
    It holds durable batches only, each once, in the order of their offsets, without a gap.
    Times in it never fall within a partition: a batch stamped earlier than the one before counts as of its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from ....protocol.control import TimeBound
from ....protocol.errors import CorruptLogError
from ....protocol.record import Header

FIND_UNITS_MAX = 4096
"""What one call of `find` returns at most."""


class Unit(NamedTuple):
    """One batch: offsets `[base_offset, base_offset + message_count)`, `length` bytes of log from `position` on."""

    base_offset: int
    message_count: int
    position: int
    length: int
    appended_at_ms: int
    """Never falls within a partition."""

    @property
    def next_offset(self) -> int:
        """One past the last offset of the batch."""
        return self.base_offset + self.message_count

    @property
    def end_position(self) -> int:
        """Position after the batch."""
        return self.position + self.length


def unit_of(header: Header) -> Unit:
    """The unit of a stored batch."""
    return Unit(
        header.base_offset, header.count, header.position, header.length, header.appended_at_ms
    )


class ConsumeQueues(Protocol):
    """The consume queues of all partitions of a broker.  One thread writes, many read; all calls block."""

    @property
    def position(self) -> int:
        """The log position up to which everything is here."""
        ...

    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        """
        Add the batches of one group commit: pairs of (partition id, unit), each partition's in order.

        Raises:
            CorruptLogError: a unit does not follow its partition's last one; none of them was added.
            DiskFullError: all of them are kept, in memory, and readers find them; a later call writes them.
        """
        ...

    def find(self, partition_id: int, offset: int, *, end: int, bytes_max: int) -> list[Unit]:
        """
        Batches from the one that holds `offset` on, those that begin below offset `end`, up to `bytes_max`
        bytes and FIND_UNITS_MAX but at least one.  Contiguous; empty if there is none.
        """
        ...

    def by_time(self, partition_id: int, at_ms: int, bound: TimeBound) -> Unit | None:
        """LOWER: the first batch stored at `at_ms` or later; UPPER: the last one at `at_ms` or earlier; or None."""
        ...

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """First offset and next offset; None if no batch of this partition was ever here."""
        ...

    def partitions(self) -> list[int]:
        """Ids of all partitions that have bounds, sorted."""
        ...

    def firsts_behind(self, position: int) -> Iterator[list[tuple[int, int]]]:
        """
        Which partitions begin later without the batches below this log position, some of them with each step.

        Changes nothing and may be called in any thread; yields pairs of (partition id, its first offset then).
        """
        ...

    def retain(self, position: int) -> Iterator[list[tuple[int, int]]]:
        """
        Forget batches below this log position, some partitions with each step.

        Each step is to be made by the thread that dispatches; it yields pairs of (partition id, its first
        offset now) of partitions that lost something.
        """
        ...

    def truncate(self, position: int) -> None:
        """Forget every unit at or after this log position; 0 forgets all."""
        ...

    def recover(self, position: int, *, first_position: int = 0) -> int:
        """
        Called once, before the first dispatch, with the log position that the replay begins at.

        If the log begins at `first_position` and more than that is missing here, everything is forgotten.

        Forgets what it cannot vouch for, and everything at or after the position it returns unless dispatching
        it again is harmless.

        Returns:
            The log position from which units have to be dispatched again, `<= position`; 0 to be rebuilt whole.
        """
        ...

    def checkpoint(self, position: int) -> None:
        """
        Make durable what was dispatched below this log position: a snapshot that stands for it follows.

        Called in a thread of its own while another dispatches and others read.
        """
        ...

    def flush(self) -> None:
        """Write out what is still in memory."""
        ...

    def leave(self) -> None:
        """Let go of everything and write nothing."""
        ...

    def close(self) -> None:
        """Flush and let go of everything."""
        ...


def misfit(partition_id: int, unit: Unit, next_offset: int) -> CorruptLogError:
    """A unit that does not follow the last one of its partition."""
    return CorruptLogError(
        f"a batch at offset {unit.base_offset} of partition {partition_id} follows offset {next_offset}",
        partition_id=partition_id,
        position=unit.position,
    )


def offset_at(unit: Unit | None, bound: TimeBound) -> int | None:
    """The offset that a lookup by time answers, None if there is no such message."""
    if unit is None:
        return None
    return unit.base_offset if bound is TimeBound.LOWER else unit.next_offset - 1

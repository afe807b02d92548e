"""The index of one partition: numbered full blocks on the disk, and a tail in memory. Pure.

    blocks  [0] [1] [2] … 127 units each                  tail: the units after the last full block
    per block: first offset, first time, first position, number

Invariants
    `state` is replaced as a single value, so readers in other threads never see half of a change. A
    `Blocks` object only grows, beyond the number of blocks that readers know; for any other change,
    it is replaced.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from .file_units import UNIT_BYTES, unit_at
from .interface import Unit


class Blocks:
    """The full blocks of a partition, as columns."""

    __slots__ = ("numbers", "offsets", "positions", "times")

    def __init__(self) -> None:
        self.offsets = array("q")
        self.times = array("q")
        self.positions = array("q")
        self.numbers = array("q")

    def columns(self) -> tuple[array[int], ...]:
        """Return the columns in the order of the journal."""
        return self.offsets, self.times, self.positions, self.numbers

    def add(self, first: Unit, number: int) -> None:
        """Add the block that has this first unit and number."""
        self.offsets.append(first.base_offset)
        self.times.append(first.appended_at_ms)
        self.positions.append(first.position)
        self.numbers.append(number)

    def slice(self, start: int, end: int) -> Blocks:
        """Return a copy of the blocks `[start, end)`."""
        part = Blocks()
        part.offsets = self.offsets[start:end]
        part.times = self.times[start:end]
        part.positions = self.positions[start:end]
        part.numbers = self.numbers[start:end]
        return part


NO_BLOCKS = Blocks()
State = tuple[Blocks, int, bytearray]
"""The blocks, the number of blocks, and the units of the tail."""


class Queue:
    """The consume queue of a partition."""

    __slots__ = (
        "first_offset",
        "saved_blocks",
        "saved_tail_bytes",
        "last_ms",
        "next_offset",
        "must_rewrite",
        "state",
    )

    def __init__(self, first: int) -> None:
        self.first_offset = first
        """The first offset that retention has not removed."""
        self.next_offset = first
        self.last_ms = 0
        """The time of the last batch, in milliseconds since 1970."""
        self.state: State = (NO_BLOCKS, 0, bytearray())
        self.saved_blocks = 0
        """The number of blocks that have been saved in the journal."""
        self.saved_tail_bytes = 0
        """The number of the tail's bytes that have been saved in the journal."""
        self.must_rewrite = False
        """True if the next frame must contain the whole partition rather than only its changes."""

    def add_block(self, number: int, size: int) -> None:
        """Move the first `size` bytes of the tail to the blocks, after they were written as block
        `number`.
        """
        blocks, count, tail = self.state
        if blocks is NO_BLOCKS:
            blocks = Blocks()
        blocks.add(unit_at(tail, 0), number)
        self.state = (blocks, count + 1, tail[size:])
        self.saved_tail_bytes = 0

    def replace(self, blocks: Blocks, tail: bytearray) -> None:
        """Replace the blocks and the tail."""
        count = len(blocks.numbers)
        self.state = (blocks if count else NO_BLOCKS, count, tail)
        self.must_rewrite = True

    def mark_saved(self) -> None:
        """Record that the current state is in the journal, or will be in its next frame."""
        _, self.saved_blocks, tail = self.state
        self.saved_tail_bytes = len(tail)
        self.must_rewrite = False

    def set_end(self, last: Unit | None) -> None:
        """After a truncation, set the next offset and the last time from the last remaining
        unit.
        """
        if last is None:
            self.next_offset = self.first_offset
            self.last_ms = 0
        else:
            self.next_offset = last.next_offset
            self.last_ms = last.appended_at_ms


def tail_units(tail: bytearray, start: int = 0) -> Iterator[Unit]:
    """Iterate over a copy of the tail's units from index `start` on."""
    data = bytes(tail[start * UNIT_BYTES :])
    return (unit_at(data, index) for index in range(len(data) // UNIT_BYTES))

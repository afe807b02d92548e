"""The units of one partition: full blocks on the disk, by their numbers, and a tail in memory.
Pure.

    blocks  [0] [1] [2] … 127 units each                  tail: the units after the last full block
    of each block: first offset, first time, first position, number

Invariants
    `state` is replaced as one value, so readers in other threads never see half of a change. Blocks
    are only added after the count that a reader has; for every other change the object is replaced.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from .file_units import UNIT_BYTES, unit_at
from .interface import Unit


class Blocks:
    """The full blocks of a partition, column by column."""

    __slots__ = ("numbers", "offsets", "positions", "times")

    def __init__(self) -> None:
        self.offsets = array("q")
        self.times = array("q")
        self.positions = array("q")
        self.numbers = array("q")

    def columns(self) -> tuple[array[int], ...]:
        """Return the columns in the order in which the journal has them."""
        return self.offsets, self.times, self.positions, self.numbers

    def add(self, first: Unit, number: int) -> None:
        """Add a block by its first unit and its number."""
        self.offsets.append(first.base_offset)
        self.times.append(first.appended_at_ms)
        self.positions.append(first.position)
        self.numbers.append(number)

    def part(self, start: int, end: int) -> Blocks:
        """Return a copy of the blocks `[start, end)`."""
        part = Blocks()
        part.offsets = self.offsets[start:end]
        part.times = self.times[start:end]
        part.positions = self.positions[start:end]
        part.numbers = self.numbers[start:end]
        return part


NO_BLOCKS = Blocks()
State = tuple[Blocks, int, bytearray]
"""(blocks, number of blocks, units of the tail)."""


class Queue:
    """The queue of a partition."""

    __slots__ = ("first", "kept_blocks", "kept_tail", "last_ms", "next", "rewrite", "state")

    def __init__(self, first: int) -> None:
        self.first = first
        """The first offset that is not forgotten."""
        self.next = first
        self.last_ms = 0
        """The time of the last batch, in milliseconds since 1970."""
        self.state: State = (NO_BLOCKS, 0, bytearray())
        self.kept_blocks = 0
        """The number of blocks that the journal has."""
        self.kept_tail = 0
        """The number of bytes of the tail that the journal has."""
        self.rewrite = False
        """True if the next frame must have the whole partition."""

    def add_block(self, number: int, size: int) -> None:
        """Turn the first `size` bytes of the tail, which were written as block `number`, into a
        block.
        """
        blocks, count, tail = self.state
        if blocks is NO_BLOCKS:
            blocks = Blocks()
        blocks.add(unit_at(tail, 0), number)
        self.state = (blocks, count + 1, tail[size:])
        self.kept_tail = 0

    def replace(self, blocks: Blocks, tail: bytearray) -> None:
        """Replace blocks and tail."""
        count = len(blocks.numbers)
        self.state = (blocks if count else NO_BLOCKS, count, tail)
        self.rewrite = True

    def kept(self) -> None:
        """Note that the present state is in the journal's next frame."""
        _, self.kept_blocks, tail = self.state
        self.kept_tail = len(tail)
        self.rewrite = False

    def set_end(self, last: Unit | None) -> None:
        """Set next offset and last time after units were cut off; `last` is the last remaining
        unit.
        """
        if last is None:
            self.next = self.first
            self.last_ms = 0
        else:
            self.next = last.next_offset
            self.last_ms = last.appended_at_ms


def tail_units(tail: bytearray, start: int = 0) -> Iterator[Unit]:
    """Return a copy of the units of a tail from index `start` on."""
    data = bytes(tail[start * UNIT_BYTES :])
    return (unit_at(data, index) for index in range(len(data) // UNIT_BYTES))

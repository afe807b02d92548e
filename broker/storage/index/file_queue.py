"""The units of one partition: full blocks on the disk, by their places, and a tail in memory.  Pure.

    blocks  [0] [1] [2] … 127 units each                  tail: what is not a full block yet
    of each: first offset, first time, first position, place

Invariants
    `state` is replaced as one value, so that readers in other threads never see half of a change; blocks are only
    added behind the count that a reader has, or the whole object is replaced.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from .file_units import UNIT_BYTES, unit_at
from .interface import Unit


class Blocks:
    """The full blocks of a partition, column by column."""

    __slots__ = ("offsets", "places", "positions", "times")

    def __init__(self) -> None:
        self.offsets = array("q")
        self.times = array("q")
        self.positions = array("q")
        self.places = array("q")

    def columns(self) -> tuple[array[int], ...]:
        """In the order in which they are stored."""
        return self.offsets, self.times, self.positions, self.places

    def add(self, first: Unit, place: int) -> None:
        """One more."""
        self.offsets.append(first.base_offset)
        self.times.append(first.appended_at_ms)
        self.positions.append(first.position)
        self.places.append(place)

    def part(self, start: int, end: int) -> Blocks:
        """A copy of some of them."""
        found = Blocks()
        found.offsets = self.offsets[start:end]
        found.times = self.times[start:end]
        found.positions = self.positions[start:end]
        found.places = self.places[start:end]
        return found


NO_BLOCKS = Blocks()
State = tuple[Blocks, int, bytearray]
"""(blocks, how many of them, units of the tail)"""


class Queue:
    """One partition."""

    __slots__ = ("first", "kept_blocks", "kept_tail", "last_ms", "next", "rewrite", "state")

    def __init__(self, first: int) -> None:
        self.first = first
        """The first offset that is not forgotten."""
        self.next = first
        self.last_ms = 0
        """Time of the last batch."""
        self.state: State = (NO_BLOCKS, 0, bytearray())
        self.kept_blocks = 0
        """How many blocks the journal has."""
        self.kept_tail = 0
        """How many bytes of the tail the journal has."""
        self.rewrite = False
        """The journal has to have all of it again."""

    def add_block(self, place: int, size: int) -> None:
        """The first `size` bytes of the tail are a block now."""
        blocks, count, tail = self.state
        if blocks is NO_BLOCKS:
            blocks = Blocks()
        blocks.add(unit_at(tail, 0), place)
        self.state = (blocks, count + 1, tail[size:])
        self.kept_tail = 0

    def replace(self, blocks: Blocks, tail: bytearray) -> None:
        """Another state altogether."""
        count = len(blocks.places)
        self.state = (blocks if count else NO_BLOCKS, count, tail)
        self.rewrite = True

    def kept(self) -> None:
        """The journal is getting all of this."""
        _, self.kept_blocks, tail = self.state
        self.kept_tail = len(tail)
        self.rewrite = False

    def set_end(self, last: Unit | None) -> None:
        """Next offset and last time after the end was cut."""
        if last is None:
            self.next = self.first
            self.last_ms = 0
        else:
            self.next = last.next_offset
            self.last_ms = last.appended_at_ms


def tail_units(tail: bytearray, start: int = 0) -> Iterator[Unit]:
    """The units of a tail from number `start` on, as they are now."""
    data = bytes(tail[start * UNIT_BYTES :])
    return (unit_at(data, index) for index in range(len(data) // UNIT_BYTES))

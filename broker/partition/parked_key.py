"""The parked messages of one key, by the partitions that have them, and what an operator has put in their places.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...protocol.offsets import IntervalSet, Range
from ...protocol.parked import EditedMessage, Failure, ParkState
from .offset_runs import OffsetRuns

Row = tuple[int, int, int]
Place = tuple[int, int]
"""The source and the offset of a message."""


def message_count(ranges: Iterable[Range]) -> int:
    """The number of messages in ranges that do not overlap."""
    return sum(end - start for start, end in ranges)


class ParkedKey:
    """The parked messages of a key."""

    __slots__ = ("edits", "failure", "messages", "next_tries", "pieces", "since_ms", "state")

    def __init__(self, since_ms: int) -> None:
        self.state = ParkState.PARKED
        self.since_ms = since_ms
        self.failure: Failure | None = None
        self.pieces: dict[int, OffsetRuns] = {}
        """Source → offsets; the sources by their ids, which is the order of their messages."""
        self.messages = 0
        self.edits: dict[Place, EditedMessage] = {}
        """By source and offset; of messages that are parked."""
        self.next_tries: dict[Place, int] = {}
        """When messages that wait for retry are tried, as their owner said: milliseconds since 1970.  In memory only."""

    def has(self, place: Place) -> bool:
        """True if this message is parked."""
        runs = self.pieces.get(place[0])
        return runs is not None and bool(runs.within(place[1], place[1] + 1))

    @property
    def row_count(self) -> int:
        """The number of rows, and at least 1."""
        return max(1, sum(runs.runs for runs in self.pieces.values()))

    def rows(self, first: int = 0, count: int = 1 << 62) -> Iterator[Row]:
        """(source, start, end), the oldest message first: up to `count` from the `first`th on."""
        for source, runs in self.pieces.items():
            if first < runs.runs:
                for start, end in runs.some(first, count):
                    yield source, start, end
                count -= runs.runs - first
            first = max(first - runs.runs, 0)
            if count <= 0:
                return

    def add(self, source: int, start: int, end: int) -> list[Range]:
        """Add messages; returns what is new."""
        runs = self.pieces.get(source)
        if runs is None:
            later = {other: self.pieces.pop(other) for other in list(self.pieces) if other > source}
            runs = self.pieces[source] = OffsetRuns()
            self.pieces |= later
        before = runs.messages
        new = runs.add(start, end)
        self.messages += runs.messages - before
        return new

    def remove(self, source: int, start: int, end: int) -> list[Range]:
        """Remove messages; returns those that were there."""
        runs = self.pieces.get(source)
        if runs is None:
            return []
        gone = runs.remove(start, end)
        if not runs:
            del self.pieces[source]
        self.messages -= message_count(gone)
        if self.next_tries:
            offsets = IntervalSet(gone)
            for place in [p for p in self.next_tries if p[0] == source and p[1] in offsets]:
                del self.next_tries[place]
        return gone

    def take_edits(self, source: int, gone: Iterable[Range]) -> dict[Place, EditedMessage]:
        """Forget the edits of messages that are parked no longer; returns them."""
        if not self.edits:
            return {}
        offsets = IntervalSet(gone)
        taken = {
            place: edited
            for place, edited in self.edits.items()
            if place[0] == source and place[1] in offsets
        }
        for place in taken:
            del self.edits[place]
        return taken

    def edited_in(self, rows: Sequence[Row]) -> list[Place]:
        """The edited messages in rows that follow each other."""
        if not (rows and self.edits):
            return []
        first, last = rows[0][:2], (rows[-1][0], rows[-1][2])
        return sorted(place for place in self.edits if first <= place < last)

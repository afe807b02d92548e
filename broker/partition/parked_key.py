"""The parked messages of one key, by the partitions that contain them: how each failed, and by what
an operator has replaced it. Also encodes the image of all keys. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from ...protocol.offsets import IntervalSet, Range
from ...protocol.parked import (
    EditedMessage,
    Failure,
    FailureMark,
    Fault,
    ParkKey,
    ParkState,
    Unneeded,
    is_loose,
)
from ...protocol.routing import logical_partition
from .failure_runs import UNKNOWN, UNKNOWN_FAULT, FailureRuns, Mark, too_many_runs
from .offset_runs import OffsetRuns

Row = tuple[int, int, int]
Place = tuple[int, int]
"""The source and the offset of a message."""
Marks = tuple[int, int, int, Mark]
"""The source, start and end of messages, and how they failed."""
LOOSE_PLACE = -1
"""The place of messages without an order, which have no logical partition."""


def place_of(key: ParkKey) -> int:
    """Return the logical partition of a key, or LOOSE_PLACE."""
    return LOOSE_PLACE if is_loose(key) or not isinstance(key, bytes) else logical_partition(key)


def left_by(change: Unneeded, place: int) -> bool:
    """Return True if a child no longer needs anything at a place; see `place_of`."""
    return change.loose if place == LOOSE_PLACE else change.start <= place < change.end


def message_count(ranges: Iterable[Range]) -> int:
    """Return the number of messages in ranges that do not overlap."""
    return sum(end - start for start, end in ranges)


def parts_of(
    keys: Mapping[ParkKey, ParkedKey], sources: Collection[int]
) -> dict[ParkKey, ParkedKey]:
    """Return the parked messages of only these sources, by key."""
    parts = {key: parked.part_of(sources) for key, parked in keys.items()} if sources else {}
    return {key: part for key, part in parts.items() if part.messages}


class ParkedKey:
    """The parked messages of a key."""

    __slots__ = ("edits", "failure", "failures", "messages", "pieces", "since_ms", "state", "token")

    def __init__(self, since_ms: int) -> None:
        self.state = ParkState.PARKED
        self.since_ms = since_ms
        self.failure: Failure | None = None
        self.token = 0
        """The token of the owner that has the messages with handlers although the key would stay
        parked if its process ended; 0 if no owner has.
        """
        self.pieces: dict[int, OffsetRuns] = {}
        """Source → offsets. The sources are sorted by their ids, which is the order of their
        messages.
        """
        self.messages = 0
        self.edits: dict[Place, EditedMessage] = {}
        """(source, offset) → the edited message, for parked messages."""
        self.failures: dict[int, FailureRuns] = {}
        """Source → how its messages failed, if they have no order."""

    def is_handled(self, token: int) -> bool:
        """Return True if the owner with this token, or a later one, may have messages of the key
        with handlers.
        """
        return self.state is ParkState.REDRIVING or 0 < self.token == token

    def has(self, place: Place) -> bool:
        """Return True if this message is parked."""
        runs = self.pieces.get(place[0])
        return runs is not None and bool(runs.within(place[1], place[1] + 1))

    @property
    def row_count(self) -> int:
        """The number of rows, but at least 1."""
        return max(1, sum(runs.runs for runs in self.pieces.values()))

    def rows(self, first: int = 0, count: int = 1 << 62) -> Iterator[Row]:
        """Yield (source, start, end), the oldest message first: up to `count` rows from the
        `first`th on.
        """
        for source, runs in self.pieces.items():
            if first < runs.runs:
                for start, end in runs.page(first, count):
                    yield source, start, end
                count -= runs.runs - first
            first = max(first - runs.runs, 0)
            if count <= 0:
                return

    def add(self, source: int, start: int, end: int) -> list[Range]:
        """Add messages, and return the ranges that are new."""
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
        """Remove messages, and return those that were there."""
        runs = self.pieces.get(source)
        if runs is None:
            return []
        gone = runs.remove(start, end)
        if not runs:
            del self.pieces[source]
        self.messages -= message_count(gone)
        failures = self.failures.get(source)
        if failures is not None:
            if runs:
                for low, high in gone:
                    failures.forget(low, high, runs)
            else:
                del self.failures[source]
        return gone

    def part_of(self, sources: Collection[int]) -> ParkedKey:
        """Return the messages of only these sources, none of them with a handler. The runs are
        shared, so this object must be dropped.
        """
        part = ParkedKey(self.since_ms)
        part.state = self.state
        part.failure = self.failure
        part.pieces = {source: runs for source, runs in self.pieces.items() if source in sources}
        part.messages = sum(runs.messages for runs in part.pieces.values())
        part.edits = {place: edit for place, edit in self.edits.items() if place[0] in sources}
        part.failures = {
            source: runs for source, runs in self.failures.items() if source in sources
        }
        return part

    # ── failures ──────────────────────────────────────────────────────────────────────────────────
    def marks(self, source: int, ranges: Iterable[Range]) -> list[Marks]:
        """Return how messages of a source failed."""
        runs = self.failures.get(source)
        if runs is None:
            return []
        return [(source, *marked) for low, high in ranges for marked in runs.within(low, high)]

    def mark(self, marks: Iterable[Marks]) -> None:
        """Note how parked messages failed."""
        for source, start, end, mark in marks:
            runs, known = self.failures.get(source), self.pieces.get(source)
            if runs is None:
                runs = self.failures[source] = FailureRuns()
                if known:
                    *_, (_, last) = known.page(known.runs - 1, 1)
                    runs.put(known.first, last, UNKNOWN)
            runs.put(start, end, mark, known)
        while too_many_runs(self.failures.values()):
            max(self.failures.values(), key=len).coarsen()

    def marked_from(self, after: Place, count: int) -> Iterator[Marks]:
        """Yield messages from a place on with the known facts about each, in parts, from up to
        `count` rows of each source.
        """
        for source, runs in self.pieces.items():
            if source < after[0]:
                continue
            offset = after[1] if source == after[0] else 0
            for low, end in runs.page(runs.count_runs_before(offset), count):
                start = max(low, offset)
                parts = self.marks(source, ((start, end),)) or [(source, start, end, UNKNOWN)]
                yield from parts

    def mark_rows(self, first: int, count: int) -> Iterator[Marks]:
        """Yield up to `count` marks, from the `first`th on."""
        for source, runs in self.failures.items():
            if first < len(runs):
                for marked in runs.rows(first, count):
                    yield source, *marked
                count -= len(runs) - first
            first = max(first - len(runs), 0)
            if count <= 0:
                return

    @property
    def mark_count(self) -> int:
        """The number of marks."""
        return sum(map(len, self.failures.values()))

    @property
    def next_ms(self) -> int | None:
        """The time at which the next of these messages is tried again, as their owner reported;
        None if it is not known.
        """
        known = [runs.next_ms for runs in self.failures.values()]
        return min((at_ms for at_ms in known if at_ms is not None), default=None)

    def note_next_try(self, place: Place, at_ms: int) -> Callable[[], None]:
        """Note when a message is tried again, if it is parked. Return a function that undoes it."""
        source, offset = place
        before = self.marks(source, ((offset, offset + 1),)) if self.has(place) else []
        self.mark([(*each[:3], each[3]._replace(next_ms=at_ms)) for each in before])
        return partial(self.mark, before)

    def forget_next_tries(self) -> Callable[[], None]:
        """Forget when messages are tried again. Return a function that undoes it."""
        known = {source: runs.forget_tries() for source, runs in self.failures.items()}

        def take_back() -> None:
            for source, tries in known.items():
                for start, end, next_ms in tries.rows():
                    marks = self.marks(source, ((start, end),))
                    self.mark((*each[:3], each[3]._replace(next_ms=next_ms)) for each in marks)

        return take_back

    # ── edits ─────────────────────────────────────────────────────────────────────────────────────
    def take_edits(self, source: int, gone: Iterable[Range]) -> dict[Place, EditedMessage]:
        """Forget the edits of messages that are no longer parked, and return them."""
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
        """Return the edited messages in rows that follow each other."""
        if not (rows and self.edits):
            return []
        first, last = rows[0][:2], (rows[-1][0], rows[-1][2])
        return sorted(place for place in self.edits if first <= place < last)


def cut(source: int, marks: Iterable[Marks], ranges: Iterable[Range]) -> Iterator[Marks]:
    """Yield the parts of a source's marks that lie in these ranges, without next tries."""
    runs = FailureRuns()
    for _, start, end, mark in marks:
        runs.put(start, end, mark._replace(next_ms=0))
    for low, high in ranges:
        for marked in runs.within(low, high):
            yield source, *marked


def mark_of(said: FailureMark, numbers: Sequence[int], *, keeps_tries: bool) -> Marks:
    """
    Return the facts that an adopted mark contains.

    Args:
        numbers: the numbers of the faults that accompany it.
        keeps_tries: the owner is the same, and tries the messages when it said.
    """
    fault = numbers[said.fault] if 0 <= said.fault < len(numbers) else UNKNOWN_FAULT
    next_ms = said.next_ms if keeps_tries else 0
    return said.source, said.start, said.end, Mark(said.since_ms, said.at_ms, fault, next_ms)


# ── as bytes ──────────────────────────────────────────────────────────────────────────────────────
class ParkedImage(msgspec.Struct, frozen=True, array_like=True):
    """The fields of an image. Missing fields have their defaults."""

    keys: list[tuple[ParkKey, ParkState, int, Failure | None, list[tuple[int, bytes, bytes]]]]
    frozen: bool
    adopted: list[int]
    sources: list[int] = []
    edits: list[tuple[ParkKey, EditedMessage]] = []
    faults: list[tuple[int, Fault]] = []
    failures: list[tuple[ParkKey, int, int, tuple[bytes, bytes, bytes, bytes, bytes]]] = []
    tokens: list[tuple[ParkKey, int]] = []
    adopted_under: list[tuple[int, int]] = []
    passed: list[tuple[int, int]] = []
    taking: list[int] = []
    children_tell: bool = False


_NEEDED_FIELDS = 4
"""The number of fields that are always written. Of the others, those at the end that have their
defaults are left out.
"""


def encode_image(
    parked: Mapping[ParkKey, ParkedKey],
    ancestors: tuple[bool, list[int], list[int]],
    edits: Sequence[tuple[ParkKey, EditedMessage]],
    faults: Sequence[tuple[int, Fault]],
    more: tuple[Mapping[int, int], Mapping[int, int], Iterable[int], bool],
) -> bytes:
    """
    Return an image.

    Args:
        ancestors: whether the children have it, the adopted parents, and the ancestors that keep
            messages.
        more: parent → the token of the owner that adopted it; `passed`: logical partition, or
            LOOSE_PLACE → own offset; the parents that are being taken over; and whether the
            children notify the ancestors.
    """
    keys = [
        (
            key,
            each.state,
            each.since_ms,
            each.failure,
            [(source, *runs.packed()) for source, runs in each.pieces.items()],
        )
        for key, each in parked.items()
    ]
    failures = [
        (key, source, runs.end, runs.packed())
        for key, each in parked.items()
        for source, runs in each.failures.items()
    ]
    tokens = [(key, each.token) for key, each in parked.items() if each.token]
    under, passed, taking, children_tell = more
    fields: list[object] = [keys, *ancestors, edits, faults if failures else [], failures, tokens]
    fields += [sorted(under.items()), sorted(passed.items()), sorted(taking), children_tell]
    while len(fields) > _NEEDED_FIELDS and not fields[-1]:
        fields.pop()
    return _encode(fields)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ParkedImage).decode


def decode_image(image: bytes) -> ParkedImage:
    """Return the fields of an image, or raise msgspec.MsgspecError."""
    return _decode(image)


def keys_of(image: ParkedImage) -> dict[ParkKey, ParkedKey]:
    """Return the keys of an image, without their edited messages, or raise ValueError."""
    keys: dict[ParkKey, ParkedKey] = {}
    for key, state, since_ms, failure, pieces in image.keys:
        known = keys[key] = ParkedKey(since_ms)
        known.state = state
        known.failure = failure
        for source, starts, ends in pieces:
            known.pieces[source] = OffsetRuns.from_packed(starts, ends)
            known.messages += known.pieces[source].messages
    for key, source, end, columns in image.failures:
        if key not in keys:
            raise ValueError(f"failures of key {key!r:.80}, of which nothing is parked")
        keys[key].failures[source] = FailureRuns.from_packed(columns, end)
    for key, token in image.tokens:
        if key not in keys:
            raise ValueError(f"the token of key {key!r:.80}, of which nothing is parked")
        keys[key].token = token
    return keys

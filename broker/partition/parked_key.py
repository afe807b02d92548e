"""Holds the parked messages of one key by source partition, with their failures and operators'
edits, and encodes the image of all keys. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import msgspec

from ...protocol.offsets import IntervalSet, Range
from ...protocol.parked import (
    AncestorReleased,
    EditedMessage,
    Failure,
    FailureMark,
    Fault,
    ParkKey,
    ParkState,
    is_loose,
)
from ...protocol.routing import logical_partition
from .failure_ranges import UNKNOWN, UNKNOWN_FAULT, FailureRanges, Mark, exceeds_range_limit
from .offset_ranges import OffsetRanges

Row = tuple[int, int, int]
"""The source, start and end of a range of parked messages."""
MessageRef = tuple[int, int]
"""The source and offset of a message."""
NO_LOGICAL_PARTITION = -1
"""Stands for the logical partition of loose messages, which have none, and of displaced ones."""


class MarkedRow(NamedTuple):
    """Messages `[start, end)` of a source, and how they failed."""

    source: int
    start: int
    end: int
    mark: Mark


def logical_partition_of(key: ParkKey) -> int:
    """Return the logical partition of a key, or NO_LOGICAL_PARTITION."""
    return (
        NO_LOGICAL_PARTITION
        if is_loose(key) or not isinstance(key, bytes)
        else logical_partition(key)
    )


def is_released(change: AncestorReleased, logical_partition: int) -> bool:
    """Return True if a child no longer needs messages of a logical partition."""
    if logical_partition == NO_LOGICAL_PARTITION:
        return change.includes_loose
    return change.range_start <= logical_partition < change.range_end


def count_messages(ranges: Iterable[Range]) -> int:
    """Return the number of messages in disjoint ranges."""
    return sum(end - start for start, end in ranges)


def select_sources(
    keys: Mapping[ParkKey, ParkedKey], sources: Collection[int]
) -> dict[ParkKey, ParkedKey]:
    """Return only the parked messages of these sources, by key."""
    copies = {key: parked.copy_sources(sources) for key, parked in keys.items()} if sources else {}
    return {key: parked for key, parked in copies.items() if parked.messages}


class ParkedKey:
    """The parked messages of a key."""

    __slots__ = (
        "displaced_sources",
        "edits",
        "failure",
        "failures",
        "messages",
        "offsets_by_source",
        "owner_token",
        "since_ms",
        "state",
    )

    def __init__(self, since_ms: int) -> None:
        self.state = ParkState.PARKED
        self.since_ms = since_ms
        self.failure: Failure | None = None
        self.owner_token = 0
        """The token of the owner that handles messages of the key without a stored redrive, so that
        the key stays parked if the owner crashes; 0 if there is none.
        """
        self.offsets_by_source: dict[int, OffsetRanges] = {}
        """Maps sources to offsets. Sorted by source, which is the order of the messages."""
        self.messages = 0
        self.edits: dict[MessageRef, EditedMessage] = {}
        """Maps each (source, offset) to the message with which an operator replaced it."""
        self.failures: dict[int, FailureRanges] = {}
        """Maps each source to how its messages failed. Only for loose messages."""
        self.displaced_sources: frozenset[int] = frozenset()
        """The sources from which messages of the key were adopted as displaced, although the range
        of this partition contains the key. Some may not have parked messages any more.
        """

    def is_being_handled(self, token: int) -> bool:
        """Return True if the owner with this token may be handling messages of the key."""
        return self.state is ParkState.REDRIVING or 0 < self.owner_token == token

    def contains(self, ref: MessageRef) -> bool:
        """Return True if a message is parked under this key."""
        return self.intersects(ref[0], ((ref[1], ref[1] + 1),))

    def intersects(self, source: int, ranges: Iterable[Range]) -> bool:
        """Return True if a message of these ranges is parked under this key."""
        offset_ranges = self.offsets_by_source.get(source)
        return offset_ranges is not None and any(
            offset_ranges.intersection(start, end) for start, end in ranges
        )

    def count_rows(self) -> int:
        """Return the number of ranges, or 1 if there are none."""
        return max(
            1, sum(offset_ranges.range_count for offset_ranges in self.offsets_by_source.values())
        )

    def rows(self, first: int = 0, count: int = 1 << 62) -> Iterator[Row]:
        """Yield up to `count` ranges, beginning with range `first`. The oldest messages come
        first.
        """
        for source, offset_ranges in self.offsets_by_source.items():
            if first < offset_ranges.range_count:
                for start, end in offset_ranges.page(first, count):
                    yield source, start, end
                count -= offset_ranges.range_count - first
            first = max(first - offset_ranges.range_count, 0)
            if count <= 0:
                return

    def add(self, source: int, start: int, end: int) -> list[Range]:
        """Add messages of a source, and return the ranges that are new."""
        offset_ranges = self.offsets_by_source.get(source)
        if offset_ranges is None:
            offset_ranges = OffsetRanges()
            self.offsets_by_source = dict(
                sorted(
                    [*self.offsets_by_source.items(), (source, offset_ranges)], key=itemgetter(0)
                )
            )
        new_ranges = offset_ranges.add(start, end)
        self.messages += count_messages(new_ranges)
        return new_ranges

    def remove(self, source: int, start: int, end: int) -> list[Range]:
        """Remove messages of a source, and return the ranges that had been parked."""
        offset_ranges = self.offsets_by_source.get(source)
        if offset_ranges is None:
            return []
        removed_ranges = offset_ranges.remove(start, end)
        if not offset_ranges:
            del self.offsets_by_source[source]
        self.messages -= count_messages(removed_ranges)
        failures = self.failures.get(source)
        if failures is not None:
            if offset_ranges:
                for low, high in removed_ranges:
                    failures.clear_marks(low, high, offset_ranges)
            else:
                del self.failures[source]
        return removed_ranges

    def copy_sources(self, sources: Collection[int]) -> ParkedKey:
        """Return a copy with only these sources, none of them being handled. It shares the ranges,
        so the original must no longer be changed.
        """
        copy = ParkedKey(self.since_ms)
        copy.state = self.state
        copy.failure = self.failure
        copy.offsets_by_source = {
            source: offset_ranges
            for source, offset_ranges in self.offsets_by_source.items()
            if source in sources
        }
        copy.messages = sum(
            offset_ranges.messages for offset_ranges in copy.offsets_by_source.values()
        )
        copy.edits = {ref: edit for ref, edit in self.edits.items() if ref[0] in sources}
        copy.failures = {
            source: failure_ranges
            for source, failure_ranges in self.failures.items()
            if source in sources
        }
        copy.displaced_sources = self.displaced_sources.intersection(sources)
        return copy

    def split_displaced(self) -> tuple[ParkedKey, ParkedKey]:
        """Return copies with the messages of the `displaced_sources`, and with the others. They
        share the ranges.
        """
        other_sources = self.offsets_by_source.keys() - self.displaced_sources
        copies = self.copy_sources(self.displaced_sources), self.copy_sources(other_sources)
        for copy in copies:
            copy.owner_token = self.owner_token
        return copies

    # ── failures ──────────────────────────────────────────────────────────────────────────────────
    def failure_marks(self, source: int, ranges: Iterable[Range]) -> list[MarkedRow]:
        """Return the known failure marks of messages of a source."""
        failure_ranges = self.failures.get(source)
        if failure_ranges is None:
            return []
        return [
            MarkedRow(source, *marked_range)
            for low, high in ranges
            for marked_range in failure_ranges.marks_in(low, high)
        ]

    def set_failure_marks(self, marks: Iterable[MarkedRow]) -> None:
        """Record how parked messages failed."""
        for source, start, end, mark in marks:
            failure_ranges, parked = self.failures.get(source), self.offsets_by_source.get(source)
            if failure_ranges is None:
                failure_ranges = self.failures[source] = FailureRanges()
                if parked:
                    *_, (_, last) = parked.page(parked.range_count - 1, 1)
                    failure_ranges.set_mark(parked.first, last, UNKNOWN)
            failure_ranges.set_mark(start, end, mark, parked)
        while exceeds_range_limit(self.failures.values()):
            max(self.failures.values(), key=len).merge_oldest_ranges()

    def rows_with_marks(self, after_ref: MessageRef, count: int) -> Iterator[MarkedRow]:
        """Yield the messages at or after `after_ref` with their failure marks, from up to `count`
        ranges of each source.
        """
        for source, offset_ranges in self.offsets_by_source.items():
            if source < after_ref[0]:
                continue
            offset = after_ref[1] if source == after_ref[0] else 0
            for low, end in offset_ranges.page(offset_ranges.count_ranges_before(offset), count):
                start = max(low, offset)
                marked_rows = self.failure_marks(source, ((start, end),)) or [
                    MarkedRow(source, start, end, UNKNOWN)
                ]
                yield from marked_rows

    def list_marks(self, first: int, count: int) -> Iterator[MarkedRow]:
        """Yield up to `count` failure marks, beginning with mark `first`."""
        for source, failure_ranges in self.failures.items():
            if first < len(failure_ranges):
                for marked_range in failure_ranges.rows(first, count):
                    yield MarkedRow(source, *marked_range)
                count -= len(failure_ranges) - first
            first = max(first - len(failure_ranges), 0)
            if count <= 0:
                return

    def count_marks(self) -> int:
        """Return the number of failure marks."""
        return sum(map(len, self.failures.values()))

    @property
    def retry_at_ms(self) -> int | None:
        """The earliest time of a next try as reported by the owner, in milliseconds since 1970, or
        None if unknown.
        """
        times = [failure_ranges.retry_at_ms for failure_ranges in self.failures.values()]
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    def set_retry_time(self, ref: MessageRef, retry_at_ms: int) -> Callable[[], None]:
        """Record when a message is retried, if it is parked. Return a function that undoes it."""
        source, offset = ref
        rows = self.failure_marks(source, ((offset, offset + 1),)) if self.contains(ref) else []
        self._set_retry_time_of(rows, retry_at_ms)
        return partial(self.set_failure_marks, rows)

    def _set_retry_time_of(self, rows: Iterable[MarkedRow], retry_at_ms: int) -> None:
        self.set_failure_marks(
            row._replace(mark=row.mark._replace(retry_at_ms=retry_at_ms)) for row in rows
        )

    def clear_retry_times(self) -> Callable[[], None]:
        """Forget the times of next tries. Return a function that undoes it."""
        cleared_times = {source: each.clear_retry_times() for source, each in self.failures.items()}

        def undo() -> None:
            for source, retry_times in cleared_times.items():
                for start, end, retry_at_ms in retry_times.rows():
                    rows = self.failure_marks(source, ((start, end),))
                    self._set_retry_time_of(rows, retry_at_ms)

        return undo

    # ── edits ─────────────────────────────────────────────────────────────────────────────────────
    def pop_edits(
        self, source: int, removed_ranges: Iterable[Range]
    ) -> dict[MessageRef, EditedMessage]:
        """Remove and return the edits of messages that are no longer parked."""
        if not self.edits:
            return {}
        offsets = IntervalSet(removed_ranges)
        edits = {
            ref: edited
            for ref, edited in self.edits.items()
            if ref[0] == source and ref[1] in offsets
        }
        for ref in edits:
            del self.edits[ref]
        return edits

    def list_edited(self, rows: Sequence[Row]) -> list[MessageRef]:
        """Return the edited messages within consecutive rows."""
        if not (rows and self.edits):
            return []
        first, last = rows[0][:2], (rows[-1][0], rows[-1][2])
        return sorted(ref for ref in self.edits if first <= ref < last)


def clip_marks(
    source: int, marks: Iterable[MarkedRow], ranges: Iterable[Range]
) -> Iterator[MarkedRow]:
    """Clip a source's marks to these ranges, and drop their retry times."""
    failure_ranges = FailureRanges()
    for _, start, end, mark in marks:
        failure_ranges.set_mark(start, end, mark._replace(retry_at_ms=0))
    for low, high in ranges:
        for marked_range in failure_ranges.marks_in(low, high):
            yield MarkedRow(source, *marked_range)


def decode_mark(
    encoded: FailureMark, fault_numbers: Sequence[int], *, keeps_tries: bool
) -> MarkedRow:
    """
    Decode the mark of an adopted key.

    Args:
        fault_numbers: the numbers of the faults that were sent with the key.
        keeps_tries: True to keep the retry time, because the owner is still the same.
    """
    index = encoded.fault
    fault = fault_numbers[index] if 0 <= index < len(fault_numbers) else UNKNOWN_FAULT
    mark = Mark(encoded.since_ms, encoded.at_ms, fault, encoded.retry_at_ms if keeps_tries else 0)
    return MarkedRow(encoded.source, encoded.start, encoded.end, mark)


# ── encoding ──────────────────────────────────────────────────────────────────────────────────────
class ParkedImage(msgspec.Struct, frozen=True, array_like=True):
    """Everything that a group has parked on a partition, as it is stored. Trailing fields that have
    their default values are not written.
    """

    keys: list[tuple[ParkKey, ParkState, int, Failure | None, list[tuple[int, bytes, bytes]]]]
    frozen: bool
    adopted_parents: list[int]
    retaining_ancestors: list[int] = []
    edits: list[tuple[ParkKey, EditedMessage]] = []
    faults: list[tuple[int, Fault]] = []
    failures: list[tuple[ParkKey, int, int, tuple[bytes, bytes, bytes, bytes, bytes]]] = []
    owner_tokens: list[tuple[ParkKey, int]] = []
    adoption_tokens: list[tuple[int, int]] = []
    offsets_for_children: list[tuple[int, int]] = []
    partly_adopted_parents: list[int] = []
    children_notify_ancestors: bool = False
    displaced_sources: list[tuple[ParkKey, list[int]]] = []


_REQUIRED_FIELDS = 4
"""The number of fields that are always written."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ParkedImage).decode


def image_of_keys(
    keys: Mapping[ParkKey, ParkedKey], faults: list[tuple[int, Fault]]
) -> ParkedImage:
    """Return an image that contains the keys but no other state yet."""
    failures = [
        (key, source, failure_ranges.end, failure_ranges.pack())
        for key, parked in keys.items()
        for source, failure_ranges in parked.failures.items()
    ]
    return ParkedImage(
        keys=[
            (
                key,
                parked.state,
                parked.since_ms,
                parked.failure,
                [
                    (source, *offset_ranges.pack())
                    for source, offset_ranges in parked.offsets_by_source.items()
                ],
            )
            for key, parked in keys.items()
        ],
        frozen=False,
        adopted_parents=[],
        edits=[
            (key, parked.edits[ref]) for key, parked in keys.items() for ref in sorted(parked.edits)
        ],
        faults=faults if failures else [],
        failures=failures,
        owner_tokens=[(key, each.owner_token) for key, each in keys.items() if each.owner_token],
        displaced_sources=[
            (key, sorted(each.displaced_sources))
            for key, each in keys.items()
            if each.displaced_sources
        ],
    )


def encode_image(image: ParkedImage) -> bytes:
    """Encode an image for storage."""
    fields = list(msgspec.structs.astuple(image))
    while len(fields) > _REQUIRED_FIELDS and not fields[-1]:
        fields.pop()
    return _encode(fields)


def decode_image(image: bytes) -> ParkedImage:
    """Decode the fields of an image. Raises msgspec.MsgspecError."""
    return _decode(image)


def decode_keys(image: ParkedImage) -> dict[ParkKey, ParkedKey]:
    """Decode the keys of an image, without their edited messages. Raises ValueError."""
    keys: dict[ParkKey, ParkedKey] = {}
    for key, state, since_ms, failure, offsets in image.keys:
        parked = keys[key] = ParkedKey(since_ms)
        parked.state = state
        parked.failure = failure
        for source, starts, ends in offsets:
            parked.offsets_by_source[source] = OffsetRanges.from_packed(starts, ends)
            parked.messages += parked.offsets_by_source[source].messages
    for key, source, end, columns in image.failures:
        if key not in keys:
            raise ValueError(f"failures of key {key!r:.80}, which is not parked")
        keys[key].failures[source] = FailureRanges.from_packed(columns, end)
    for key, token in image.owner_tokens:
        if key not in keys:
            raise ValueError(f"the token of key {key!r:.80}, which is not parked")
        keys[key].owner_token = token
    for key, sources in image.displaced_sources:
        if key not in keys:
            raise ValueError(f"the sources of key {key!r:.80}, which is not parked")
        keys[key].displaced_sources = frozenset(sources)
    return keys

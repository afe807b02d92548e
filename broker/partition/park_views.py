"""Builds the views of a group's parked messages for owners, children and operators, and translates
operators' requests into changes. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from ...protocol.errors import InvalidRequestError
from ...protocol.parked import (
    PARKED_PAGE_BYTES,
    PARKED_ROWS_MAX,
    RETRIED,
    Adopt,
    AdoptedKey,
    AncestorNotified,
    ChangeParkedKey,
    EditedMessage,
    FailureMark,
    Fault,
    Freeze,
    ParkChange,
    ParkedDetail,
    ParkedKeyRow,
    ParkedList,
    ParkedOffsets,
    ParkedTotals,
    ParkedView,
    ParkKey,
    ParkState,
    Redrive,
    Shift,
    Unpark,
    is_loose,
)
from .parked import Parked
from .parked_key import NO_LOGICAL_PARTITION, MessageRef, ParkedKey, Row

KEY_ROW_BYTES = 24
"""The approximate size of a key's row, without the key, in bytes."""
MARK_BYTES = 40
"""The approximate size of a mark, without its text, in bytes."""
TRIES_FOUND_MAX = 100
"""Of the messages that wait for a retry, a search for a key finds those with fewer failed tries."""
_encode = msgspec.msgpack.Encoder().encode


# ── for owners ────────────────────────────────────────────────────────────────────────────────────
def list_parked_keys(parked: Parked, first: int) -> list[ParkedKeyRow]:
    """Return a page of keys, beginning with row `first`. It is limited by PARKED_ROWS_MAX and
    PARKED_PAGE_BYTES.
    """
    rows: list[ParkedKeyRow] = []
    size_bytes = 0
    for key, each in islice(parked.items(), first, first + PARKED_ROWS_MAX):
        rows.append(ParkedKeyRow(key, each.state, each.messages))
        size_bytes += (len(key) if isinstance(key, bytes) else 0) + KEY_ROW_BYTES
        if size_bytes >= PARKED_PAGE_BYTES:
            break
    return rows


def list_parked_offsets(
    parked: Parked, key: ParkKey, *, count: int, first: int = 0
) -> ParkedOffsets:
    """Return the sources and offsets of up to `count` parked messages of a key, in at most
    PARKED_ROWS_MAX ranges. The first `first` ranges are skipped.
    """
    parked_key = parked.get(key)
    if parked_key is None:
        return ParkedOffsets(rows=[], messages=0)
    rows: list[Row] = []
    remaining_count = count
    for source, start, end in parked_key.rows(first, PARKED_ROWS_MAX):
        if remaining_count <= 0:
            break
        rows.append((source, start, min(end, start + remaining_count)))
        remaining_count -= end - start
    edited_refs = parked_key.list_edited(rows)
    return ParkedOffsets(rows=rows, messages=parked_key.messages, edited=edited_refs)


# ── for children, and for the broker's log ───────────────────────────────────────────────────────
def build_adoption_page(
    parked: Parked, predicate: Callable[[int], bool], *, first_row: int = 0
) -> tuple[list[AdoptedKey], int | None]:
    """
    Return a page of the parked messages for whose logical partition, as in `Parked.parts`,
    `predicate` is true, beginning with row `first_row`.

    The rows of all keys come first, then the failure marks, then the edited messages; each counts
    as one row. A page has at most PARKED_ROWS_MAX rows, and ends after the key that exceeds
    PARKED_PAGE_BYTES. An edited message that would exceed it goes to the next page, unless it is
    the first of its page.

    Returns:
        The page, and the first row of the next page, or None if it is the last one.
    """
    return next(_build_pages(parked, predicate, first_row))


class _Part(NamedTuple):
    """The parked messages of a key that one child adopts."""

    key: ParkKey
    parked_key: ParkedKey
    is_displaced: bool


class _Page:
    """A page that is being built."""

    def __init__(self) -> None:
        self.keys: list[AdoptedKey] = []
        self.remaining_rows = PARKED_ROWS_MAX
        self.size_bytes = 0

    @property
    def is_full(self) -> bool:
        """True if nothing more fits."""
        return self.remaining_rows <= 0 or self.size_bytes >= PARKED_PAGE_BYTES

    def add(self, adopted: AdoptedKey, row_count: int, size_bytes: int) -> None:
        """Add a key, or some rows of a key."""
        self.keys.append(adopted)
        self.remaining_rows -= row_count
        self.size_bytes += size_bytes


def _build_pages(
    parked: Parked, predicate: Callable[[int], bool], first_row: int
) -> Iterator[tuple[list[AdoptedKey], int | None]]:
    page, row = _Page(), 0
    parts = [
        _Part(key, part, not is_loose(key) and logical_partition == NO_LOGICAL_PARTITION)
        for key, part, logical_partition in parked.parts()
        if predicate(logical_partition)
    ]
    for count_rows, build_rows in (
        (ParkedKey.count_rows, _build_ranges),
        (ParkedKey.count_marks, _build_marks),
    ):
        for part in parts:
            count = count_rows(part.parked_key)
            index = max(first_row - row, 0)
            while index < count:
                if page.is_full:
                    yield page.keys, row + index
                    page = _Page()
                adopted, row_count = build_rows(parked, part, index, page.remaining_rows)
                page.add(adopted, row_count, len(_encode(adopted)))
                index += row_count
            row += count
    for part in parts:
        for _, edit in sorted(part.parked_key.edits.items()):
            if row >= first_row:
                size_bytes = len(edit.value) + len(edit.properties)
                if page.keys and page.size_bytes + size_bytes > PARKED_PAGE_BYTES:
                    yield page.keys, row
                    page = _Page()
                page.add(_adopted_key(part, edits=(edit,)), 0, size_bytes)
            row += 1
    yield page.keys, None


def _adopted_key(
    part: _Part,
    *,
    rows: tuple[Row, ...] = (),
    edits: tuple[EditedMessage, ...] = (),
    faults: tuple[Fault, ...] = (),
    marks: tuple[FailureMark, ...] = (),
) -> AdoptedKey:
    parked_key = part.parked_key
    return AdoptedKey(
        part.key,
        parked_key.state,
        parked_key.since_ms,
        parked_key.failure,
        rows,
        edits,
        faults,
        marks,
        parked_key.owner_token,
        part.is_displaced,
    )


def _build_ranges(_parked: Parked, part: _Part, first: int, count: int) -> tuple[AdoptedKey, int]:
    """Return up to `count` ranges of a key, beginning with range `first`, and the number of rows
    that they count as: at least one, because a key may have no messages.
    """
    rows = tuple(part.parked_key.rows(first, count))
    return _adopted_key(part, rows=rows), max(len(rows), 1)


def _build_marks(parked: Parked, part: _Part, first: int, count: int) -> tuple[AdoptedKey, int]:
    """Return up to `count` marks of a key, beginning with mark `first`, and how many they are: at
    least one, but otherwise limited by PARKED_PAGE_BYTES.
    """
    faults = _FaultList(parked)
    marks: list[FailureMark] = []
    for source, start, end, mark in part.parked_key.list_marks(first, count):
        fault_index = faults.index_of(mark.fault)
        marks.append(
            FailureMark(
                source, start, end, mark.since_ms, mark.at_ms, fault_index, mark.retry_at_ms
            )
        )
        if faults.size_bytes + MARK_BYTES * len(marks) >= PARKED_PAGE_BYTES:
            break
    adopted = _adopted_key(part, faults=tuple(faults.faults), marks=tuple(marks))
    return adopted, len(marks)


class _FaultList:
    """The distinct faults of a page."""

    def __init__(self, parked: Parked) -> None:
        self.faults: list[Fault] = []
        self.size_bytes = 0
        self._parked = parked
        self._indexes: dict[int, int] = {}

    def index_of(self, number: int) -> int:
        """Return the index of a fault in the list, after adding it if needed, or -1 if it is
        unknown.
        """
        index = self._indexes.get(number)
        if index is None:
            fault = self._parked.fault(number)
            index = self._indexes[number] = -1 if fault is None else len(self.faults)
            if fault is not None:
                self.faults.append(fault)
                self.size_bytes += len(_encode(fault))
        return index


def changes_to_rebuild(parked: Parked) -> Iterator[ParkChange]:
    """
    Yield changes that create this state from an empty one, with one page each. No other change may
    come between them.

    Applied to the present state, they have no effect, so nothing is lost if the log ends between
    two of them.
    """
    for keys, _ in _build_pages(parked, lambda _logical_partition: True, 0):
        if keys:
            yield Adopt(0, tuple(keys), last=False)
    if parked.offsets_for_children:
        yield Adopt(0, (), last=False, passed=tuple(sorted(parked.offsets_for_children.items())))
    for parent in sorted(parked.adopted_parents):
        yield Adopt(parent, (), last=True)
    for parent in sorted(parked.partly_adopted_parents):
        yield Adopt(parent, (), last=False)
    if parked.retaining_ancestors or parked.children_notify_ancestors:
        ancestors = tuple(sorted(parked.retaining_ancestors))
        yield Adopt(
            0,
            (),
            last=False,
            sources=ancestors,
            children_notify_ancestors=parked.children_notify_ancestors,
        )
    for ancestor in sorted(
        (parked.adopted_parents | parked.partly_adopted_parents) - parked.retaining_ancestors
    ):
        yield AncestorNotified(ancestor)
    if parked.frozen:
        yield Freeze()


def offsets_needed_by_children(
    parked: Parked, child_ranges: Collection[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """
    Return, for each logical partition, the lowest offset of this partition that may be parked at a
    child that keeps its adopted messages when this partition is reset.

    Args:
        child_ranges: the half-open ranges of logical partitions of these children. The child that
            contains the partition's first one also has the loose and displaced messages, which are
            reported under -1.
    """
    lowest_offsets = dict(parked.offsets_for_children)
    for _, part, logical_partition in parked.parts() if parked.frozen else ():
        offset_ranges = part.offsets_by_source.get(parked.partition_id)
        if offset_ranges:
            lowest_offsets[logical_partition] = min(
                offset_ranges.first, lowest_offsets.get(logical_partition, offset_ranges.first)
            )

    range_start, _ = parked.logical_partitions

    def is_kept(logical_partition: int) -> bool:
        owner = range_start if logical_partition == NO_LOGICAL_PARTITION else logical_partition
        return any(start <= owner < end for start, end in child_ranges)

    return tuple(sorted(pair for pair in lowest_offsets.items() if is_kept(pair[0])))


# ── for operators ─────────────────────────────────────────────────────────────────────────────────


def build_parked_list(
    parked: Parked,
    group: str,
    first: int,
    count: int,
    *,
    key: ParkKey = None,
    retrying: bool = False,
    next_tries: bool = True,
) -> ParkedList:
    """
    Return up to `count` keys, beginning with row `first`, limited by PARKED_PAGE_BYTES.

    Args:
        key: only this order key, and unordered messages of any key; None: all keys.
        retrying: True to include the messages that wait for a retry, grouped by their number of
            tries.
        next_tries: True to include the retry times, which are valid only while there is an owner.
    """
    views: list[ParkedView] = []
    size_bytes, has_more = 0, False
    rows: Iterable[tuple[ParkKey, ParkedKey]] = parked.items()
    if key is not None:
        wanted: tuple[ParkKey, ...] = (key, None, *range(TRIES_FOUND_MAX))
        rows = ((each, row) for each in wanted if (row := parked.get(each)) is not None)
    listed_keys = (each for each in rows if retrying or not isinstance(each[0], int))
    for listed_key, each in islice(listed_keys, first, None):
        if len(views) == count or size_bytes >= PARKED_PAGE_BYTES:
            has_more = True
            break
        views.append(_build_view(parked.partition_id, listed_key, each, next_tries=next_tries))
        size_bytes += len(msgspec.json.encode(views[-1]))
    return ParkedList(
        partition_id=parked.partition_id,
        group=group,
        frozen=parked.frozen,
        keys=views,
        more=has_more,
        adopted=sorted(parked.adopted_parents),
        totals=_sum_up(parked) if key is None and not first else None,
    )


def _sum_up(parked: Parked) -> ParkedTotals:
    keys = [each for key, each in parked.items() if not isinstance(key, int)]
    failures = (each.failure for each in keys if each.failure is not None)
    return ParkedTotals(
        keys=len(keys),
        messages=sum(each.messages for each in keys),
        since_ms=min((each.since_ms for each in keys), default=0),
        failure=max(failures, key=lambda failure: failure.at_ms, default=None),
    )


def _build_view(
    partition_id: int, key: ParkKey, parked: ParkedKey, *, next_tries: bool
) -> ParkedView:
    source, start, _ = next(parked.rows(0, 1), (partition_id, -1, -1))
    tries = key if isinstance(key, int) else None
    is_begun = tries is not None and tries < 0
    return ParkedView(
        key_hex=key.hex() if isinstance(key, bytes) else None,
        state=ParkState.REDRIVING if is_begun else parked.state,
        messages=parked.messages,
        since_ms=parked.since_ms,
        failure=parked.failure,
        first_source=source,
        first_offset=start,
        tries=-tries - 1 if tries is not None and is_begun else tries,
        next_ms=parked.retry_at_ms if next_tries else None,
    )


def list_offsets_with_failures(
    parked: Parked,
    key: ParkKey,
    *,
    after: MessageRef,
    count: int = PARKED_ROWS_MAX,
    next_tries: bool = True,
) -> ParkedOffsets:
    """
    Return the ranges of a key's parked messages with their failures; all messages of a range have
    the same failure.

    Args:
        after: the source and offset of the first message that may be returned.
        count: the maximum number of ranges; the page also ends at PARKED_PAGE_BYTES.
        next_tries: True to include the retry times, which are valid only while there is an owner.
    """
    parked_key = parked.get(key)
    if parked_key is None:
        return ParkedOffsets(rows=[], messages=0)
    rows: list[Row] = []
    details: list[ParkedDetail] = []
    faults = _FaultList(parked)
    has_more = False
    for source, start, end, mark in parked_key.rows_with_marks(after, count + 1):
        if len(rows) >= count or faults.size_bytes >= PARKED_PAGE_BYTES:
            has_more = True
            break
        rows.append((source, start, end))
        fault_index = faults.index_of(mark.fault)
        retry_at_ms = mark.retry_at_ms if next_tries else 0
        details.append((mark.since_ms, mark.at_ms, fault_index, retry_at_ms))
    edited_refs = parked_key.list_edited(rows)
    return ParkedOffsets(
        rows=rows,
        messages=parked_key.messages,
        edited=edited_refs,
        details=details if is_loose(key) else [],
        faults=faults.faults,
        more=has_more,
    )


def decode_key(key_hex: str | None) -> bytes | None:
    """Decode a key from hexadecimal. None means no key. Raises InvalidRequestError."""
    try:
        return None if key_hex is None else bytes.fromhex(key_hex)
    except ValueError:
        raise InvalidRequestError(f"a key must be hexadecimal, not {key_hex!r:.80}") from None


def changes_for_operator(request: ChangeParkedKey) -> list[ParkChange]:
    """
    Translate an operator's request into changes.

    Raises:
        InvalidRequestError: the key is not hexadecimal, or there are no ranges or too many.
    """
    key = decode_key(request.key_hex)
    rows = request.retry if request.skip is None else request.skip
    if rows is None:
        return [Redrive(key)]
    if not 1 <= len(rows) <= PARKED_ROWS_MAX:
        raise InvalidRequestError(
            f"{len(rows)} ranges of messages: a request may have 1 to {PARKED_ROWS_MAX}"
        )
    if request.retry is None:
        return [Unpark(key, source, ((start, end),)) for source, start, end in rows]
    if not is_loose(key) or request.skip is not None:
        raise InvalidRequestError(
            "retry is only for dead letters and messages without a key, and not with skip"
        )
    return [Shift(key, RETRIED, source, ((start, end),)) for source, start, end in rows]

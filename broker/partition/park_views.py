"""Builds the views of a group's parked messages for owners, children and operators, and translates
requests of operators into changes. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice

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
    FailureMark,
    Fault,
    Freeze,
    ParkChange,
    ParkedDetail,
    ParkedKeyRow,
    ParkedList,
    ParkedOffsets,
    ParkedView,
    ParkKey,
    ParkState,
    Redrive,
    Shift,
    Unpark,
    is_loose,
)
from .parked import Parked
from .parked_key import NO_LOGICAL_PARTITION, MessageRef, ParkedKey, Row, logical_partition_of

KEY_ROW_BYTES = 24
"""The approximate length in bytes of a key's row, without the key."""
MARK_BYTES = 40
"""The approximate length in bytes of a mark, without its text."""
_encode = msgspec.msgpack.Encoder().encode


# ── for owners ────────────────────────────────────────────────────────────────────────────────────
def parked_keys(parked: Parked, first: int) -> list[ParkedKeyRow]:
    """Return a page of keys beginning with the `first`th, limited by PARKED_ROWS_MAX and
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


def parked_offsets(parked: Parked, key: ParkKey, *, count: int, first: int = 0) -> ParkedOffsets:
    """Return the sources and offsets of up to `count` parked messages of a key, in up to
    PARKED_ROWS_MAX ranges, without the first `first` ranges.
    """
    known = parked.get(key)
    if known is None:
        return ParkedOffsets(rows=[], messages=0)
    rows: list[Row] = []
    remaining = count
    for source, start, end in known.rows(first, PARKED_ROWS_MAX):
        if remaining <= 0:
            break
        rows.append((source, start, min(end, start + remaining)))
        remaining -= end - start
    edited = known.edited_in(rows)
    return ParkedOffsets(rows=rows, messages=known.messages, edited=edited)


# ── for children, and for the broker's log ───────────────────────────────────────────────────────
def adopted_page(
    parked: Parked, predicate: Callable[[ParkKey], bool], *, first: int = 0
) -> tuple[list[AdoptedKey], int | None]:
    """
    Return a page of the parked keys for which `predicate` is true, beginning with the `first`th
    row.

    The rows of all keys come first, then the failure marks, then the edited messages; each counts
    as one row. A page has at most PARKED_ROWS_MAX rows, and ends after the key that exceeds
    PARKED_PAGE_BYTES. An edited message that would exceed it goes to the next page, unless it is
    the first of its page.

    Returns:
        The page, and the first row of the next page, or None if it is the last one.
    """
    return next(_pages(parked, predicate, first))


class _Page:
    """A page that is being built."""

    def __init__(self) -> None:
        self.keys: list[AdoptedKey] = []
        self.rows_left = PARKED_ROWS_MAX
        self.size_bytes = 0

    @property
    def is_full(self) -> bool:
        """True if nothing more fits."""
        return self.rows_left <= 0 or self.size_bytes >= PARKED_PAGE_BYTES

    def add(self, adopted: AdoptedKey, rows: int, size_bytes: int) -> None:
        """Add a key, or some rows of a key."""
        self.keys.append(adopted)
        self.rows_left -= rows
        self.size_bytes += size_bytes


def _pages(
    parked: Parked, predicate: Callable[[ParkKey], bool], first: int
) -> Iterator[tuple[list[AdoptedKey], int | None]]:
    page, row = _Page(), 0
    keys = [(key, each) for key, each in parked.items() if predicate(key)]
    for key, each in keys:
        count = each.row_count
        index = max(first - row, 0)
        while index < count:
            if page.is_full:
                yield page.keys, row + index
                page = _Page()
            part = tuple(each.rows(index, page.rows_left))
            of_key = key, each.state, each.since_ms, each.failure
            adopted = AdoptedKey(*of_key, part, token=each.token)
            page.add(adopted, max(len(part), 1), len(_encode(adopted)))
            index += max(len(part), 1)
        row += count
    for key, each in keys:
        count = each.mark_count
        index = max(first - row, 0)
        while index < count:
            if page.is_full:
                yield page.keys, row + index
                page = _Page()
            faults, marks = _marks(parked, each, index, page.rows_left)
            of_key = key, each.state, each.since_ms, each.failure
            adopted = AdoptedKey(*of_key, (), (), faults, marks, each.token)
            page.add(adopted, len(marks), len(_encode(adopted)))
            index += len(marks)
        row += count
    for key, edited in parked.edits():
        if not predicate(key):
            continue
        if row >= first:
            size_bytes = len(edited.value) + len(edited.properties)
            if page.keys and page.size_bytes + size_bytes > PARKED_PAGE_BYTES:
                yield page.keys, row
                page = _Page()
            known = parked.get(key)
            assert known is not None
            of_key = key, known.state, known.since_ms, known.failure
            page.add(AdoptedKey(*of_key, (), (edited,), token=known.token), 0, size_bytes)
        row += 1
    yield page.keys, None


def _marks(
    parked: Parked, key: ParkedKey, first: int, count: int
) -> tuple[tuple[Fault, ...], tuple[FailureMark, ...]]:
    """Return up to `count` marks of a key beginning with the `first`th, limited by
    PARKED_PAGE_BYTES, but at least one.
    """
    faults = _FaultList(parked)
    marks: list[FailureMark] = []
    for source, start, end, mark in key.mark_rows(first, count):
        fault_index = faults.index_of(mark.fault)
        marks.append(
            FailureMark(source, start, end, mark.since_ms, mark.at_ms, fault_index, mark.next_ms)
        )
        if faults.size_bytes + MARK_BYTES * len(marks) >= PARKED_PAGE_BYTES:
            break
    return tuple(faults.faults), tuple(marks)


class _FaultList:
    """The distinct faults of a page."""

    def __init__(self, parked: Parked) -> None:
        self.faults: list[Fault] = []
        self.size_bytes = 0
        self._parked = parked
        self._indexes: dict[int, int] = {}

    def index_of(self, number: int) -> int:
        """Return the index of a fault in the list, adding it if needed, or -1 if it is unknown."""
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
    Yield changes that create this state from an empty one, a page each. No other change may come
    between them.

    Applied to the present state they change nothing, so a log that ends between two of them has
    lost nothing.
    """
    for keys, _ in _pages(parked, lambda _key: True, 0):
        if keys:
            yield Adopt(0, tuple(keys), last=False)
    if parked.passed:
        yield Adopt(0, (), last=False, passed=tuple(sorted(parked.passed.items())))
    for parent in sorted(parked.adopted):
        yield Adopt(parent, (), last=True)
    for parent in sorted(parked.taking):
        yield Adopt(parent, (), last=False)
    if parked.sources or parked.children_tell:
        sources = tuple(sorted(parked.sources))
        yield Adopt(0, (), last=False, sources=sources, children_tell=parked.children_tell)
    for source in sorted((parked.adopted | parked.taking) - parked.sources):
        yield AncestorNotified(source)
    if parked.frozen:
        yield Freeze()


def passed_on(
    parked: Parked, kept: Collection[tuple[int, int]], range_start: int
) -> tuple[tuple[int, int], ...]:
    """
    Return the lowest own offset that children may have parked, by logical partition, for children
    that keep their adopted messages.

    Args:
        kept: half-open ranges of logical partitions of these children.
        range_start: the start of the partition's range. The child that has it also has the loose
            messages, which are reported under -1.
    """
    lowest = dict(parked.passed)
    for key, each in parked.items() if parked.frozen else ():
        logical = logical_partition_of(key)
        runs = each.pieces.get(parked.own)
        if runs:
            lowest[logical] = min(runs.first, lowest.get(logical, runs.first))

    def is_kept(logical: int) -> bool:
        owner = range_start if logical == NO_LOGICAL_PARTITION else logical
        return any(start <= owner < end for start, end in kept)

    return tuple(sorted(pair for pair in lowest.items() if is_kept(pair[0])))


# ── for operators ─────────────────────────────────────────────────────────────────────────────────


def list_keys_page(
    parked: Parked,
    group: str,
    first: int,
    count: int,
    *,
    retrying: bool = False,
    next_tries: bool = True,
) -> ParkedList:
    """
    Return up to `count` keys beginning with the `first`th, limited by PARKED_PAGE_BYTES.

    Args:
        retrying: include the messages that wait for retry, by their number of tries.
        next_tries: include the times of next tries, which are only valid while there is an owner.
    """
    views: list[ParkedView] = []
    size_bytes, has_more = 0, False
    known = (each for each in parked.items() if retrying or not isinstance(each[0], int))
    for key, each in islice(known, first, None):
        if len(views) == count or size_bytes >= PARKED_PAGE_BYTES:
            has_more = True
            break
        views.append(_view(parked.own, key, each, next_tries=next_tries))
        size_bytes += len(msgspec.json.encode(views[-1]))
    return ParkedList(
        partition_id=parked.own, group=group, frozen=parked.frozen, keys=views, more=has_more
    )


def _view(own: int, key: ParkKey, parked: ParkedKey, *, next_tries: bool) -> ParkedView:
    source, start, _ = next(parked.rows(0, 1), (own, -1, -1))
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
        next_ms=parked.next_ms if next_tries else None,
    )


def detailed_offsets(
    parked: Parked,
    key: ParkKey,
    *,
    after: MessageRef,
    count: int = PARKED_ROWS_MAX,
    next_tries: bool = True,
) -> ParkedOffsets:
    """
    Return the ranges of a key's parked messages with their failures; all messages of a range have
    the same one.

    Args:
        after: the source and offset from which messages are returned, inclusive.
        count: the maximum number of ranges; the page also ends at PARKED_PAGE_BYTES.
        next_tries: include the times of next tries, which are only valid while there is an owner.
    """
    known = parked.get(key)
    if known is None:
        return ParkedOffsets(rows=[], messages=0)
    rows: list[Row] = []
    details: list[ParkedDetail] = []
    faults = _FaultList(parked)
    has_more = False
    for source, start, end, mark in known.marked_from(after, count + 1):
        if len(rows) >= count or faults.size_bytes >= PARKED_PAGE_BYTES:
            has_more = True
            break
        rows.append((source, start, end))
        fault_index = faults.index_of(mark.fault)
        next_ms = mark.next_ms if next_tries else 0
        details.append((mark.since_ms, mark.at_ms, fault_index, next_ms))
    edited = known.edited_in(rows)
    return ParkedOffsets(
        rows=rows,
        messages=known.messages,
        edited=edited,
        details=details if is_loose(key) else [],
        faults=faults.faults,
        more=has_more,
    )


def decode_key(key_hex: str | None) -> ParkKey:
    """Decode a key in hexadecimal, or raise InvalidRequestError; None means no key."""
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

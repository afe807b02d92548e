"""Shows a group's parked messages to owners, children and operators, and makes the changes that
operators ask for. Pure.
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
    AncestorTold,
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
from .parked_key import LOOSE_PLACE, ParkedKey, Place, Row, place_of

KEY_ROW_BYTES = 24
"""The approximate length in bytes of a key's row, without the key."""
MARK_BYTES = 40
"""The approximate length in bytes of a mark, without its text."""
_encode = msgspec.msgpack.Encoder().encode


# ── of owners ─────────────────────────────────────────────────────────────────────────────────────
def parked_keys(parked: Parked, first: int) -> list[ParkedKeyRow]:
    """Return keys from the `first`th on: up to PARKED_ROWS_MAX, and until they exceed
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
    """Return where parked messages of a key are, in up to PARKED_ROWS_MAX ranges: `count` messages,
    after the first `first` ranges.
    """
    known = parked.get(key)
    if known is None:
        return ParkedOffsets(rows=[], messages=0)
    rows: list[Row] = []
    left = count
    for source, start, end in known.rows(first, PARKED_ROWS_MAX):
        if left <= 0:
            break
        rows.append((source, start, min(end, start + left)))
        left -= end - start
    edited = known.edited_in(rows)
    return ParkedOffsets(rows=rows, messages=known.messages, edited=edited)


# ── of children, and of the group's own log ───────────────────────────────────────────────────────
def adopted_page(
    parked: Parked, wanted: Callable[[ParkKey], bool], *, first: int = 0
) -> tuple[list[AdoptedKey], int | None]:
    """
    Return the requested keys of everything that is parked, from the `first`th row on.

    A page has at most PARKED_ROWS_MAX rows, and ends after the key that exceeds PARKED_PAGE_BYTES.
    The marks, which say how messages failed, follow all rows; a mark counts as a row. Edited
    messages follow in the same way, but a page ends before the edited message that would exceed
    PARKED_PAGE_BYTES, unless that is its first.

    Args:
        wanted: returns True if the messages of this key are requested.

    Returns:
        The page, and the first row of the next one; None after the last row.
    """
    return next(_pages(parked, wanted, first))


class _Page:
    """A page to which keys are added."""

    def __init__(self) -> None:
        self.keys: list[AdoptedKey] = []
        self.room = PARKED_ROWS_MAX
        self.size_bytes = 0

    @property
    def full(self) -> bool:
        """True if nothing more fits."""
        return self.room <= 0 or self.size_bytes >= PARKED_PAGE_BYTES

    def add(self, adopted: AdoptedKey, rows: int, size_bytes: int) -> None:
        """Add a key, or a part of a key."""
        self.keys.append(adopted)
        self.room -= rows
        self.size_bytes += size_bytes


def _pages(
    parked: Parked, wanted: Callable[[ParkKey], bool], first: int
) -> Iterator[tuple[list[AdoptedKey], int | None]]:
    page, row = _Page(), 0
    keys = [(key, each) for key, each in parked.items() if wanted(key)]
    for key, each in keys:
        count = each.row_count
        place = max(first - row, 0)
        while place < count:
            if page.full:
                yield page.keys, row + place
                page = _Page()
            part = tuple(each.rows(place, page.room))
            of_key = key, each.state, each.since_ms, each.failure
            adopted = AdoptedKey(*of_key, part, token=each.token)
            page.add(adopted, max(len(part), 1), len(_encode(adopted)))
            place += max(len(part), 1)
        row += count
    for key, each in keys:
        count = each.mark_count
        place = max(first - row, 0)
        while place < count:
            if page.full:
                yield page.keys, row + place
                page = _Page()
            faults, marks = _marks(parked, each, place, page.room)
            of_key = key, each.state, each.since_ms, each.failure
            adopted = AdoptedKey(*of_key, (), (), faults, marks, each.token)
            page.add(adopted, len(marks), len(_encode(adopted)))
            place += len(marks)
        row += count
    for key, edited in parked.edits():
        if not wanted(key):
            continue
        if row >= first:
            more = len(edited.value) + len(edited.properties)
            if page.keys and page.size_bytes + more > PARKED_PAGE_BYTES:
                yield page.keys, row
                page = _Page()
            known = parked.get(key)
            assert known is not None
            of_key = key, known.state, known.since_ms, known.failure
            page.add(AdoptedKey(*of_key, (), (edited,), token=known.token), 0, more)
        row += 1
    yield page.keys, None


def _marks(
    parked: Parked, key: ParkedKey, first: int, count: int
) -> tuple[tuple[Fault, ...], tuple[FailureMark, ...]]:
    """Return marks of a key from the `first`th on: up to `count`, and until they exceed
    PARKED_PAGE_BYTES, but at least one.
    """
    faults = _FaultList(parked)
    marks: list[FailureMark] = []
    for source, start, end, mark in key.mark_rows(first, count):
        place = faults.place_of(mark.fault)
        marks.append(
            FailureMark(source, start, end, mark.since_ms, mark.at_ms, place, mark.next_ms)
        )
        if faults.size_bytes + MARK_BYTES * len(marks) >= PARKED_PAGE_BYTES:
            break
    return tuple(faults.faults), tuple(marks)


class _FaultList:
    """The faults of a page, each once."""

    def __init__(self, parked: Parked) -> None:
        self.faults: list[Fault] = []
        self.size_bytes = 0
        self._parked = parked
        self._places: dict[int, int] = {}

    def place_of(self, number: int) -> int:
        """Return the index of a fault in the list, or -1 if the fault is not known."""
        place = self._places.get(number)
        if place is None:
            fault = self._parked.fault(number)
            place = self._places[number] = -1 if fault is None else len(self.faults)
            if fault is not None:
                self.faults.append(fault)
                self.size_bytes += len(_encode(fault))
        return place


def changes_of(parked: Parked) -> Iterator[ParkChange]:
    """
    Yield changes that create this state from an empty one, a page each. Nothing else may happen
    between them.

    They can also be folded over what the earlier log says, and then change nothing. So a log that
    ends between two of them has lost nothing.
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
        yield AncestorTold(source)
    if parked.frozen:
        yield Freeze()


def passed_on(
    parked: Parked, kept: Collection[tuple[int, int]], range_start: int
) -> tuple[tuple[int, int], ...]:
    """
    Return the lowest own offset of each logical partition that children may have parked, if they
    keep what they took over.

    Args:
        kept: half-open ranges of logical partitions of these children.
        range_start: the start of the partition's range. Messages without an order, which are
            reported under -1, belong to the child that has it.
    """
    lowest = dict(parked.passed)
    for key, each in parked.items() if parked.frozen else ():
        place = place_of(key)
        runs = each.pieces.get(parked.own)
        if runs:
            lowest[place] = min(runs.first, lowest.get(place, runs.first))

    def is_kept(place: int) -> bool:
        number = range_start if place == LOOSE_PLACE else place
        return any(start <= number < end for start, end in kept)

    return tuple(sorted(pair for pair in lowest.items() if is_kept(pair[0])))


# ── of operators ──────────────────────────────────────────────────────────────────────────────────


def listed_keys(
    parked: Parked,
    group: str,
    first: int,
    count: int,
    *,
    retrying: bool = False,
    next_tries: bool = True,
) -> ParkedList:
    """
    Return keys that operators know, from the `first`th on: up to `count`, and until they exceed
    PARKED_PAGE_BYTES.

    Args:
        retrying: include the messages that wait for retry, by the number of their tries.
        next_tries: report when they are tried, because their owner is there.
    """
    views: list[ParkedView] = []
    size_bytes, more = 0, False
    known = (each for each in parked.items() if retrying or not isinstance(each[0], int))
    for key, each in islice(known, first, None):
        if len(views) == count or size_bytes >= PARKED_PAGE_BYTES:
            more = True
            break
        views.append(_view(parked.own, key, each, next_tries=next_tries))
        size_bytes += len(msgspec.json.encode(views[-1]))
    return ParkedList(
        partition_id=parked.own, group=group, frozen=parked.frozen, keys=views, more=more
    )


def _view(own: int, key: ParkKey, parked: ParkedKey, *, next_tries: bool) -> ParkedView:
    source, start, _ = next(parked.rows(0, 1), (own, -1, -1))
    tries = key if isinstance(key, int) else None
    begun = tries is not None and tries < 0
    return ParkedView(
        key_hex=key.hex() if isinstance(key, bytes) else None,
        state=ParkState.REDRIVING if begun else parked.state,
        messages=parked.messages,
        since_ms=parked.since_ms,
        failure=parked.failure,
        first_source=source,
        first_offset=start,
        tries=-tries - 1 if tries is not None and begun else tries,
        next_ms=parked.next_ms if next_tries else None,
    )


def detailed_offsets(
    parked: Parked,
    key: ParkKey,
    *,
    after: Place,
    count: int = PARKED_ROWS_MAX,
    next_tries: bool = True,
) -> ParkedOffsets:
    """
    Return where parked messages of a key are, from a place on, and how each of them failed: a range
    has one failure.

    Args:
        after: a source and an offset in it; the first message that is returned is there or after
            it.
        count: the most ranges; there are fewer if their texts exceed PARKED_PAGE_BYTES.
        next_tries: report when they are tried, because their owner is there.
    """
    known = parked.get(key)
    if known is None:
        return ParkedOffsets(rows=[], messages=0)
    rows: list[Row] = []
    details: list[ParkedDetail] = []
    faults = _FaultList(parked)
    more = False
    for source, start, end, mark in known.marked_from(after, count + 1):
        if len(rows) >= count or faults.size_bytes >= PARKED_PAGE_BYTES:
            more = True
            break
        rows.append((source, start, end))
        place = faults.place_of(mark.fault)
        next_ms = mark.next_ms if next_tries else 0
        details.append((mark.since_ms, mark.at_ms, place, next_ms))
    edited = known.edited_in(rows)
    return ParkedOffsets(
        rows=rows,
        messages=known.messages,
        edited=edited,
        details=details if is_loose(key) else [],
        faults=faults.faults,
        more=more,
    )


def key_of(key_hex: str | None) -> ParkKey:
    """Return the key that an operator names, or raise InvalidRequestError if it is not
    hexadecimal.
    """
    try:
        return None if key_hex is None else bytes.fromhex(key_hex)
    except ValueError:
        raise InvalidRequestError(f"a key in hexadecimal, not {key_hex!r:.80}") from None


def operators_change(asked: ChangeParkedKey) -> list[ParkChange]:
    """
    Return the changes that an operator asks for.

    Raises:
        InvalidRequestError: the key is not hexadecimal, there is no message to skip, or there are
            too many.
    """
    key = key_of(asked.key_hex)
    rows = asked.retry if asked.skip is None else asked.skip
    if rows is None:
        return [Redrive(key)]
    if not 1 <= len(rows) <= PARKED_ROWS_MAX:
        raise InvalidRequestError(
            f"{len(rows)} ranges of messages: from 1 to {PARKED_ROWS_MAX} in one request"
        )
    if asked.retry is None:
        return [Unpark(key, source, ((start, end),)) for source, start, end in rows]
    if not is_loose(key) or asked.skip is not None:
        raise InvalidRequestError(
            "retry is of dead letters, or of messages without a key, and is no skip"
        )
    return [Shift(key, RETRIED, source, ((start, end),)) for source, start, end in rows]

"""Decides which of the changes that are asked for are written: what is made already is left out, the rest must fit.  Pure.

Invariants
    Only messages that are not acked are parked: a repeat of a request never parks what was handled since.
    A change is seen as those before it in the request leave the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...protocol.errors import (
    EditsFullError,
    InvalidRequestError,
    ParkedRedrivenError,
    ParkFullError,
    ParkMovedError,
)
from ...protocol.groups import TRIES_MAX_MAX
from ...protocol.ids import MAX_I64
from ...protocol.limits import KEY_BYTES_MAX
from ...protocol.offsets import AckedOffsets, Range
from ...protocol.parked import (
    EDITS_BYTES_MAX,
    EDITS_MAX,
    PARKED_KEYS_MAX,
    PARKED_MESSAGES_MAX,
    PARKED_ROWS_MAX,
    Adopt,
    AncestorTold,
    Clear,
    Edit,
    Free,
    Freeze,
    Park,
    ParkChange,
    ParkKey,
    ParkState,
    Redrive,
    Shift,
    Unneeded,
    Unpark,
    is_loose,
)
from .acks import decide_ack
from .offset_runs import OffsetRuns
from .parked import Parked


def park_changes(
    parked: Parked, changes: Iterable[ParkChange], acked: AckedOffsets, *, next_offset: int
) -> list[ParkChange]:
    """
    What has to be written for the changes of one request.

    Args:
        acked: the progress of the group.
        next_offset: one past the last message that may be parked.

    Raises:
        ParkMovedError: the children have these messages.
        ParkFullError: a limit would be passed.
        OverloadedError: the group would have too many ranges of acked messages above its cursor.
        InvalidRequestError: a change is impossible.
        ParkedMessageUnknownError, ParkedRedrivenError, EditsFullError: a message cannot be edited.
    """
    return _Checks(parked, acked, next_offset).wanted(changes)


class _Checks:
    """Looks at the changes in turn; what those before have changed is in `_added`, `_gone` and `_states`."""

    def __init__(self, parked: Parked, acked: AckedOffsets, next_offset: int) -> None:
        self._parked = parked
        self._acked = acked
        self._next_offset = next_offset
        self._taken = OffsetRuns()
        """Messages that the request parks."""
        self._added: dict[ParkKey, OffsetRuns] = {}
        """The same by key."""
        self._gone: dict[tuple[ParkKey, int], OffsetRuns] = {}
        """Key and source → messages that are parked no longer."""
        self._states: dict[ParkKey, ParkState | None] = {}
        """The state of a key behind the changes so far; None: it is freed."""
        self._checks: dict[type[Any], Callable[[Any], ParkChange | None]] = {
            Park: self._park,
            Unpark: self._unpark,
            Free: self._free,
            Shift: self._shift,
            Redrive: self._redrive,
            Adopt: self._adopt,
            Freeze: lambda change: None if parked.frozen else change,
            Clear: lambda change: change if parked else None,
            Unneeded: lambda change: change if parked.frozen and len(parked) else None,
            Edit: self._edit,
            AncestorTold: lambda change: change if change.source in parked.sources else None,
        }

    def wanted(self, changes: Iterable[ParkChange]) -> list[ParkChange]:
        """The changes to write."""
        wanted = []
        for change in changes:
            if self._parked.frozen and not isinstance(change, Freeze | Clear | Unneeded):
                raise ParkMovedError(partition_id=self._parked.own)
            checked = self._checks[type(change)](change)
            if checked is not None:
                wanted.append(checked)
        self._check_room()
        # A key whose last message an operator has skipped waits for no operator: its owner frees it.
        emptied = [
            key for key in dict.fromkeys(key for key, _ in self._gone) if not self._left(key)
        ]
        return wanted + [
            Redrive(key)
            for key in emptied
            if not is_loose(key) and self._state(key) is ParkState.PARKED
        ]

    def _state(self, key: ParkKey) -> ParkState | None:
        """None if the key is not parked."""
        parked = self._parked.get(key)
        return self._states.get(key, None if parked is None else parked.state)

    def _left(self, key: ParkKey) -> int:
        """The number of the key's parked messages."""
        parked = self._parked.get(key)
        added = self._added.get(key)
        gone = sum(runs.messages for (other, _), runs in self._gone.items() if other == key)
        return (parked.messages if parked else 0) + (added.messages if added else 0) - gone

    def _check_room(self) -> None:
        parked = self._parked
        new = sum(
            state is not None and parked.get(key) is None for key, state in self._states.items()
        )
        if new and len(parked) + new > PARKED_KEYS_MAX:
            raise ParkFullError(
                f"the group has {len(parked)} parked keys on partition {parked.own}",
                limit=PARKED_KEYS_MAX,
            )
        if self._taken and parked.messages + self._taken.messages > PARKED_MESSAGES_MAX:
            raise ParkFullError(
                f"the group has {parked.messages} parked messages on partition {parked.own}",
                limit=PARKED_MESSAGES_MAX,
            )
        decide_ack(self._acked, list(self._taken), next_offset=self._next_offset)

    def _park(self, change: Park) -> Park | None:
        _check_key(change.key)
        _check_ranges(change.ranges, self._next_offset)
        known = self._state(change.key) is not None
        if not known and change.failure is None:
            raise InvalidRequestError("the key is not parked, and no failure is given")
        acked, taken = self._acked, self._taken
        new = tuple(
            part
            for start, end in change.ranges
            for low, high in _unacked(acked, start, end)
            for part in taken.add(low, high)
        )
        if not new and (change.failure is None or not known):
            return None
        added = self._added.setdefault(change.key, OffsetRuns())
        for start, end in new:
            added.add(start, end)
        if change.failure is not None:
            self._states[change.key] = ParkState.PARKED
        return Park(change.key, new, change.failure)

    def _unpark(self, change: Unpark) -> Unpark | None:
        _check_ranges(change.ranges, MAX_I64)
        if self._state(change.key) is None:
            return None
        gone = self._gone.setdefault((change.key, change.source), OffsetRuns())
        parked, added = self._parked.get(change.key), self._added.get(change.key)
        there = [] if parked is None else [parked.pieces.get(change.source)]
        there += [added] if change.source == self._parked.own else []
        for start, end in change.ranges:
            for runs in there:
                for low, high in runs.within(start, end) if runs else ():
                    gone.add(low, high)
        return change

    def _shift(self, change: Shift) -> Shift | None:
        _check_key(change.key)
        _check_key(change.to)
        _check_ranges(change.ranges, MAX_I64)
        return None if self._state(change.key) is None or change.to == change.key else change

    def _free(self, change: Free) -> Free | None:
        if self._state(change.key) is None:
            return None
        if left := self._left(change.key):
            raise InvalidRequestError(f"the key has {left} parked messages")
        self._states[change.key] = None
        return change

    def _redrive(self, change: Redrive) -> Redrive | None:
        if self._state(change.key) is not ParkState.PARKED:
            return None
        self._states[change.key] = ParkState.REDRIVING
        return change

    def _edit(self, change: Edit) -> Edit:
        edited, parked = change.message, self._parked
        before = parked.edited(change.key, (edited.source, edited.offset))
        if self._state(change.key) is ParkState.REDRIVING:
            raise ParkedRedrivenError(partition_id=parked.own)
        others = [other for _, other in parked.edits() if other is not before]
        if len(others) >= EDITS_MAX:
            raise EditsFullError(f"it has {len(others)} edited messages", limit=EDITS_MAX)
        size_bytes = sum(len(each.value) + len(each.properties) for each in (*others, edited))
        if size_bytes > EDITS_BYTES_MAX:
            raise EditsFullError(
                f"its edited messages would have {size_bytes} bytes", limit=EDITS_BYTES_MAX
            )
        return change

    def _adopt(self, change: Adopt) -> Adopt | None:
        if change.parent in self._parked.adopted:
            return None
        rows = [row for key in change.keys for row in key.rows]
        if not 1 <= change.parent <= MAX_I64 or change.parent == self._parked.own:
            raise InvalidRequestError(f"no parent of partition {self._parked.own}")
        if len(rows) > PARKED_ROWS_MAX:
            raise InvalidRequestError(f"{len(rows)} rows: at most {PARKED_ROWS_MAX} in one change")
        for key in change.keys:
            _check_key(key.key)
        for source, start, end in rows:
            _check_ranges(((start, end),), MAX_I64)
            if not 1 <= source <= MAX_I64:
                raise InvalidRequestError(f"no partition {source}")
        return change


def _check_key(key: ParkKey) -> None:
    if isinstance(key, int) and not 1 <= abs(key) <= TRIES_MAX_MAX:
        raise InvalidRequestError(f"no message fails {key} times")
    if isinstance(key, bytes) and len(key) > KEY_BYTES_MAX:
        raise InvalidRequestError(f"a key of {len(key)} bytes: at most {KEY_BYTES_MAX}")


def _check_ranges(ranges: Iterable[Range], next_offset: int) -> None:
    for start, end in ranges:
        if not 0 <= start < end <= next_offset:
            raise InvalidRequestError(f"no stored messages: [{start}, {end})")


def _unacked(acked: AckedOffsets, start: int, end: int) -> Iterator[Range]:
    """The parts of `[start, end)` that are not acked."""
    offset = acked.next_unacked(start)
    while offset < end:
        upto = min(end, acked.next_acked(offset))
        yield offset, upto
        offset = acked.next_unacked(upto)

"""Decides which of the requested changes are written: changes that are already made are left out,
and the others must fit. Pure.

Invariants
    Only messages that are not acked are parked: a repeated request never parks messages that were
    handled meanwhile. Each change is judged by the state that the earlier changes of the request
    leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from ...protocol.errors import (
    BusyError,
    InvalidRequestError,
    OverloadedError,
    Reason,
    StaleRouteError,
)
from ...protocol.groups import TRIES_MAX_MAX
from ...protocol.ids import MAX_I64
from ...protocol.limits import KEY_BYTES_MAX
from ...protocol.offsets import AckedOffsets, Range
from ...protocol.parked import (
    EDITS_BYTES_MAX,
    EDITS_MAX,
    LOOSE,
    PARKED_KEYS_MAX,
    PARKED_MESSAGES_MAX,
    PARKED_ROWS_MAX,
    RETRIED,
    Adopt,
    AdoptedKey,
    AncestorTold,
    AskedChange,
    Clear,
    DeadLetterKey,
    Edit,
    FailAgain,
    Free,
    Freeze,
    Park,
    ParkChange,
    ParkKey,
    ParkOrDeadLetter,
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
from .parked_key import message_count


def park_changes(
    parked: Parked,
    changes: Iterable[AskedChange],
    acked: AckedOffsets,
    *,
    next_offset: int,
    token: int,
) -> list[ParkChange]:
    """
    Return the changes that have to be written for one request.

    Args:
        acked: the progress of the group.
        next_offset: the offset after the last message that may be parked.
        token: the fence; messages that an earlier owner had with handlers no longer count as being
            handled.

    Raises:
        StaleRouteError: the children have these messages.
        OverloadedError: a limit would be exceeded.
        OverloadedError: the group would have too many ranges of acked messages above its cursor.
        InvalidRequestError: a change is impossible.
        NotFoundError, BusyError, OverloadedError: a message cannot be edited.
    """
    return _Checks(parked, acked, next_offset, token).wanted(changes)


_PRECEDENCE = ParkState.PARKED, ParkState.DEAD, ParkState.REDRIVING


class _Checks:
    """Checks the changes in turn; the effects of earlier ones are in `_added`, `_gone` and
    `_states`.
    """

    def __init__(self, parked: Parked, acked: AckedOffsets, next_offset: int, token: int) -> None:
        self._parked = parked
        self._acked = acked
        self._next_offset = next_offset
        self._token = token
        self._taken = OffsetRuns()
        """The messages that the request parks."""
        self._added: dict[ParkKey, OffsetRuns] = {}
        """Key → the messages that the request parks."""
        self._gone: dict[tuple[ParkKey, int], OffsetRuns] = {}
        """Key and source → messages that are no longer parked."""
        self._states: dict[ParkKey, ParkState | None] = {}
        """Key → its state after the changes so far; None means that it is freed."""
        self._redriven: set[ParkKey] = set()
        """Loose keys that are redriven although another of their messages has failed: the redrive
        continues.
        """
        self._cleared = False
        """True if the parked messages are forgotten before the changes that follow."""
        self._changed = False
        """True once the request has made a change that is not an adoption."""
        self._adopted: dict[tuple[ParkKey, int], OffsetRuns] = {}
        """Key and source → messages that the request adopts."""
        self._alive, self._dead = _rooms(parked)
        self._checks: dict[type[Any], Callable[[Any], ParkChange | None]] = {
            Park: self._park,
            ParkOrDeadLetter: self._park_or_bury,
            Unpark: self._unpark,
            Free: self._free,
            Shift: self._shift,
            FailAgain: self._fail_again,
            Redrive: self._redrive,
            Adopt: self._adopt,
            Freeze: lambda change: None if parked.frozen else change,
            Clear: self._clear,
            Unneeded: lambda change: change if parked.keeps_for_children else None,
            Edit: self._edit,
            AncestorTold: self._told,
        }

    def wanted(self, changes: Iterable[AskedChange]) -> list[ParkChange]:
        """Return the changes to write."""
        wanted = []
        for change in changes:
            frozen = self._parked.frozen and not self._cleared
            if frozen and not isinstance(change, Freeze | Clear | Unneeded):
                raise StaleRouteError(Reason.PARK_MOVED, partition_id=self._parked.own)
            self._changed = self._changed or not isinstance(change, Adopt)
            checked = self._checks[type(change)](change)
            if checked is not None:
                wanted.append(checked)
        self._check_room()
        # A key whose last message was skipped by an operator does not wait for an operator: its
        # owner frees it.
        emptied = [
            key
            for key in dict.fromkeys(key for key, _ in self._gone)
            if not (is_loose(key) or self._left(key))
            and self._state(key) in {ParkState.PARKED, ParkState.DEAD}
        ]
        redriven = [key for key in LOOSE if key in self._redriven and self._left(key)]
        return wanted + [Redrive(key) for key in (*emptied, *redriven)]

    def _state(self, key: ParkKey) -> ParkState | None:
        """Return the state of a key, or None if the key is not parked."""
        parked = self._parked.get(key)
        return self._states.get(key, None if parked is None else parked.state)

    def _is_handled(self, key: ParkKey) -> bool:
        """Return True if messages of the key may be with handlers."""
        parked = self._parked.get(key)
        return self._state(key) is ParkState.REDRIVING or (
            parked is not None and parked.is_handled(self._token)
        )

    def _left(self, key: ParkKey) -> int:
        """Return the number of the key's parked messages."""
        parked = self._parked.get(key)
        added = self._added.get(key)
        gone = sum(runs.messages for (other, _), runs in self._gone.items() if other == key)
        return (parked.messages if parked else 0) + (added.messages if added else 0) - gone

    def _check_room(self) -> None:
        named = ("parked keys", "parked messages"), ("dead keys", "dead letters")
        for room, (keys, messages) in zip((self._alive, self._dead), named, strict=True):
            if room.keys and room.keys_over(PARKED_KEYS_MAX):
                raise OverloadedError(
                    Reason.PARK_FULL,
                    f"the group has {room.keys_before} {keys} on partition {self._parked.own}",
                    limit=PARKED_KEYS_MAX,
                )
            if room.messages and room.messages_over(PARKED_MESSAGES_MAX):
                raise OverloadedError(
                    Reason.PARK_FULL,
                    f"the group has {room.messages_before} {messages} on partition "
                    f"{self._parked.own}",
                    limit=PARKED_MESSAGES_MAX,
                )
        decide_ack(self._acked, list(self._taken), next_offset=self._next_offset)

    def _park(self, change: Park, room: _Room | None = None) -> Park | None:
        new = self._new_of(change)
        known = self._state(change.key) is not None
        # Acked messages without an order, such as those that retention has removed, do not affect
        # the others.
        stays = change.failure is None or not known or (is_loose(change.key) and change.ranges)
        if not new and stays:
            return None
        self._add(change.key, new)
        if change.failure is not None:
            if not (is_loose(change.key) and change.ranges):
                self._redriven.discard(change.key)
            elif self._state(change.key) is ParkState.REDRIVING:
                self._redriven.add(change.key)
            self._states[change.key] = ParkState.PARKED
        is_dead = change.key is None or self._state(change.key) is ParkState.DEAD
        room = room or (self._dead if is_dead else self._alive)
        room.messages += message_count(new)
        room.keys += not known and change.key is not None
        return Park(change.key, new, change.failure, self._token_behind(change))

    def _token_behind(self, change: Park) -> int:
        """Return the token of the owner that has messages of the key with handlers after a change
        like Park.
        """
        if change.token not in {0, self._token}:
            raise InvalidRequestError(f"{change.token} is not the token of the owner")
        parked = self._parked.get(change.key)
        if change.failure is None or parked is None or not (is_loose(change.key) and change.ranges):
            return change.token
        return parked.token  # another loose message fails; the others stay with handlers

    def _park_or_bury(self, change: ParkOrDeadLetter) -> Park | DeadLetterKey | None:
        key, failure = change.key, change.failure
        known, state = self._state(key) is not None, self._state(key)
        new = message_count(part for part in self._new_of(change, take=False))
        fits = not (
            self._alive.messages_over(PARKED_MESSAGES_MAX, new)
            or (not known and self._alive.keys_over(PARKED_KEYS_MAX, 1))
        )
        if fits or key is None or (failure is None and state is ParkState.DEAD):
            return self._park(Park(key, change.ranges, failure))
        if failure is None and state is ParkState.REDRIVING:
            # It is being handled, and keeps its state; it counts as dead letters.
            return self._park(Park(key, change.ranges), self._dead)
        if is_loose(key):
            return self._park(Park(None, change.ranges, failure))
        assert isinstance(key, bytes)
        ranges = self._new_of(change)
        if not ranges and failure is None:
            return None
        parked = self._parked.get(key)
        self._add(key, ranges)
        self._states[key] = ParkState.DEAD
        # The whole key becomes dead. The room that it frees is available only to later requests.
        before = parked.messages if parked is not None and state is not ParkState.DEAD else 0
        self._dead.messages += before + message_count(ranges)
        self._dead.keys += 1
        return DeadLetterKey(key, ranges, failure)

    def _new_of(self, change: Park | ParkOrDeadLetter, *, take: bool = True) -> tuple[Range, ...]:
        """Return the messages of a change that are not acked and not yet parked by the request;
        with `take`, mark them as parked by it.
        """
        _check_key(change.key)
        _check_ranges(change.ranges, self._next_offset)
        if self._state(change.key) is None and change.failure is None:
            raise InvalidRequestError("the key is not parked, and no failure is given")
        parts = [part for start, end in change.ranges for part in _unacked(self._acked, start, end)]
        if not take:
            return tuple(parts)
        return tuple(part for low, high in parts for part in self._taken.add(low, high))

    def _add(self, key: ParkKey, new: Iterable[Range]) -> None:
        added = self._added.setdefault(key, OffsetRuns())
        for start, end in new:
            added.add(start, end)

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

    def _fail_again(self, change: FailAgain) -> FailAgain | None:
        _check_loose(change.key)
        _check_ranges(change.ranges, MAX_I64)
        return None if self._state(change.key) is None else change

    def _shift(self, change: Shift) -> Shift | None:
        _check_loose(change.key)
        _check_key(change.to)
        _check_ranges(change.ranges, MAX_I64)
        state = self._state(change.key)
        if change.key in {None, b""} and self._is_handled(change.key):
            raise BusyError(Reason.PARKED_REDRIVEN, partition_id=self._parked.own)
        return None if state is None or change.to == change.key else change

    def _free(self, change: Free) -> Free | None:
        if self._state(change.key) is None:
            return None
        if left := self._left(change.key):
            raise InvalidRequestError(f"the key has {left} parked messages")
        self._states[change.key] = None
        return change

    def _redrive(self, change: Redrive) -> Redrive | None:
        if self._state(change.key) not in {ParkState.PARKED, ParkState.DEAD}:
            return None
        self._states[change.key] = ParkState.REDRIVING
        return change

    def _edit(self, change: Edit) -> Edit:
        edited, parked = change.message, self._parked
        before = parked.edited(change.key, (edited.source, edited.offset))
        if self._is_handled(change.key):
            raise BusyError(Reason.PARKED_REDRIVEN, partition_id=parked.own)
        others = [other for _, other in parked.edits() if other is not before]
        if len(others) >= EDITS_MAX:
            raise OverloadedError(
                Reason.EDITS_FULL, f"it has {len(others)} edited messages", limit=EDITS_MAX
            )
        size_bytes = sum(len(each.value) + len(each.properties) for each in (*others, edited))
        if size_bytes > EDITS_BYTES_MAX:
            raise OverloadedError(
                Reason.EDITS_FULL,
                f"its edited messages would have {size_bytes} bytes",
                limit=EDITS_BYTES_MAX,
            )
        return change

    def _clear(self, change: Clear) -> Clear | None:
        self._cleared = True
        return change if self._parked else None

    def _told(self, change: AncestorTold) -> AncestorTold | None:
        return change if change.source in self._parked.sources else None

    def _has_adopted(self, parent: int) -> bool:
        """Return True unless the asking owner is a later one than the owner that adopted from this
        parent: there may have been a reset in between.
        """
        under = self._parked.adopted_under.get(parent, self._token)
        return parent in self._parked.adopted and under >= self._token

    def _adopt(self, change: Adopt) -> Adopt | None:
        if self._has_adopted(change.parent):
            return None
        if change.passed or change.children_tell:
            if not self._cleared:
                raise InvalidRequestError("only a reset says what children keep")
            return change
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
        return replace(
            change, keys=tuple(self._beside_known(self._of_held(k)) for k in change.keys)
        )

    def _of_held(self, key: AdoptedKey) -> AdoptedKey:
        """
        Return a key with the marks and the edits of only those messages that are parked under it.

        Marks and edits of other messages have no effect now, but would have one when a start folds
        this change a second time, after those messages have been parked.
        """
        for source, start, end in key.rows:
            self._adopted.setdefault((key.key, source), OffsetRuns()).add(start, end)
        if not (key.marks or key.edits):
            return key
        marks = tuple(
            replace(mark, start=low, end=high)
            for mark in key.marks
            for runs in self._held(key.key, mark.source)
            for low, high in runs.within(mark.start, mark.end)
        )
        edits = tuple(
            edited
            for edited in key.edits
            if any(
                any(runs.within(edited.offset, edited.offset + 1))
                for runs in self._held(key.key, edited.source)
            )
        )
        return replace(key, marks=marks, edits=edits)

    def _held(self, key: ParkKey, source: int) -> list[OffsetRuns]:
        """Return the messages that are parked under a key before a change of the request."""
        adopted = self._adopted.get((key, source))
        parked = None if self._changed else self._parked.get(key)
        known = None if parked is None else parked.pieces.get(source)
        return [runs for runs in (adopted, known) if runs is not None]

    def _beside_known(self, key: AdoptedKey) -> AdoptedKey:
        """
        Return a key as it is adopted if some of its messages, mostly those of another parent, are
        already parked.

        Nothing that was asked for is forgotten: a redrive concerns all messages of the key, and a
        dead key stays dead.
        """
        known = self._parked.get(key.key)
        if known is None or not known.messages:
            return key
        state = max(key.state, known.state, key=_PRECEDENCE.index)
        failures = [failure for failure in (known.failure, key.failure) if failure is not None]
        failure = max(failures, key=lambda each: each.at_ms, default=None)
        return replace(key, state=state, failure=failure)


class _Room:
    """
    The parked messages of one kind that a group has, and those that a request adds.

    Args:
        count: returns the exact numbers of keys and messages; it is called only when they are
            needed.
    """

    def __init__(self, parked: Parked, count: Callable[[], tuple[int, int]]) -> None:
        self.keys = self.messages = 0
        """The numbers of keys and of messages that the request adds."""
        self._most = len(parked), parked.messages
        self._count = count

    @cached_property
    def _before(self) -> tuple[int, int]:
        return self._count()

    @property
    def keys_before(self) -> int:
        """The number of keys without the request."""
        return self._before[0]

    @property
    def messages_before(self) -> int:
        """The number of messages without the request."""
        return self._before[1]

    def keys_over(self, limit: int, more: int = 0) -> bool:
        """Return True if there are too many keys, including `more`."""
        added = self.keys + more
        return self._most[0] + added > limit and self.keys_before + added > limit

    def messages_over(self, limit: int, more: int = 0) -> bool:
        """Return True if there are too many messages, including `more`."""
        added = self.messages + more
        return self._most[1] + added > limit and self.messages_before + added > limit


def _rooms(parked: Parked) -> tuple[_Room, _Room]:
    """Return the room of parked messages, and the room of dead keys and dead letters."""

    def alive() -> tuple[int, int]:
        keys, messages = dead_of(parked)
        return len(parked) - (parked.get(None) is not None) - keys, parked.messages - messages

    return _Room(parked, alive), _Room(parked, lambda: dead_of(parked))


def dead_of(parked: Parked) -> tuple[int, int]:
    """Return the number of dead keys, and of all dead letters."""
    counts = [
        (int(isinstance(key, bytes)), each.messages)
        for key, each in parked.items()
        if key in {None, RETRIED} or each.state is ParkState.DEAD
    ]
    return sum(keys for keys, _ in counts), sum(messages for _, messages in counts)


def _check_key(key: ParkKey) -> None:
    if isinstance(key, int) and abs(key) > TRIES_MAX_MAX:
        raise InvalidRequestError(f"no message fails {key} times")
    if isinstance(key, bytes) and len(key) > KEY_BYTES_MAX:
        raise InvalidRequestError(f"a key of {len(key)} bytes: at most {KEY_BYTES_MAX}")


def _check_loose(key: ParkKey) -> None:
    _check_key(key)
    if not is_loose(key):
        raise InvalidRequestError("messages of a key fail and are counted with their key")


def _check_ranges(ranges: Iterable[Range], next_offset: int) -> None:
    for start, end in ranges:
        if not 0 <= start < end <= next_offset:
            raise InvalidRequestError(f"no stored messages: [{start}, {end})")


def _unacked(acked: AckedOffsets, start: int, end: int) -> Iterator[Range]:
    """Yield the parts of `[start, end)` that are not acked."""
    offset = acked.next_unacked(start)
    while offset < end:
        upto = min(end, acked.next_acked(offset))
        yield offset, upto
        offset = acked.next_unacked(upto)

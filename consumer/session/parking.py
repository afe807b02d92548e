"""What is set aside of a partition: parked keys, changes that its broker has not stored, messages
that wait for a retry, and the windows in which both are handled again. Pure.

    PartitionParking    park, unpark, free ─▶ waiting ─▶ take: one request ─▶ confirm: durable
                             ▲                │ refuse: no room for more
                             ╰────────────────╯ the other changes alone, then one park at a time
    AsideMessages       put ─▶ by due time ─▶ take_due: a window ─┬─ read: what is held of its
                             ▲                                    │  source is due
                             ╰── held ◀── due while its source    ╰─ not read: what could not be
                                          fails                      read, and separately what comes
                                                                     after it, are due after a pause
    RedriveWindows      key ─▶ window: DUE ─▶ READING ─▶ IN_HAND ─ all stored ─▶ DUE ─▶ … ─▶ nothing
                             left: FREEING
                        retry ─▶ aside, by time ─▶ a window of its own ─▶ … ─▶ ended
                        after an owner that ended without a release: UNPROTECTED ─▶ PROTECTING
                             ─▶ DUE
    PartitionAncestors  a key is freed, loose messages are unparked ─▶ list the keys ─▶ ancestors of
                             which nothing is parked ─▶ LeaveAncestor, one at a time ─▶ the
                             partition's broker stores that ─▶ not named by the next list

Invariants
    From `park` on no message of the key is handed out, until the broker has stored that it is free.
    The changes of a key are stored in order, and none is lost: a failed request is sent again.
    While the broker has no room for more, changes that make room are still sent.
    Handlers have the messages of at most one window of a key. A window ends only when the broker
    has stored what became of each of its messages. After an owner that ended without a release, one
    key at a time is redriven, and it is parked again before its messages are handed out. A window
    that cannot be read waits, and no other waits for it.
    While reads of a source fail, one window at a time is read of it, and its messages take turns: a
    broker on which one message is missing or damaged may have the others. Other sources continue,
    as do the other messages of a key without an order.
    An ancestor learns only what the partition's own broker says. That it knows is stored only once
    it has answered, or is gone.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...protocol.ids import MAX_I64
from ...protocol.message import Message
from ...protocol.offsets import IntervalSet, Range
from ...protocol.parked import (
    PARKED_ROWS_MAX,
    RETRIED,
    Failure,
    Free,
    Park,
    ParkChange,
    ParkKey,
    ParkOrDeadLetter,
    RequestedChange,
    Shift,
    is_loose,
)
from .offsets import NEVER, Ref


@dataclass(slots=True, eq=False)
class PartitionAncestors:
    """The ancestors that keep parked messages for one partition."""

    exist: bool = field(kw_only=True)
    """False for a partition without parents."""
    must_list: bool = False
    """True if an ancestor may have become unneeded since the last list was asked for."""
    unneeded: list[int] = field(default_factory=list)
    """Those that are to be told; one is told at a time."""
    _told: set[int] = field(default_factory=set)

    def note_freed(self) -> None:
        """Note that a key is free, or that loose messages have ended, which may have been an
        ancestor's last ones.
        """
        self.must_list = self.exist

    def set_unneeded(self, sources: Iterable[int]) -> None:
        """Set the ancestors that keep messages, although none of those is parked any more."""
        self.unneeded = [source for source in sources if source not in self._told]

    def end(self, source: int, *, is_told: bool) -> None:
        """End the call to an ancestor: it was told, or has refused. If it has refused, the list
        after the next freed key may name it again.
        """
        self.unneeded = [each for each in self.unneeded if each != source]
        if is_told:
            self._told.add(source)


class Aside(NamedTuple):
    """Messages that wait for a retry."""

    due_ms: int
    sequence: int
    tries: int
    source: int
    start: int
    end: int


class DueRetry(NamedTuple):
    """Messages of one source that are due, and have had the same number of tries."""

    tries: int
    source: int
    ranges: tuple[Range, ...]
    is_probe: bool
    """True if the last read of the source has failed."""


@dataclass(slots=True, eq=False)
class FailingSource:
    """A source whose last read has failed."""

    failures: int = 0
    held: deque[Aside] = field(default_factory=deque)
    is_probed: bool = False
    """True while a window of it is being read."""
    until_ms: int = 0


@dataclass(slots=True, eq=False)
class AsideMessages:
    """The messages of one partition that wait for a retry."""

    waiting: list[Aside] = field(default_factory=list)
    """A heap."""
    failing: dict[int, FailingSource] = field(default_factory=dict)
    """The sources that cannot be read, which hold what else is due of them."""
    _sequence: int = 0

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self.waiting) + sum(len(each.held) for each in self.failing.values())

    def has_any_of(self, source: int) -> bool:
        """Return True if a message of the source waits."""
        failing = self.failing.get(source)
        return bool(failing and failing.held) or any(each.source == source for each in self.waiting)

    def put(self, due_ms: int, tries: int, source: int, offset_range: Range) -> None:
        """Add messages that wait until `due_ms`."""
        heapq.heappush(self.waiting, self._aside(due_ms, tries, source, offset_range))

    def _aside(self, due_ms: int, tries: int, source: int, offset_range: Range) -> Aside:
        self._sequence += 1
        return Aside(due_ms, self._sequence, tries, source, *offset_range)

    def take_due(self, count: int, now_ms: int) -> DueRetry | None:
        """Remove and return up to `count` messages that are due; None if there are none."""
        waiting = self.waiting
        while waiting and waiting[0].due_ms <= now_ms:
            first = waiting[0]
            failing = self.failing.get(first.source)
            if failing is None:
                return self._take(first.tries, first.source, count, now_ms, is_probe=False)
            if not failing.is_probed and now_ms >= failing.until_ms:
                failing.is_probed = True
                return self._take(first.tries, first.source, count, now_ms, is_probe=True)
            failing.held.append(heapq.heappop(waiting))
        return None

    def _take(
        self, tries: int, source: int, count: int, now_ms: int, *, is_probe: bool
    ) -> DueRetry:
        waiting = self.waiting
        ranges: list[Range] = []
        while waiting and count:
            first = waiting[0]
            if first.due_ms > now_ms or (first.tries, first.source) != (tries, source):
                break
            heapq.heappop(waiting)
            end = min(first.end, first.start + count)
            ranges.append((first.start, end))
            count -= end - first.start
            if end < first.end:
                heapq.heappush(waiting, first._replace(start=end))
        return DueRetry(tries, source, tuple(IntervalSet(ranges)), is_probe)

    def note_read(self, source: int) -> None:
        """Note that a source was read: what is held of it is due again."""
        failing = self.failing.pop(source, None)
        for held in () if failing is None else failing.held:
            heapq.heappush(self.waiting, held)

    def put_back(
        self,
        due: DueRetry,
        now_ms: int,
        pause_ms: Callable[[int], int],
        *,
        upto: int | None = None,
    ) -> None:
        """
        Put back messages that could not be read, and back off from their source.

        Args:
            pause_ms: returns the pause after a number of failures in a row.
            upto: the offset after what cannot be read; None: only the first message is known to be
                unreadable.
        """
        failing = self.failing.get(due.source)
        began_before = failing is not None and not due.is_probe
        if failing is None:
            failing = self.failing[due.source] = FailingSource()
        for part in _split_unreadable(due.ranges, upto):
            failing.held.append(self._aside(now_ms, due.tries, due.source, part))
        if began_before:  # the read began before the first one that failed
            return
        failing.failures += 1
        failing.is_probed = False
        failing.until_ms = now_ms + pause_ms(failing.failures)
        next_probe = failing.held.popleft()
        heapq.heappush(self.waiting, next_probe._replace(due_ms=failing.until_ms))

    def clear(self) -> None:
        """Forget everything."""
        self.waiting.clear()
        self.failing.clear()


def _split_unreadable(ranges: tuple[Range, ...], upto: int | None) -> list[Range]:
    """Split the first range after what cannot be read of it."""
    start, end = ranges[0]
    cut = max(start + 1, upto or 0)
    first = [(start, end)] if cut >= end else [(start, cut), (cut, end)]
    return [*first, *ranges[1:]]


@dataclass(slots=True, eq=False)
class UnreadableRows:
    """What is passed over of one key since its redrive last began with the first row."""

    _below: dict[int, int] = field(default_factory=dict)
    first_row: int = 0
    """How many rows at the front are handled or passed over: lists begin after them."""

    def __bool__(self) -> bool:
        return bool(self._below)

    @property
    def below(self) -> tuple[tuple[int, int], ...]:
        """The offset below which messages are passed over, as (source, offset)."""
        return tuple(self._below.items())

    def add(self, source: int, upto: int | None, first_row: int) -> None:
        """
        Pass over messages of a source.

        Args:
            upto: the offset after what cannot be read; None: nothing of the source can.
        """
        before = self._below.get(source, 0)
        self._below[source] = MAX_I64 if upto is None else max(upto, before)
        self.first_row = first_row

    def clear(self) -> None:
        """Forget what was passed over, so that it is read again."""
        self._below.clear()
        self.first_row = 0


CHANGES_MAX = 500
"""The largest number of changes in a request, so that its record stays far below the largest batch
even with keys of 1 KiB.
"""
WAITING_MAX = 10_000
"""Nothing is pulled while this many messages wait to be parked."""


class Pending(NamedTuple):
    """A change that the broker has not stored."""

    change: ParkChange
    window: int = 0
    """The number of the window that waits for it; 0: none does."""
    try_at_ms: int = 0
    """The boot time of the next try that it sets; 0: none."""


@dataclass(slots=True, eq=False)
class PartitionParking:
    """The parked keys of one partition, and their unconfirmed changes."""

    rejects: Callable[[Message], bool] | None
    """Returns True for a message that the filter leaves out; None: there is no filter."""
    ancestors: PartitionAncestors
    keys: set[ParkKey] = field(default_factory=set)
    """The keys whose messages are not handed out."""
    failures: dict[ParkKey, Failure] = field(default_factory=dict)
    """Why each key was parked here."""
    version: int = 0
    """The newest version that the broker has named."""
    listed_version: int = 0
    """The version of the last list."""
    releasing: dict[ParkKey, list[Message]] = field(default_factory=dict)
    """The keys that are being freed, with the messages that have come since."""
    freed: set[ParkKey] = field(default_factory=set)
    """The keys freed since the last list was asked for, which may still have them."""
    messages: int = 0
    """The number of messages that wait to be parked at the broker."""
    is_full: bool = False
    """True if the broker had no room at the last request."""
    in_flight: list[Pending] = field(default_factory=list)
    _parks: deque[Pending] = field(default_factory=deque)
    _others: deque[Pending] = field(default_factory=deque)
    _is_one_at_a_time: bool = False

    def __bool__(self) -> bool:
        """Return True if a change is not stored yet."""
        return bool(self.in_flight or self._parks or self._others)

    @property
    def has_room(self) -> bool:
        """True if more messages may wait to be parked."""
        return self.messages < WAITING_MAX

    def _unstored_parks(self) -> Iterable[Park]:
        for pending in (*self.in_flight, *self._parks):
            if isinstance(pending.change, Park):
                yield pending.change

    def has_parks_of(self, key: ParkKey) -> bool:
        """Return True if messages of the key wait to be parked."""
        return any(park.key == key for park in self._unstored_parks())

    def ends_redrive(self, key: ParkKey) -> bool:
        """Return True if a failure that ends the key's redrive is not stored yet."""
        return any(
            park.key == key and park.failure is not None and not (is_loose(key) and park.ranges)
            for park in self._unstored_parks()
        )

    def divert(self, messages: list[Message]) -> list[Message]:
        """Park the messages of parked keys, and return the others."""
        keys, kept = self.keys, []
        offsets: dict[bytes, list[int]] = {}
        for message in messages:
            key = message.key
            if key not in keys:
                kept.append(message)
            elif key in self.releasing:
                self.releasing[key].append(message)
            else:
                offsets.setdefault(key, []).append(message.offset)
        for key, later in offsets.items():
            self.park(key, later, None)
        return kept

    def park(
        self,
        key: ParkKey,
        offsets: list[int],
        failure: Failure | None,
        *,
        try_at_ms: int = 0,
        token: int = 0,
        window: int = 0,
    ) -> None:
        """
        Park messages of this partition.

        Args:
            offsets: sorted; empty if the messages are parked already.
            failure: of the first message; None: they follow one that failed.
            try_at_ms: the boot time of the next try, for a message that waits for one.
            token: of the owner whose handlers have the messages meanwhile; 0: none has.
            window: the number of the window that waits for this.
        """
        if isinstance(key, bytes) and key:
            self.keys.add(key)
            if failure is not None:
                self.failures[key] = failure
        self.messages += len(offsets)
        ranges: tuple[Range, ...] = tuple(IntervalSet((each, each + 1) for each in offsets))
        for first in range(0, max(len(ranges), 1), PARKED_ROWS_MAX):
            part = ranges[first : first + PARKED_ROWS_MAX]
            change = Park(key, part, failure if first == 0 else None, token)
            self._parks.append(Pending(change, window, try_at_ms))

    def add(self, change: ParkChange, *, window: int = 0, try_at_ms: int = 0) -> None:
        """Add a change that takes no room."""
        self._others.append(Pending(change, window, try_at_ms))

    def free(self, key: ParkKey) -> None:
        """Free a redriven key of which nothing is parked any more."""
        self.releasing[key] = []
        self.add(Free(key))

    def take(self, *, may_die: bool) -> list[RequestedChange]:
        """Return the changes of the next request; `may_die`: without room, keys become dead."""
        if not self.in_flight:
            while self._others and len(self.in_flight) < CHANGES_MAX:
                self.in_flight.append(self._others.popleft())
            if self._parks and not (self.in_flight and self.is_full):
                self._take_parks()
        changes = [pending.change for pending in self.in_flight]
        return [_or_dead(change) for change in changes] if may_die else list(changes)

    def next_tries(self, partition_id: int) -> list[tuple[int, int, int, int]]:
        """Return the next tries that the request in flight sets, as (tries, source, offset, boot
        time).
        """
        tries = []
        for change, _, at_ms in self.in_flight:
            if not at_ms:
                continue
            if isinstance(change, Park) and isinstance(change.key, int):
                tries.append((change.key, partition_id, change.ranges[0][0], at_ms))
            elif isinstance(change, Shift) and change.to is not None:
                tries.append((change.to, change.source, change.ranges[0][0], at_ms))
        return tries

    def _take_parks(self) -> None:
        left = 1 if self._is_one_at_a_time else CHANGES_MAX - len(self.in_flight)
        rows = 0
        while self._parks and left > 0 and rows < PARKED_ROWS_MAX:
            pending = self._parks.popleft()
            assert isinstance(pending.change, Park)
            rows += len(pending.change.ranges)
            left -= 1
            self.in_flight.append(pending)

    def confirm(self) -> list[Pending]:
        """Drop and return the changes in flight, which the broker has stored."""
        confirmed = self.in_flight
        self.in_flight = []
        for pending in confirmed:
            if isinstance(pending.change, Park):
                self.is_full = self._is_one_at_a_time = False
                self.messages -= sum(end - start for start, end in pending.change.ranges)
        return confirmed

    def name_failures(self) -> bool:
        """
        Give the failure of their key to parks in flight that have none, because the broker does not
        know the key: retention had removed the message that failed. Return False if there are none.
        """
        is_changed = False
        for index, pending in enumerate(self.in_flight):
            change = pending.change
            if isinstance(change, Park) and change.failure is None and change.key in self.failures:
                named = Park(change.key, change.ranges, self.failures[change.key], change.token)
                self.in_flight[index] = pending._replace(change=named)
                is_changed = True
        return is_changed

    def refuse(self) -> bool:
        """Take back the parks in flight, for which the broker has no room. Return True if another
        request may succeed at once.
        """
        parks = [pending for pending in self.in_flight if isinstance(pending.change, Park)]
        self.in_flight = [each for each in self.in_flight if not isinstance(each.change, Park)]
        was_single = self._is_one_at_a_time
        self.is_full = True
        if was_single:  # the broker may have room for another key: one that is parked already
            keys = {pending.change.key for pending in parks if isinstance(pending.change, Park)}
            same = [each for each in self._parks if _key_of(each) in keys]
            others = [each for each in self._parks if _key_of(each) not in keys]
            self._parks = deque([*others, *parks, *same])
        else:
            self._is_one_at_a_time = True
            self._parks.extendleft(reversed(parks))
        return not was_single or bool(self.in_flight)


def _key_of(pending: Pending) -> ParkKey:
    assert isinstance(pending.change, Park)
    return pending.change.key


def _or_dead(change: ParkChange) -> RequestedChange:
    """Return the change that makes a key dead letters without room. A message that waits for a
    retry has no key of its own, and waits for room.
    """
    if isinstance(change, Park) and not isinstance(change.key, int) and not change.token:
        return ParkOrDeadLetter(change.key, change.ranges, change.failure)
    return change


WINDOW = 100
"""The largest number of messages in a window."""
CAREFUL_MS = 30_000
"""How long an owner hands messages out one at a time at most, in milliseconds, after one that ended
without a release.
"""
WINDOWS_MAX = 50
"""The largest number of windows that are read or in hand."""
ASIDE_MAX = 100_000
"""Nothing is pulled while this many ranges wait for a retry."""


class WindowPhase(enum.Enum):
    """Where a window is."""

    UNPROTECTED = enum.auto()
    PROTECTING = enum.auto()
    """The broker is told that it begins, so that the next owner knows it if this process ends."""
    DUE = enum.auto()
    READING = enum.auto()
    IN_HAND = enum.auto()
    FREEING = enum.auto()


@dataclass(slots=True, eq=False)
class Window:
    """Messages of one key, or messages of one source that have the same number of tries."""

    number: int
    key: ParkKey
    phase: WindowPhase
    source: int = 0
    ranges: tuple[Range, ...] = ()
    """What is to be read, for a retry; (): the first messages of the key."""
    is_probe: bool = False
    """True for a retry whose source could not be read before."""
    unreadable: UnreadableRows = field(default_factory=UnreadableRows)
    out: set[Ref] = field(default_factory=set)
    """The messages that have not ended."""
    unstored: int = 0
    """The number of changes that are not stored."""
    is_stopped: bool = False
    """True if the key stays parked."""
    failure: Failure | None = None
    """The last failure of a loose message that stays parked."""
    is_inherited: bool = False
    """True if its key was chosen under an earlier owner, which may have handled it."""
    gives_up: bool = False
    """True for dead letters that an earlier owner may have ended with: they stay dead."""
    not_before_ms: int = 0
    failures: int = 0

    @property
    def is_retry(self) -> bool:
        """True for messages that waited for a retry."""
        return bool(self.ranges)


@dataclass(slots=True, eq=False)
class RedriveWindows:
    """The windows of one partition."""

    is_allowed: bool = field(kw_only=True, default=True)
    """False if this consumer cannot handle redriven messages."""
    windows: dict[int, Window] = field(default_factory=dict)
    keys: set[ParkKey] = field(default_factory=set)
    """The keys that are being redriven, without those of retries."""
    owners: dict[Ref, Window] = field(default_factory=dict)
    """The window of each message that has not ended."""
    aside: AsideMessages = field(default_factory=AsideMessages)
    is_unreleased: bool = False
    """True if the last owner ended without a release."""
    is_careful: bool = False
    """True if keys are redriven one at a time: the last owner ended without a release."""
    careful_until_ms: int = 0
    """Until when messages that waited for a retry are handed out one at a time."""
    careful: Window | None = None
    """The window that alone may run, because it may end the process."""
    _sequence: int = 0

    def __bool__(self) -> bool:
        return bool(self.windows)

    @property
    def has_waiting(self) -> bool:
        """True if there is a window, or a message waits for a retry."""
        return bool(self.windows or self.aside.waiting or self.aside.failing)

    @property
    def has_room(self) -> bool:
        """True if more messages may wait for a retry."""
        aside = self.aside
        return not aside.waiting or len(aside) < ASIDE_MAX

    def begin(self, key: ParkKey, *, is_inherited: bool) -> None:
        """
        Begin to redrive a key, unless that has begun.

        Args:
            is_inherited: it was chosen under an earlier owner.
        """
        if key in self.keys:
            return
        self.keys.add(key)
        is_unprotected = self.is_careful and key != RETRIED
        window = self._new(key, WindowPhase.UNPROTECTED if is_unprotected else WindowPhase.DUE)
        window.is_inherited = is_inherited
        window.gives_up = self.is_careful and is_inherited and key == RETRIED

    def _new(self, key: ParkKey, phase: WindowPhase) -> Window:
        self._sequence += 1
        window = self.windows[self._sequence] = Window(self._sequence, key, phase)
        return window

    def wait(self, window: Window, until_ms: int) -> None:
        """Read a window again at `until_ms`. Others go on meanwhile."""
        window.not_before_ms = until_ms
        window.phase = WindowPhase.DUE
        if self.careful is window:
            self.careful = None
            window.phase = WindowPhase.UNPROTECTED

    def end(self, window: Window) -> None:
        """End a window."""
        self.windows.pop(window.number, None)
        if not window.is_retry:
            self.keys.discard(window.key)
        if self.careful is window:
            self.careful = None

    def has_retries_of(self, source: int) -> bool:
        """Return True if a message of the source waits for a retry, or is retried."""
        return self.aside.has_any_of(source) or any(
            window.is_retry and window.source == source for window in self.windows.values()
        )

    def _is_open(self) -> bool:
        active = (WindowPhase.READING, WindowPhase.IN_HAND)
        return sum(window.phase in active for window in self.windows.values()) < WINDOWS_MAX

    def take_due(self, now_ms: int) -> Iterator[Window]:
        """Yield the windows that are to be read now, and mark them."""
        is_careful = now_ms < self.careful_until_ms
        aside = self.aside
        while aside.waiting and aside.waiting[0].due_ms <= now_ms and self._is_open():
            if is_careful and self.careful is not None:
                break
            due = aside.take_due(1 if is_careful else WINDOW, now_ms)
            if due is None:
                break
            phase = WindowPhase.UNPROTECTED if is_careful else WindowPhase.DUE
            window = self._new(due.tries, phase)
            window.source, window.ranges, window.is_probe = due.source, due.ranges, due.is_probe
            if is_careful:
                break
        for window in self.windows.values():
            if window.phase is not WindowPhase.DUE or window.not_before_ms > now_ms:
                continue
            if self._is_open():
                window.phase = WindowPhase.READING
                yield window

    def take_unprotected(self, now_ms: int) -> Window | None:
        """Return the window that is to be protected next, and mark it; None while another may end
        the process.
        """
        if self.careful is not None:
            return None
        for window in self.windows.values():
            is_due = window.not_before_ms <= now_ms
            if window.phase is WindowPhase.UNPROTECTED and is_due:
                window.phase = WindowPhase.PROTECTING
                self.careful = window
                return window
        return None

    def next_ms(self) -> int:
        """Return when a window may be due next; NEVER if no time decides that."""
        waiting = (WindowPhase.DUE, WindowPhase.UNPROTECTED)
        times = [each.not_before_ms for each in self.windows.values() if each.phase in waiting]
        times += [each.due_ms for each in self.aside.waiting[:1]]
        return min(times, default=NEVER)

    def drop_unread(self) -> None:
        """Forget what is not read yet."""
        self.aside.clear()
        for window in list(self.windows.values()):
            if window.phase in {WindowPhase.UNPROTECTED, WindowPhase.DUE}:
                self.end(window)

    def clear(self) -> None:
        """Forget everything: the partition is handed over. What is in hand stays known."""
        self.aside.clear()
        self.windows = {each.number: each for each in self.owners.values()}
        self.careful = None

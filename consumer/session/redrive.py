"""Parked messages that are handled again, and those that wait for a retry, in windows. Pure.

    key ─▶ window: DUE ─▶ READING ─▶ IN_HAND ─ all stored ─▶ DUE ─▶ … ─▶ nothing left: FREEING
    retry ─▶ aside, by time ─▶ a window of its own ─▶ … ─▶ ended
    after an owner that ended without a release:  UNPROTECTED ─▶ PROTECTING ─▶ DUE

Invariants
    Handlers have the messages of at most one window of a key. A window ends only when the broker
    has stored what became of each of its messages. After an owner that ended without a release, one
    key at a time is redriven, and it is parked again before its messages are handed out.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from typing import NamedTuple

from ...protocol.offsets import Range
from ...protocol.parked import RETRIED, Failure, ParkKey

WINDOW = 100
"""The largest number of messages in a window."""
CAREFUL_MS = 30_000
WINDOWS_MAX = 50
"""The largest number of windows that are read or in hand."""
ASIDE_MAX = 100_000
"""Nothing is pulled while this many ranges wait for a retry."""

Ref = tuple[int, int]
"""The partition that stores a message, and its offset."""


class WindowPhase(enum.Enum):
    """Where a window is."""

    UNPROTECTED = enum.auto()
    PROTECTING = enum.auto()
    """The broker is told that it begins, so that the next owner knows it if this process ends."""
    DUE = enum.auto()
    READING = enum.auto()
    IN_HAND = enum.auto()
    FREEING = enum.auto()


class Window:
    """Messages of one key, or messages of one source that have the same number of tries."""

    __slots__ = (
        "failure",
        "failures",
        "gives_up",
        "is_stopped",
        "key",
        "not_before_ms",
        "number",
        "out",
        "phase",
        "ranges",
        "source",
        "unstored",
    )

    def __init__(self, number: int, key: ParkKey, phase: WindowPhase) -> None:
        self.number = number
        self.key = key
        self.phase = phase
        self.source = 0
        self.ranges: tuple[Range, ...] = ()
        """What is to be read, for a retry; (): the first messages of the key."""
        self.out: set[Ref] = set()
        """The messages that have not ended."""
        self.unstored = 0
        """The number of changes that are not stored."""
        self.is_stopped = False
        """True if the key stays parked."""
        self.failure: Failure | None = None
        """The last failure of a loose message that stays parked."""
        self.gives_up = False
        """True for dead letters that an earlier owner may have ended with: they stay dead."""
        self.not_before_ms = 0
        self.failures = 0

    @property
    def is_retry(self) -> bool:
        """True for messages that waited for a retry."""
        return bool(self.ranges)


class Aside(NamedTuple):
    """Messages that wait for a retry at the broker."""

    due_ms: int
    sequence: int
    tries: int
    source: int
    start: int
    end: int


class RedriveWindows:
    """
    The windows of one partition.

    Args:
        is_allowed: False if this consumer cannot handle redriven messages.
    """

    __slots__ = (
        "_sequence",
        "aside",
        "careful",
        "careful_until_ms",
        "is_allowed",
        "is_careful",
        "is_unreleased",
        "keys",
        "owners",
        "windows",
    )

    def __init__(self, *, is_allowed: bool = True) -> None:
        self.is_allowed = is_allowed
        self.windows: dict[int, Window] = {}
        self.keys: set[ParkKey] = set()
        """The keys that are being redriven, without those of retries."""
        self.owners: dict[Ref, Window] = {}
        """The window of each message that has not ended."""
        self.aside: list[Aside] = []
        """A heap."""
        self.is_unreleased = False
        """True if the last owner ended without a release."""
        self.is_careful = False
        """True if keys are redriven one at a time: the last owner ended without a release."""
        self.careful_until_ms = 0
        """Until when messages that waited for a retry are handed out one at a time."""
        self.careful: Window | None = None
        """The window that alone may run, because it may end the process."""
        self._sequence = 0

    def __bool__(self) -> bool:
        return bool(self.windows)

    @property
    def has_waiting(self) -> bool:
        """True if there is a window, or a message waits for a retry."""
        return bool(self.windows or self.aside)

    @property
    def has_room(self) -> bool:
        """True if more messages may wait for a retry."""
        return len(self.aside) < ASIDE_MAX

    def begin(self, key: ParkKey, *, is_inherited: bool) -> None:
        """
        Begin to redrive a key, unless that has begun.

        Args:
            is_inherited: it was chosen under an earlier owner.
        """
        if key in self.keys:
            return
        self.keys.add(key)
        if key != RETRIED:
            self._new(key, WindowPhase.UNPROTECTED if self.is_careful else WindowPhase.DUE)
            return
        window = self._new(key, WindowPhase.DUE)
        window.gives_up = self.is_careful and is_inherited

    def _new(self, key: ParkKey, phase: WindowPhase) -> Window:
        self._sequence += 1
        window = self.windows[self._sequence] = Window(self._sequence, key, phase)
        return window

    def end(self, window: Window) -> None:
        """End a window."""
        self.windows.pop(window.number, None)
        if not window.is_retry:
            self.keys.discard(window.key)
        if self.careful is window:
            self.careful = None

    def put_aside(self, due_ms: int, tries: int, source: int, offset_range: Range) -> None:
        """Add messages that wait for a retry until `due_ms`."""
        self._sequence += 1
        heapq.heappush(self.aside, Aside(due_ms, self._sequence, tries, source, *offset_range))

    def _is_open(self) -> bool:
        active = (WindowPhase.READING, WindowPhase.IN_HAND)
        return sum(window.phase in active for window in self.windows.values()) < WINDOWS_MAX

    def take_due(self, now_ms: int) -> Iterator[Window]:
        """Yield the windows that are to be read now, and mark them."""
        is_careful = now_ms < self.careful_until_ms
        while self.aside and self.aside[0].due_ms <= now_ms and self._is_open():
            if is_careful and self.careful is not None:
                break
            waiting = heapq.heappop(self.aside)
            end = min(waiting.end, waiting.start + (1 if is_careful else WINDOW))
            if end < waiting.end:
                rest = (end, waiting.end)
                self.put_aside(waiting.due_ms, waiting.tries, waiting.source, rest)
            phase = WindowPhase.UNPROTECTED if is_careful else WindowPhase.DUE
            window = self._new(waiting.tries, phase)
            window.source = waiting.source
            window.ranges = ((waiting.start, end),)
            if is_careful:
                break
        for window in self.windows.values():
            if window.phase is not WindowPhase.DUE or window.not_before_ms > now_ms:
                continue
            if self._is_open():
                window.phase = WindowPhase.READING
                yield window

    def take_unprotected(self) -> Window | None:
        """Return the window that is to be protected next, and mark it; None while another may end
        the process.
        """
        if self.careful is not None:
            return None
        for window in self.windows.values():
            if window.phase is WindowPhase.UNPROTECTED:
                window.phase = WindowPhase.PROTECTING
                self.careful = window
                return window
        return None

    def next_ms(self) -> int | None:
        """Return when a window may be due next; None if no time decides that."""
        times = [w.not_before_ms for w in self.windows.values() if w.phase is WindowPhase.DUE]
        if self.aside:
            times.append(self.aside[0].due_ms)
        return min(times, default=None)

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

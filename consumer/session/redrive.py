"""Parked messages that are handled again, and those that wait for a retry, in windows. Pure.

    key ─▶ window: DUE ─▶ READING ─▶ IN_HAND ─ all stored ─▶ DUE ─▶ … ─▶ nothing left: FREEING
    retry ─▶ aside, by time ─▶ a window of its own ─▶ … ─▶ ended
    after an owner that ended without a release:  UNPROTECTED ─▶ PROTECTING ─▶ DUE

Invariants
    Handlers have the messages of at most one window of a key. A window ends only when the broker
    has stored what became of each of its messages. After an owner that ended without a release, one
    key at a time is redriven, and it is parked again before its messages are handed out. A window
    that cannot be read waits, and no other waits for it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from ...protocol.offsets import Range
from ...protocol.parked import RETRIED, Failure, ParkKey
from .aside import AsideMessages
from .unreadable import UnreadableRows

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
        "is_inherited",
        "is_probe",
        "is_stopped",
        "key",
        "not_before_ms",
        "number",
        "out",
        "phase",
        "ranges",
        "source",
        "unreadable",
        "unstored",
    )

    def __init__(self, number: int, key: ParkKey, phase: WindowPhase) -> None:
        self.number = number
        self.key = key
        self.phase = phase
        self.source = 0
        self.ranges: tuple[Range, ...] = ()
        """What is to be read, for a retry; (): the first messages of the key."""
        self.is_probe = False
        """True for a retry whose source could not be read before."""
        self.unreadable = UnreadableRows()
        self.out: set[Ref] = set()
        """The messages that have not ended."""
        self.unstored = 0
        """The number of changes that are not stored."""
        self.is_stopped = False
        """True if the key stays parked."""
        self.failure: Failure | None = None
        """The last failure of a loose message that stays parked."""
        self.is_inherited = False
        """True if its key was chosen under an earlier owner, which may have handled it."""
        self.gives_up = False
        """True for dead letters that an earlier owner may have ended with: they stay dead."""
        self.not_before_ms = 0
        self.failures = 0

    @property
    def is_retry(self) -> bool:
        """True for messages that waited for a retry."""
        return bool(self.ranges)


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
        self.aside = AsideMessages()
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

    def next_ms(self) -> int | None:
        """Return when a window may be due next; None if no time decides that."""
        waiting = (WindowPhase.DUE, WindowPhase.UNPROTECTED)
        times = [each.not_before_ms for each in self.windows.values() if each.phase in waiting]
        if self.aside.next_ms is not None:
            times.append(self.aside.next_ms)
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

"""What an operator is told of messages that fail or hang: which, and how often.  Pure.

    failed, running ─▶ told at once ─▶ again after 10, 20, 40 … s ─▶ over: told once more
                 ╰─▶ more than so many a minute: in a sum of all that are not told apart, ever more seldom

Invariants
    A message that was told is told again when it is over; what is not told apart is in the next sum.
    A minute has at most 2 * TOLD_PER_MINUTE messages told anew, and each of them ends once.
    Keys are told as a digest: `printf %s KEY | b2sum -l 64` prints the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...protocol.message import Message
from ...protocol.text import counted, key_digest, seconds

HANGS_MS = 10_000
"""A handler that runs for longer is told."""
AGAIN_MS = 10_000
AGAIN_MAX_MS = 3_600_000
TOLD_PER_MINUTE = 10
TRACEBACK_EVERY_MS = 60_000
"""The first failure of a kind of error is told with its traceback; again after so long."""
KINDS_MAX = 100
"""Kinds of errors kept apart; the one whose traceback is the oldest is forgotten."""
KINDS_TOLD = 5


@dataclass(frozen=True, slots=True)
class Telling:
    """A line for the log."""

    text: str
    traceback: bool = False


@dataclass(slots=True)
class _Trouble:
    """A message that failed, or whose handler runs for long."""

    message: Message
    since_ms: int
    kind: str = ""
    """Of the last error; empty while the first try runs."""
    hangs: bool = False
    """Its handler runs for long just now, or did when it was last looked at."""
    again_ms: int = 0
    """It is told, if it was told before, and again from then on."""
    gap_ms: int = 0
    """From the last telling to the next; 0 if it was not told."""


class _Allowance:
    """So many a minute, and so many at once."""

    def __init__(self, per_minute: int) -> None:
        self._most = per_minute
        self._left = float(per_minute)
        self._at_ms = 0

    def take(self, now_ms: int) -> bool:
        grown = (now_ms - self._at_ms) * self._most / 60_000
        self._left = min(self._most, self._left + grown)
        self._at_ms = now_ms
        if self._left < 1:
            return False
        self._left -= 1
        return True


class LogThrottle:
    """
    The failing and hanging messages of one consumer; every time is milliseconds of the boot clock.

    `runner` and `done` are the words for what works at messages, and for a message that it is through with.
    """

    def __init__(self, *, runner: str = "handler", done: str = "is handled") -> None:
        self._runner = runner
        self._done = done
        self._troubles: dict[tuple[int, int], _Trouble] = {}
        self._tracebacks: dict[str, int] = {}
        """Kind of error → when its traceback was told."""
        self._ordinary = _Allowance(TOLD_PER_MINUTE)
        self._first_of_kind = _Allowance(TOLD_PER_MINUTE)
        self._untold = 0
        """Troubles that were not told apart."""
        self._handled = self._given_up = 0
        """Of these, so many ended since the last sum."""
        self._sum_at_ms = 0
        self._sum_gap_ms = 0

    def failed(self, message: Message, kind: str, now_ms: int, wait_ms: int) -> Telling | None:
        """The try `message.attempt` failed with an error of `kind`; the next one is `wait_ms` away."""
        trouble = self._trouble(message, now_ms)
        trouble.kind, trouble.hangs = kind, False
        if now_ms < trouble.again_ms:
            return None
        traceback = self._wants_traceback(kind, now_ms) and self._first_of_kind.take(now_ms)
        if not traceback and not self._ordinary.take(now_ms):
            return None
        if traceback:
            self._note_traceback(kind, now_ms)
        self._told(trouble, now_ms)
        return Telling(
            f"{self._runner} failed with {kind} on {name_of(message)}: attempt {message.attempt}, "
            f"{seconds(now_ms - trouble.since_ms)} since the first; it is tried again in "
            f"{seconds(wait_ms)}, later messages of its key wait",
            traceback,
        )

    def running(self, message: Message, since_ms: int, now_ms: int) -> Telling | None:
        """A handler has been at `message` since `since_ms`."""
        if now_ms - since_ms < HANGS_MS:
            return None
        trouble = self._trouble(message, since_ms)
        trouble.hangs = True
        if now_ms < trouble.again_ms or not self._ordinary.take(now_ms):
            return None
        self._told(trouble, now_ms)
        return Telling(
            f"{self._runner} has been running for {seconds(now_ms - since_ms)} on {name_of(message)}: "
            f"attempt {message.attempt}, {seconds(now_ms - trouble.since_ms)} since the first; "
            "later messages of its key wait"
        )

    def stopped(self, message: Message, now_ms: int) -> Telling | None:
        """The handler that was `running` is done with `message`, unless it failed or was given up: that was told."""
        trouble = self._troubles.get(_place(message))
        return self.handled(message, now_ms) if trouble is not None and trouble.hangs else None

    def handled(self, message: Message, now_ms: int) -> Telling | None:
        """A message that failed or hung is handled."""
        return self._over(message, now_ms, handled=True)

    def given_up(self, message: Message, now_ms: int) -> Telling | None:
        """The message is not tried again here; nothing if it neither failed nor hung."""
        return self._over(message, now_ms, handled=False)

    def sum(self, now_ms: int, *, last: bool = False) -> Telling | None:
        """Call it now and then: all that were not told apart, if it is time to tell so; `last`: at once."""
        if not self._untold and not self._handled and not self._given_up:
            self._sum_gap_ms = 0
            return None
        if not self._sum_gap_ms:
            self._sum_gap_ms = AGAIN_MS
            self._sum_at_ms = now_ms + AGAIN_MS
        if now_ms < self._sum_at_ms and not last:
            return None
        self._sum_gap_ms = min(2 * self._sum_gap_ms, AGAIN_MAX_MS)
        self._sum_at_ms = now_ms + self._sum_gap_ms
        failing = counted(self._untold, "more message fails or hangs", "more messages fail or hang")
        text = f"{failing} in handlers{self._worst(now_ms)}"
        if self._handled or self._given_up:
            text += f"; {counted(self._handled, 'was', 'were')} handled since, {self._given_up} given up here"
        self._handled = self._given_up = 0
        return Telling(text)

    def _worst(self, now_ms: int) -> str:
        """The errors of those that were not told apart, and the oldest of them."""
        untold = [one for one in self._troubles.values() if not one.gap_ms]
        if not untold:
            return ""
        kinds = Counter(one.kind or "still running" for one in untold).most_common(KINDS_TOLD)
        oldest = min(untold, key=lambda one: one.since_ms)
        said = ", ".join(f"{kind} {count}" for kind, count in kinds)
        age = seconds(now_ms - oldest.since_ms)
        return (
            f" ({said}); the oldest is {name_of(oldest.message)}: "
            f"attempt {oldest.message.attempt}, {age} since the first"
        )

    def _trouble(self, message: Message, since_ms: int) -> _Trouble:
        place = _place(message)
        known = self._troubles.get(place)
        if known is None:
            known = self._troubles[place] = _Trouble(message, since_ms)
            self._untold += 1
        return known

    def _told(self, trouble: _Trouble, now_ms: int) -> None:
        self._untold -= not trouble.gap_ms
        trouble.gap_ms = min(2 * trouble.gap_ms, AGAIN_MAX_MS) or AGAIN_MS
        trouble.again_ms = now_ms + trouble.gap_ms

    def _wants_traceback(self, kind: str, now_ms: int) -> bool:
        at_ms = self._tracebacks.get(kind)
        return at_ms is None or now_ms - at_ms >= TRACEBACK_EVERY_MS

    def _note_traceback(self, kind: str, now_ms: int) -> None:
        self._tracebacks.pop(kind, None)
        if len(self._tracebacks) >= KINDS_MAX:
            del self._tracebacks[next(iter(self._tracebacks))]
        self._tracebacks[kind] = now_ms

    def _over(self, message: Message, now_ms: int, *, handled: bool) -> Telling | None:
        trouble = self._troubles.pop(_place(message), None)
        if trouble is None:
            return None
        if not trouble.gap_ms:
            self._untold -= 1
            self._handled += handled
            self._given_up += not handled
            return None
        how = (
            self._done
            if handled
            else "is given up here, as its lease ended or its partition is handed over; the next owner tries it again"
        )
        tries = counted(message.attempt, "attempt")
        took = seconds(now_ms - trouble.since_ms)
        return Telling(f"{name_of(message)} {how}: after {tries} and {took}")


def name_of(message: Message) -> str:
    """Where the message is, and a digest of its key."""
    where = f"{message.subject} partition {message.partition_id} offset {message.offset}"
    return f"{where}, {key_digest(message.key)}"


def _place(message: Message) -> tuple[int, int]:
    return message.partition_id, message.offset

"""Composes the lines about failing and hanging messages; the log filter decides how often they are
logged. Pure.

    failed, running ─▶ a line at once ─▶ again after 10, 20, 40 … s ─▶ over: a last line
                 ╰─▶ above LINES_PER_MINUTE: counted in a summary line, at growing intervals

Invariants
    A message with a line of its own gets another one when it is over; every other message is in the
    next summary. At most 2 * LINES_PER_MINUTE messages get their first line within a minute. Keys
    are logged as a digest: `printf %s KEY | b2sum -l 64` prints the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ...protocol.log_filter import Allowance, LineLimit, Repeats
from ...protocol.message import Message
from ...protocol.parked import HANGS_MS
from ...protocol.text import counted, printable, seconds
from ..log_names import consumer_name, message_name

LINES_PER_MINUTE = 10
TRACEBACK_EVERY_MS = 60_000
"""The interval, in milliseconds, between tracebacks: the first failure of a kind of error is logged
with its traceback, and then one failure in this time.
"""
KINDS_TOLD = 5
TEXT_CHARS_MAX = 200
SEALED_WAITS = (
    "; its partition is sealed, and the partitions that continue it wait for this "
    "message: park it with "
    'on_failure="park", give it up with on_failure="dead", or pass it with `keylane group reset`'
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line for the log, and whether the error's traceback goes with it."""

    text: str
    traceback: bool = False


@dataclass(slots=True)
class _Trouble:
    """A message that failed, or whose handler has been running for long."""

    message: Message
    repeats: Repeats
    kind: str = ""
    """The kind of the last error; empty while the first try runs."""
    hangs: bool = False
    """True if its handler had been running for long at the last check."""


class HandlerLog:
    """
    The failing and hanging messages of one consumer; every time is in milliseconds of the boot
    clock.

    Args:
        runner: the words for what handles messages.
        done: the words for a message that is handled.
        ordered: whether later messages of a key wait for one that fails; False: no message waits
            for another.
    """

    def __init__(
        self, *, runner: str = "handler", done: str = "is handled", ordered: bool = True
    ) -> None:
        self._runner = runner
        self._ordered = ordered
        self._done = done
        self._troubles: dict[tuple[int, int], _Trouble] = {}
        lines = Allowance(LINES_PER_MINUTE, LINES_PER_MINUTE / 60)
        self._lines = LineLimit(lines)
        self._tracebacks = LineLimit(Allowance(1, 1000 / TRACEBACK_EVERY_MS), lines)
        self._name = ""
        """The name of the consumer, as its messages know it."""
        self._summed = 0
        """The number of troubles without a line of their own."""
        self._handled = self._given_up = 0
        """The numbers of handled and given-up messages among these since the last summary."""
        self._summary: Repeats | None = None

    def failed(
        self,
        message: Message,
        kind: str,
        now_ms: int,
        wait_ms: int,
        *,
        text: str = "",
        asked_for: str | None = None,
        sealed: bool = False,
    ) -> LogLine | None:
        """
        Note that attempt `message.attempt` failed with an error of `kind`, and that the next is in
        `wait_ms`.

        Args:
            text: the text of the error.
            asked_for: the reason, possibly empty, of a handler that asked for another try; None: it
                failed.
            sealed: whether the message's partition is sealed, so that its children wait for the
                message.
        """
        trouble = self._trouble(message, now_ms)
        trouble.kind = kind
        trouble.hangs = False
        if now_ms < trouble.repeats.due_ms:
            return None
        traceback = asked_for is None and self._tracebacks.admit(now_ms, kind, None) is not None
        if not traceback and self._lines.admit(now_ms, None) is None:
            return None
        self._logged(trouble, now_ms)
        what = f"failed with {kind}"
        if asked_for is not None:
            what = (
                f"asked for another try ({asked_for:.200})"
                if asked_for
                else "asked for another try"
            )
        return LogLine(
            f"{self._runner} {what} on {message_name(message)}: attempt {message.attempt}, "
            f"{seconds(now_ms - trouble.repeats.since_ms)} since the first; it is tried again in "
            f"{seconds(wait_ms)}{self._behind(message, ',')}{'' if asked_for else _told(text)}"
            f"{SEALED_WAITS if sealed else ''}",
            traceback,
        )

    def running(self, message: Message, since_ms: int, now_ms: int) -> LogLine | None:
        """Note that a handler has been running on `message` since `since_ms`."""
        if now_ms - since_ms < HANGS_MS:
            return None
        trouble = self._trouble(message, since_ms)
        trouble.hangs = True
        if now_ms < trouble.repeats.due_ms or self._lines.admit(now_ms, None) is None:
            return None
        self._logged(trouble, now_ms)
        return LogLine(
            f"{self._runner} has been running for {seconds(now_ms - since_ms)} on "
            f"{message_name(message)}: "
            f"attempt {message.attempt}, "
            f"{seconds(now_ms - trouble.repeats.since_ms)} since the first"
            f"{self._behind(message, ';')}"
        )

    def stopped(self, message: Message, now_ms: int) -> LogLine | None:
        """Note that the handler that was `running` has left `message`; a failure is already
        logged.
        """
        trouble = self._troubles.get(_where(message))
        return self.handled(message, now_ms) if trouble is not None and trouble.hangs else None

    def handled(self, message: Message, now_ms: int) -> LogLine | None:
        """Note that a message that failed or hung is handled."""
        return self._over(message, now_ms, handled=True)

    def set_aside(
        self,
        message: Message,
        kind: str,
        now_ms: int,
        *,
        with_key: bool,
        pause_ms: int | None = None,
        asked_for: bool = False,
    ) -> LogLine | None:
        """
        Note that a message is set aside, and, if `with_key`, that later ones of its key wait with
        it.

        Args:
            pause_ms: milliseconds until it is tried again automatically; None: it is not.
            asked_for: whether the handler has asked for another try, so that there is no traceback.
        """
        known = self._troubles.pop(_where(message), None)
        if known is not None and not known.repeats.open:
            self._summed -= 1
        traceback = (
            pause_ms is not None
            and not asked_for
            and self._tracebacks.admit(now_ms, kind, None) is not None
        )
        if not traceback and self._lines.admit(now_ms, None) is None:
            return None
        what = "is parked with the later messages of its key" if with_key else "is set aside alone"
        if pause_ms is not None:
            what = f"is set aside alone, and tried again in {seconds(pause_ms)}"
        return LogLine(
            f"{message_name(message)} {what}: {kind} after {counted(message.attempt, 'attempt')}",
            traceback,
        )

    @property
    def in_trouble(self) -> bool:
        """Return True while any message that has failed or hung is not over."""
        return bool(self._troubles)

    def given_up_all(self, ours: Callable[[Message], bool], now_ms: int) -> list[LogLine]:
        """Note each message that is `ours` as given up; see `given_up`."""
        messages = [each.message for each in self._troubles.values() if ours(each.message)]
        lines = [self._over(message, now_ms, handled=False) for message in messages]
        return [line for line in lines if line is not None]

    def given_up(self, message: Message, now_ms: int) -> LogLine | None:
        """Note that a message is not tried again here, and return None if it neither failed nor
        hung.
        """
        return self._over(message, now_ms, handled=False)

    def summary(self, now_ms: int, *, last: bool = False) -> LogLine | None:
        """Return the messages without a line of their own, if a summary is due; with `last`, at
        once. Call it about every second.
        """
        if not self._summed and not self._handled and not self._given_up:
            self._summary = None
            return None
        if self._summary is None:
            self._summary = Repeats(now_ms)
            self._summary.logged(now_ms)  # their own first lines stand for it
        if now_ms < self._summary.due_ms and not last:
            return None
        self._summary.logged(now_ms)
        ended = (
            f"{counted(self._handled, 'was', 'were')} handled since, {self._given_up} given up here"
        )
        if self._summed:
            failing = counted(
                self._summed, "more message fails or hangs", "more messages fail or hang"
            )
            text = f"{self._name}: {failing} in handlers{self._worst(now_ms)}"
            text += f"; {ended}" if self._handled or self._given_up else ""
        else:
            text = f"{self._name}: of the other messages that failed or hung {ended}"
        self._handled = self._given_up = 0
        return LogLine(text)

    def _worst(self, now_ms: int) -> str:
        """Return the errors of the messages without a line of their own, and the oldest of these
        messages.
        """
        summed = [trouble for trouble in self._troubles.values() if not trouble.repeats.open]
        if not summed:
            return ""
        kinds = Counter(trouble.kind or "still running" for trouble in summed).most_common(
            KINDS_TOLD
        )
        oldest = min(summed, key=lambda trouble: trouble.repeats.since_ms)
        said = ", ".join(f"{kind} {count}" for kind, count in kinds)
        age = seconds(now_ms - oldest.repeats.since_ms)
        return (
            f" ({said}); the oldest is {message_name(oldest.message)}: "
            f"attempt {oldest.message.attempt}, {age} since the first"
        )

    def _behind(self, message: Message, mark: str) -> str:
        """Return the messages that wait for a message: none if it has no key, or is handled apart
        from the others of its key.
        """
        waits = self._ordered and message.key and not getattr(message.delivery, "is_loose", False)
        return f"{mark} later messages of its key wait" if waits else ""

    def _trouble(self, message: Message, since_ms: int) -> _Trouble:
        where = _where(message)
        known = self._troubles.get(where)
        if known is None:
            known = self._troubles[where] = _Trouble(message, Repeats(since_ms))
            self._name = consumer_name(message.subject, getattr(message.delivery, "group", ""))
            self._summed += 1
        return known

    def _logged(self, trouble: _Trouble, now_ms: int) -> None:
        self._summed -= not trouble.repeats.open
        trouble.repeats.logged(now_ms)

    def _over(self, message: Message, now_ms: int, *, handled: bool) -> LogLine | None:
        trouble = self._troubles.pop(_where(message), None)
        if trouble is None:
            return None
        if not trouble.repeats.open:
            self._summed -= 1
            self._handled += handled
            self._given_up += not handled
            return None
        tries = counted(message.attempt, "attempt")
        after = f"after {tries} and {seconds(now_ms - trouble.repeats.since_ms)}"
        how = (
            f"{self._done} {after}"
            if handled
            else f"is given up here {after}, because its lease has ended or its "
            f"partition is handed "
            "over; the next owner tries it again"
        )
        return LogLine(f"{message_name(message)} {how}")


def _told(text: str) -> str:
    """Return the text of an error, on one line."""
    return f"; the error says: {printable(text.strip())[:TEXT_CHARS_MAX]}" if text.strip() else ""


def _where(message: Message) -> tuple[int, int]:
    return message.partition_id, message.offset

"""
Composes the log lines about failing and hanging messages, and limits how often they are logged.
Pure.

    failed, running ─▶ a line at once ─▶ again after 10, 20, 40 … s ─▶ at its end: a last line,
                 │                                                  which is no warning if it was
                 │                                                  only slow
                 ╰─▶ above LINES_PER_MINUTE: counted in a summary line, at growing intervals

Invariants
    A message that was logged gets another line at its end; every other message is counted in the
    next summary. At most 2 * LINES_PER_MINUTE messages get their first line within a minute. Keys
    are logged as a digest, the same as `printf %s KEY | b2sum -l 64` prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...protocol.log_filter import Allowance, LineLimit, Repeats
from ...protocol.message import Message
from ...protocol.parked import HANGS_MS
from ...protocol.text import counted, format_seconds, printable
from ..log_names import consumer_name, message_name

LINES_PER_MINUTE = 10
TRACEBACK_EVERY_MS = 60_000
"""The interval between tracebacks, in milliseconds: the first failure of each kind of error is
logged with its traceback, and then one failure per interval.
"""
KINDS_LOGGED = 5
TEXT_CHARS_MAX = 200
SEALED_WAITS = (
    "; its partition is sealed, and the partitions that continue it wait for this "
    "message: park it with "
    'on_failure="park", give it up with on_failure="dead", or pass it with `keylane group reset`'
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log line, whether to log the error's traceback with it, and whether it is a warning."""

    text: str
    traceback: bool = False
    warns: bool = True


@dataclass(slots=True)
class _FailingMessage:
    """A message that has failed, or whose handler has been running for a long time."""

    message: Message
    repeats: Repeats
    kind: str = ""
    """The kind of the last error; empty while the first attempt runs."""
    hangs: bool = False
    """True if its handler had been running for a long time at the last check."""


class HandlerLog:
    """
    Tracks the failing and hanging messages of one consumer. All times are in milliseconds on the
    boot clock.

    Args:
        runner: the phrase that log lines use for the code that handles messages.
        done: the phrase that log lines use for a message that has been handled.
        ordered: True if later messages of a key wait for a failing one; False: no message waits for
            another.
    """

    def __init__(
        self, *, runner: str = "handler", done: str = "is handled", ordered: bool = True
    ) -> None:
        self._runner = runner
        self._ordered = ordered
        self._done = done
        self._failing: dict[tuple[int, int], _FailingMessage] = {}
        allowance = Allowance(LINES_PER_MINUTE, LINES_PER_MINUTE / 60)
        self._line_limit = LineLimit(allowance)
        self._traceback_limit = LineLimit(Allowance(1, 1000 / TRACEBACK_EVERY_MS), allowance)
        self._name = ""
        """The consumer's name, as its messages state it."""
        self._unlogged_count = 0
        """The number of failing messages that have not been logged individually."""
        self._handled = self._given_up = 0
        """How many of those were handled, or given up (`_given_up`), since the last summary."""
        self._summary_times: Repeats | None = None

    def record_failure(
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
        Record that attempt `message.attempt` failed with an error of `kind`, and that the next
        attempt follows in `wait_ms`.

        Args:
            text: the error's text.
            asked_for: the reason, possibly empty, that the handler gave when it requested a retry;
                None: the handler failed.
            sealed: True if the message's partition is sealed, so that its children wait for the
                message.
        """
        failing = self._failing_message(message, now_ms)
        failing.kind = kind
        failing.hangs = False
        if now_ms < failing.repeats.due_ms:
            return None
        traceback = (
            asked_for is None and self._traceback_limit.admit(now_ms, kind, None) is not None
        )
        if not traceback and self._line_limit.admit(now_ms, None) is None:
            return None
        self._mark_logged(failing, now_ms)
        outcome = f"failed with {kind}"
        if asked_for is not None:
            outcome = (
                f"asked for another try ({asked_for:.200})"
                if asked_for
                else "asked for another try"
            )
        return LogLine(
            f"{self._runner} {outcome} on {message_name(message)}: attempt {message.attempt}, "
            f"{format_seconds(now_ms - failing.repeats.since_ms)} since the first; it is tried "
            f"again in {format_seconds(wait_ms)}{self._waiting_suffix(message, ',')}"
            f"{'' if asked_for else _error_suffix(text)}"
            f"{SEALED_WAITS if sealed else ''}",
            traceback,
        )

    def record_running(self, message: Message, since_ms: int, now_ms: int) -> LogLine | None:
        """Record that a handler has been running on `message` since `since_ms`."""
        if now_ms - since_ms < HANGS_MS:
            return None
        failing = self._failing_message(message, since_ms)
        failing.hangs = True
        if now_ms < failing.repeats.due_ms or self._line_limit.admit(now_ms, None) is None:
            return None
        self._mark_logged(failing, now_ms)
        return LogLine(
            f"{self._runner} has been running for {format_seconds(now_ms - since_ms)} on "
            f"{message_name(message)}: "
            f"attempt {message.attempt}, "
            f"{format_seconds(now_ms - failing.repeats.since_ms)} since the first"
            f"{self._waiting_suffix(message, ';')}"
        )

    def record_stopped(self, running: Iterable[Message], now_ms: int) -> list[LogLine]:
        """Record that handlers reported by `record_running` have finished, except those of
        `running`; a failure is already logged.
        """
        if not self._failing:
            return []
        running_ids = set(map(_message_id, running))
        stopped = [
            failing.message
            for message_id, failing in self._failing.items()
            if failing.hangs and message_id not in running_ids
        ]
        lines = [self._end(message, now_ms, handled=True) for message in stopped]
        return [line for line in lines if line is not None]

    def record_handled(self, message: Message, now_ms: int) -> LogLine | None:
        """Record that a message that had failed or hung has been handled."""
        return self._end(message, now_ms, handled=True)

    def record_set_aside(
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
        Record that a message is set aside and, if `with_key` is set, that later messages of its key
        wait with it.

        Args:
            pause_ms: milliseconds until it is retried automatically; None: never.
            asked_for: True if the handler requested a retry, so that no traceback is logged.
        """
        failing = self._failing.pop(_message_id(message), None)
        if failing is not None and not failing.repeats.open:
            self._unlogged_count -= 1
        traceback = (
            pause_ms is not None
            and not asked_for
            and self._traceback_limit.admit(now_ms, kind, None) is not None
        )
        if not traceback and self._line_limit.admit(now_ms, None) is None:
            return None
        outcome = (
            "is parked with the later messages of its key" if with_key else "is set aside alone"
        )
        if pause_ms is not None:
            outcome = f"is set aside alone, and tried again in {format_seconds(pause_ms)}"
        attempts = counted(message.attempt, "attempt")
        return LogLine(f"{message_name(message)} {outcome}: {kind} after {attempts}", traceback)

    @property
    def has_open_failures(self) -> bool:
        """True while any message that has failed or hung is not finished."""
        return bool(self._failing)

    def record_all_given_up(
        self, predicate: Callable[[Message], bool], now_ms: int
    ) -> list[LogLine]:
        """Record that each message that matches the predicate is given up; see
        `record_given_up`.
        """
        messages = [each.message for each in self._failing.values() if predicate(each.message)]
        lines = [self._end(message, now_ms, handled=False) for message in messages]
        return [line for line in lines if line is not None]

    def record_given_up(self, message: Message, now_ms: int) -> LogLine | None:
        """Record that this consumer no longer retries a message. Return None if the message neither
        failed nor hung.
        """
        return self._end(message, now_ms, handled=False)

    def record_cancelled(
        self, message: Message, count: int, now_ms: int, *, again: bool
    ) -> LogLine | None:
        """
        Record that a handler was cancelled, because its partition is handed over.

        Args:
            count: the number of messages that the handler had, of which `message` is the first.
            again: True if the next owner handles them again; False: they are acked already.
        """
        if _message_id(message) in self._failing:
            return self._end(message, now_ms, handled=False)
        self._name = consumer_name(message.subject, message.group)
        if self._line_limit.admit(now_ms, None) is None:
            self._given_up += 1
            return None
        batch = f" and {counted(count - 1, 'more message')}" if count > 1 else ""
        next_owner = "handles" if again else "does not handle"
        return LogLine(
            f"{self._runner} of {message_name(message)}{batch} was cancelled, because its lease "
            f"has ended or its partition is handed over; the next owner {next_owner} "
            f"{'it' if count == 1 else 'them'} again{'' if again else ': acked already'}"
        )

    def build_summary(self, now_ms: int, *, last: bool = False) -> LogLine | None:
        """Return a summary of the messages that were not logged individually if one is due, or in
        any case if `last` is set. Call this about once a second.
        """
        if not self._unlogged_count and not self._handled and not self._given_up:
            self._summary_times = None
            return None
        if self._summary_times is None:
            self._summary_times = Repeats(now_ms)
            # The messages' own first lines serve as the first summary.
            self._summary_times.logged(now_ms)
        if now_ms < self._summary_times.due_ms and not last:
            return None
        self._summary_times.logged(now_ms)
        ended = (
            f"{counted(self._handled, 'was', 'were')} handled since, {self._given_up} given up here"
        )
        if self._unlogged_count:
            failing = counted(
                self._unlogged_count, "more message fails or hangs", "more messages fail or hang"
            )
            text = f"{self._name}: {failing} in handlers{self._describe_unlogged(now_ms)}"
            text += f"; {ended}" if self._handled or self._given_up else ""
        else:
            text = (
                f"{self._name}: of the other messages that failed, hung or were cancelled {ended}"
            )
        self._handled = self._given_up = 0
        return LogLine(text)

    def _describe_unlogged(self, now_ms: int) -> str:
        """Describe the messages that were not logged individually: their errors, and the oldest
        message.
        """
        unlogged = [failing for failing in self._failing.values() if not failing.repeats.open]
        if not unlogged:
            return ""
        kinds = Counter(failing.kind or "still running" for failing in unlogged).most_common(
            KINDS_LOGGED
        )
        oldest = min(unlogged, key=lambda failing: failing.repeats.since_ms)
        kind_counts = ", ".join(f"{kind} {count}" for kind, count in kinds)
        age = format_seconds(now_ms - oldest.repeats.since_ms)
        return (
            f" ({kind_counts}); the oldest is {message_name(oldest.message)}: "
            f"attempt {oldest.message.attempt}, {age} since the first"
        )

    def _waiting_suffix(self, message: Message, separator: str) -> str:
        """Return the clause about later messages that are waiting, or "" if the message has no key
        or is set aside from its key.
        """
        is_loose = message.delivery is not None and message.delivery.is_loose
        waits = self._ordered and message.key and not is_loose
        return f"{separator} later messages of its key wait" if waits else ""

    def _failing_message(self, message: Message, since_ms: int) -> _FailingMessage:
        message_id = _message_id(message)
        failing = self._failing.get(message_id)
        if failing is None:
            failing = self._failing[message_id] = _FailingMessage(message, Repeats(since_ms))
            self._name = consumer_name(message.subject, message.group)
            self._unlogged_count += 1
        return failing

    def _mark_logged(self, failing: _FailingMessage, now_ms: int) -> None:
        self._unlogged_count -= not failing.repeats.open
        failing.repeats.logged(now_ms)

    def _end(self, message: Message, now_ms: int, *, handled: bool) -> LogLine | None:
        failing = self._failing.pop(_message_id(message), None)
        if failing is None:
            return None
        if not failing.repeats.open:
            self._unlogged_count -= 1
            self._handled += handled
            self._given_up += not handled
            return None
        tries = counted(message.attempt, "attempt")
        tries_suffix = f"after {tries} and {format_seconds(now_ms - failing.repeats.since_ms)}"
        outcome = (
            f"{self._done} {tries_suffix}"
            if handled
            else f"is given up here {tries_suffix}, because its lease has ended or its "
            f"partition is handed "
            "over; the next owner tries it again"
        )
        # A message that was only slow has already been warned about.
        warns = not handled or bool(failing.kind)
        return LogLine(f"{message_name(message)} {outcome}", warns=warns)


def _error_suffix(text: str) -> str:
    """Return the clause that shows an error's text on one line."""
    return f"; the error says: {printable(text.strip())[:TEXT_CHARS_MAX]}" if text.strip() else ""


def _message_id(message: Message) -> tuple[int, int]:
    return message.partition_id, message.offset

"""Builds what is recorded of failed attempts, reports them to the sessions of their messages, and
logs what becomes of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...protocol.message import Message
from ...protocol.parked import (
    Failure,
    ack_timeout_failure,
    failure_of,
    hanging_failure,
    nack_failure,
)
from ...protocol.text import counted
from ..log_names import message_name
from ..session.events import BatchFailed, FailureOutcome, MessageExpired, MessageFailed
from ..session.failure import Treatment
from .handler_log import HandlerLog, LogLine
from .handlers import Retry, only_retry
from .offers import OfferingShell

log = logging.getLogger("keylane.consumer")
FailedEvent = MessageFailed | MessageExpired | BatchFailed
LOST_LOG_MS = 1_000
"""The minimum interval between log lines about lost messages, in milliseconds; messages lost in
between are counted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecords:
    """
    The failures of one consumer's messages.

    Attributes:
        client: the consumer's display name.
        wall_ms: the wall clock, in milliseconds since 1970.
    """

    client: str
    wall_ms: Callable[[], int]

    def build_failure(self, error: BaseException, attempts: int) -> Failure:
        """Return the failure to record for an error."""
        return failure_of(error, client=self.client, at_ms=self.wall_ms(), attempts=attempts)

    def build_nack_failure(self, attempts: int, error: BaseException | None = None) -> Failure:
        """Return the failure to record for a message that the program nacked, or whose loop body
        raised `error`.
        """
        if error is not None:
            return self.build_failure(error, attempts)
        return nack_failure(client=self.client, at_ms=self.wall_ms(), attempts=attempts)

    def build_unacked_failure(self, attempts: int) -> Failure:
        """Return the failure to record for a shared group's message that the program neither acked
        nor nacked in time.
        """
        return ack_timeout_failure(client=self.client, at_ms=self.wall_ms(), attempts=attempts)

    def build_hang_failure(self, what: str, attempt: int) -> Failure:
        """Return the failure to record for a message whose attempt number `attempt` is hanging."""
        return hanging_failure(what, client=self.client, at_ms=self.wall_ms(), attempts=attempt - 1)


class FailedAttempts:
    """
    The failed attempts of a consumer's handlers.

    Args:
        lines: the log lines about failing messages.
        boot_ms: the boot clock.
    """

    def __init__(
        self, records: FailureRecords, lines: HandlerLog, *, boot_ms: Callable[[], int]
    ) -> None:
        self.records = records
        self.lines = lines
        self._boot_ms = boot_ms
        self._outcomes: list[FailureOutcome] = []
        """What a session has decided about the failure that is reported now."""
        self._lost_count = 0
        """The number of messages lost since the last log line about them."""
        self._next_lost_ms = 0

    def note_outcome(self, outcome: FailureOutcome) -> None:
        """Note what becomes of a failed message."""
        if outcome.treatment is Treatment.EXPIRED:
            log_line(self.lines.record_given_up(outcome.message, self._boot_ms()))
        else:
            self._outcomes.append(outcome)

    def report_error(
        self, shell: OfferingShell, failed: Message | list[Message], error: BaseException
    ) -> None:
        """Report that the handler of a message or a batch has raised `error`."""
        error = only_retry(error) or error
        is_asked = isinstance(error, Retry)
        asked_ms = error.wait_ms if isinstance(error, Retry) else None
        reason = error.reason if isinstance(error, Retry) else None
        first = failed[0] if isinstance(failed, list) else failed
        failure = self.records.build_failure(error, first.attempt)
        if isinstance(failed, list):
            event: FailedEvent = BatchFailed(failed, failure, asked_ms, is_asked)
        else:
            event = MessageFailed(failed, failure, asked_ms, is_asked)
        self.report(shell, event, error=error, reason=reason)

    def report(
        self,
        shell: OfferingShell,
        event: FailedEvent,
        *,
        error: BaseException | None = None,
        reason: str | None = None,
        suffix: str = "",
    ) -> list[Message]:
        """
        Report a failed attempt to its session, and log what becomes of it. Return later messages of
        its key that are taken back with it.

        Args:
            error: what a handler has raised; None: there is no handler.
            reason: why another try was asked for; None: the attempt has failed.
            suffix: ends the line.
        """
        messages = event.messages if isinstance(event, BatchFailed) else [event.message]
        first, failure, now_ms = messages[0], event.failure, self._boot_ms()
        self._outcomes.clear()
        shell.feed(event)
        if not self._outcomes:
            log_line(self.lines.record_given_up(first, now_ms))
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            if outcome.treatment is Treatment.LOST:
                self._log_lost(first, len(messages), error)
                continue
            if outcome.treatment is Treatment.AGAIN:
                line = self.lines.record_failure(
                    outcome.message,
                    failure.kind,
                    now_ms,
                    outcome.pause_ms or 0,
                    text="" if error is None else failure.text,
                    asked_for=reason,
                    sealed=shell.state.offsets.end_offset is not None,
                )
            else:
                line = self.lines.record_set_aside(
                    outcome.message,
                    failure.kind,
                    now_ms,
                    with_key=outcome.treatment is Treatment.PARKED,
                    pause_ms=outcome.pause_ms,
                    asked_for=isinstance(error, Retry),
                )
            if line is not None and suffix:
                line = replace(line, text=line.text + suffix)
            log_line(line, error)
        return [message for outcome in outcomes for message in outcome.returned]

    def _log_lost(self, first: Message, count: int, error: BaseException | None) -> None:
        """Log the failure of messages that were acked before their handler was called."""
        self._lost_count += count
        now_ms = self._boot_ms()
        if now_ms < self._next_lost_ms:
            return
        log.error(
            "handler failed with %s on %s, which is already acked, so it is not retried; %s lost",
            type(error).__qualname__,
            message_name(first),
            counted(self._lost_count, "message is", "messages are"),
            exc_info=error,
        )
        self._lost_count = 0
        self._next_lost_ms = now_ms + LOST_LOG_MS


def log_line(line: LogLine | None, error: BaseException | None = None) -> None:
    """Log a line about a failing message, if there is one."""
    if line is not None:
        level = logging.WARNING if line.warns else logging.INFO
        log.log(level, "%s", line.text, exc_info=error if line.traceback else None)

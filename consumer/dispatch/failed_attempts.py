"""Reports failed attempts to the sessions of their messages, and logs what becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...protocol.message import Message
from ...protocol.text import counted
from ..log_names import message_name
from ..session.events import BatchFailed, FailureOutcome, MessageFailed
from ..session.failure import Treatment
from .failing import FailureRecords
from .handler_log import HandlerLog, LogLine
from .not_acked import Retry, only_retry
from .offers import OfferingShell

log = logging.getLogger("keylane.consumer")
LOST_LOG_MS = 1_000
"""The minimum interval between log lines about lost messages, in milliseconds; messages lost in
between are counted.
"""


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

    def report(
        self, shell: OfferingShell, failed: Message | list[Message], error: BaseException
    ) -> None:
        """Report the failed attempt of a message or a batch, and log what becomes of it."""
        error = only_retry(error) or error
        is_asked = isinstance(error, Retry)
        asked_ms = error.wait_ms if isinstance(error, Retry) else None
        first = failed[0] if isinstance(failed, list) else failed
        failure = self.records.build_failure(error, first.attempt)
        self._outcomes.clear()
        if isinstance(failed, list):
            shell.feed(BatchFailed(failed, failure, asked_ms, is_asked))
        else:
            shell.feed(MessageFailed(failed, failure, asked_ms, is_asked))
        if not self._outcomes:
            log_line(self.lines.record_given_up(first, self._boot_ms()))
        outcomes, self._outcomes = self._outcomes, []
        is_sealed = shell.state.offsets.end_offset is not None
        for outcome in outcomes:
            if outcome.treatment is Treatment.LOST:
                self._log_lost(first, len(failed) if isinstance(failed, list) else 1, error)
            else:
                self._log(outcome, error, failure.kind, failure.text, is_sealed=is_sealed)

    def _log(
        self,
        outcome: FailureOutcome,
        error: BaseException,
        kind: str,
        text: str,
        *,
        is_sealed: bool,
    ) -> None:
        message, now_ms = outcome.message, self._boot_ms()
        if outcome.treatment is Treatment.AGAIN:
            line = self.lines.record_failure(
                message,
                type(error).__qualname__,
                now_ms,
                outcome.pause_ms or 0,
                text=text,
                asked_for=error.reason if isinstance(error, Retry) else None,
                sealed=is_sealed,
            )
        else:
            line = self.lines.record_set_aside(
                message,
                kind,
                now_ms,
                with_key=outcome.treatment is Treatment.PARKED,
                pause_ms=outcome.pause_ms,
                asked_for=isinstance(error, Retry),
            )
        log_line(line, error)

    def _log_lost(self, first: Message, count: int, error: BaseException) -> None:
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

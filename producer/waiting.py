"""Explains why messages are waiting, and logs it after five seconds and then at growing intervals.
Pure except for logging.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ..protocol.clock import Clock
from ..protocol.errors import (
    ForeignServerError,
    KeylaneError,
    PartitionUnknownError,
    RetryRule,
    UnreachableError,
    WrongBrokerError,
)
from ..protocol.text import counted
from .outgoing_batch import OutgoingBatch

log = logging.getLogger("keylane.producer")

FIRST_MS = 5_000
REPEAT_MS = 60_000
REPEAT_MS_MAX = 3_600_000


class WaitCause(NamedTuple):
    """The reason for a wait, and advice, as texts for users; both are empty if no message is
    waiting.
    """

    reason: str = ""
    advice: str = ""


ROUTE_ADVICE = (
    "the producer follows the next route automatically; keylane subject operations shows "
    "what that waits for"
)
METASERVER_ADVICE = (
    "restart a metaserver, or fix the network connection to it; keylane broker list "
    "shows whether it answers"
)
NOT_WAITING = WaitCause()
NO_ANSWER = "the broker has not answered yet"
NOT_SENT = "it waits behind older messages, or for its batch to fill"
NO_ROUTE = WaitCause("the metaserver has not answered with the route yet", METASERVER_ADVICE)
NO_PARTITION = WaitCause("the route has no open partition for them", ROUTE_ADVICE)
OLDER_ROUTE = WaitCause(
    "the metaserver's route is older than the one followed",
    "restart the producer if the metaserver's database was restored from a copy",
)


def broker_cause(error: KeylaneError, broker_group: str) -> WaitCause:
    """Return the cause of a wait after sending to a broker has failed with `error`."""
    if isinstance(error, UnreachableError) and not isinstance(error, ForeignServerError):
        advice = (
            f"restart broker group {broker_group}, or fix the network connection to it; "
            f"if its disk is lost for good: keylane broker evacuate {broker_group} --accept-loss"
        )
    elif isinstance(error, WrongBrokerError | PartitionUnknownError):
        advice = (
            "the producer follows the next route automatically; keylane broker list shows a broker "
            "that is refused, and why; "
            f"if the data folder of broker group {broker_group} is lost for good: "
            f"keylane broker evacuate {broker_group} --accept-loss"
        )
    elif error.retry is RetryRule.AFTER_NEW_ROUTE:
        advice = ROUTE_ADVICE
    else:
        advice = f"at broker group {broker_group}: {error.hint}"
    return WaitCause(error.message, advice)


def route_cause(error: KeylaneError) -> WaitCause:
    """Return the cause of a wait after fetching the route has failed with `error`."""
    down = isinstance(error, UnreachableError) and not isinstance(error, ForeignServerError)
    return WaitCause(error.message, METASERVER_ADVICE if down else error.hint)


class WaitReport:
    """
    Tracks since when a partition's messages have been waiting, for log lines. All times are
    monotonic, in milliseconds.
    """

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._sent_ms = 0
        """When the oldest waiting message was sent, in milliseconds of boot time. The wait itself
        began later, with a failed attempt.
        """
        self._next_report_ms = FIRST_MS
        self._reported = False

    @property
    def since_ms(self) -> int | None:
        """The start of the current wait; None if nothing is waiting."""
        return self._since_ms

    def record_wait(self, now_ms: int, oldest_ms: int) -> bool:
        """
        Record that messages are waiting. Return True if a report is due: after 5 s, 1 min, 2 min, 4
        min …, at most an hour apart.

        Args:
            oldest_ms: milliseconds since the oldest message was sent.
        """
        if self._since_ms is None:
            self._since_ms = self._sent_ms = now_ms
            self._next_report_ms = FIRST_MS
        self._sent_ms = min(self._sent_ms, now_ms - oldest_ms)
        waited_ms = now_ms - self._since_ms
        if waited_ms < self._next_report_ms:
            return False
        while self._next_report_ms <= waited_ms:
            doubled_ms = max(REPEAT_MS, 2 * self._next_report_ms)
            self._next_report_ms = min(doubled_ms, self._next_report_ms + REPEAT_MS_MAX)
        self._reported = True
        return True

    def end(self, now_ms: int) -> int | None:
        """
        End the wait, if there is one.

        Returns:
            Milliseconds since the oldest message of the wait was sent; None if there was no wait or
            it was never reported.
        """
        waited, reported = self._since_ms is not None, self._reported
        self._since_ms = None
        self._reported = False
        return now_ms - self._sent_ms if reported and waited else None


def oldest_age_ms(batches: Sequence[OutgoingBatch], clock: Clock) -> int:
    """Return the age of the first batch's first message, in milliseconds of wall-clock time, or 0
    if the clock was set back.
    """
    return max(0, clock.wall_ms() - batches[0].first_sent_at_ns // 1_000_000)


class PartitionWaits:
    """Tracks why the messages of one partition are waiting, and logs it at growing intervals and
    when the wait ends.
    """

    def __init__(self, partition_name: str, broker_group: str, clock: Clock) -> None:
        self.cause = NOT_WAITING
        self._name = partition_name
        self._broker_group = broker_group
        self._clock = clock
        self._report = WaitReport()

    @property
    def since_ms(self) -> int | None:
        """The start of the current wait; None if nothing is waiting."""
        return self._report.since_ms

    def begin(
        self,
        error: KeylaneError,
        now_ms: int,
        batches: Sequence[OutgoingBatch],
        address: str | None,
    ) -> None:
        """Record that `batches`, given oldest first, are waiting because of `error`, and log this
        if it is due.
        """
        self.cause = broker_cause(error, self._broker_group)
        oldest_ms = oldest_age_ms(batches, self._clock)
        if self._report.record_wait(now_ms, oldest_ms):
            log.warning(
                "%s at %s: %s, the oldest for %.0f s: %s",
                self._name,
                address or f"broker group {self._broker_group}",
                counted(sum(map(len, batches)), "message waits", "messages wait"),
                oldest_ms / 1000,
                error.message,
            )

    def suspend(self) -> None:
        """End the wait in this partition, because the messages have left it, but keep the cause."""
        self._report.end(self._clock.boot_ms())

    def end(self) -> None:
        """End the wait, because messages are stored again or none remain."""
        self.cause = NOT_WAITING
        if self._report.since_ms is None:
            return
        waited_ms = self._report.end(self._clock.boot_ms())
        if waited_ms is not None:
            log.warning("%s: sending resumed after %.0f s", self._name, waited_ms / 1000)

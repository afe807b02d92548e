"""Why messages wait, with advice, and when a log line reports it: after five seconds, then ever
more rarely. Pure except for the log.
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
AGAIN_MS = 60_000
AGAIN_MS_MAX = 3_600_000


class WaitCause(NamedTuple):
    """Why messages wait, and what helps: two texts for people, both empty if no message waits."""

    reason: str = ""
    advice: str = ""


BY_ITSELF = (
    "the producer follows the next route by itself; keylane subject operations shows "
    "what that waits for"
)
META_DOWN = (
    "start a metaserver again, or repair the network to it; keylane broker list "
    "shows whether it answers"
)
NOT_WAITING = WaitCause()
NO_ANSWER = "the broker has not answered yet"
NOT_SENT = "it waits behind older messages, or for its batch to fill"
NO_ROUTE = WaitCause("the metaserver has not answered with the route yet", META_DOWN)
NO_PARTITION = WaitCause("the route has no open partition that takes them", BY_ITSELF)
OLDER_ROUTE = WaitCause(
    "the metaserver's route is older than the one followed",
    "start the producer again if the metaserver's database was restored from a copy",
)


def broker_cause(error: KeylaneError, broker_group: str) -> WaitCause:
    """Return why messages wait after a try to send them to a broker ended with `error`."""
    if isinstance(error, UnreachableError) and not isinstance(error, ForeignServerError):
        advice = (
            f"start broker group {broker_group} again, or repair the network to it; if its disk is "
            f"lost for good: "
            f"keylane broker evacuate {broker_group} --accept-loss"
        )
    elif isinstance(error, WrongBrokerError | PartitionUnknownError):
        advice = (
            "the producer follows the next route by itself; keylane broker list shows a broker "
            "that is refused, and why; "
            f"if the data folder of broker group {broker_group} is lost for good: "
            f"keylane broker evacuate {broker_group} --accept-loss"
        )
    elif error.retry is RetryRule.AFTER_NEW_ROUTE:
        advice = BY_ITSELF
    else:
        advice = f"at broker group {broker_group}: {error.hint}"
    return WaitCause(error.message, advice)


def route_cause(error: KeylaneError) -> WaitCause:
    """Return why messages are held after a call for the route ended with `error`."""
    down = isinstance(error, UnreachableError) and not isinstance(error, ForeignServerError)
    return WaitCause(error.message, META_DOWN if down else error.hint)


class WaitReport:
    """
    Tracks when a partition's messages wait, for log lines. All times are monotonic milliseconds.
    """

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._sent_ms = 0
        """The boot time, in milliseconds, at which the oldest waiting message was sent; the wait
        itself began later, with a failed try.
        """
        self._next_ms = FIRST_MS
        self._reported = False

    @property
    def since_ms(self) -> int | None:
        """Return the start of the present wait; None if nothing waits."""
        return self._since_ms

    def waits(self, now_ms: int, oldest_ms: int) -> bool:
        """
        Note that messages wait, and return True if a report is due: after 5 s, 1 min, 2 min, 4 min
        …, at most an hour apart.

        Args:
            oldest_ms: milliseconds since the oldest of them was sent.
        """
        if self._since_ms is None:
            self._since_ms = self._sent_ms = now_ms
            self._next_ms = FIRST_MS
        self._sent_ms = min(self._sent_ms, now_ms - oldest_ms)
        waited_ms = now_ms - self._since_ms
        if waited_ms < self._next_ms:
            return False
        while self._next_ms <= waited_ms:
            grown = max(AGAIN_MS, 2 * self._next_ms)
            self._next_ms = min(grown, self._next_ms + AGAIN_MS_MAX)
        self._reported = True
        return True

    def over(self, now_ms: int) -> int | None:
        """
        Note that nothing waits.

        Returns:
            Milliseconds since the oldest message of the wait was sent, if the wait was reported and
            ends here; otherwise None.
        """
        waited, reported = self._since_ms is not None, self._reported
        self._since_ms = None
        self._reported = False
        return now_ms - self._sent_ms if reported and waited else None


def oldest_age_ms(batches: Sequence[OutgoingBatch], clock: Clock) -> int:
    """Return the milliseconds since the first message of the first batch was sent, by the calendar;
    0 if the calendar was set back.
    """
    return max(0, clock.wall_ms() - batches[0].first_sent_at_ns // 1_000_000)


class PartitionWaits:
    """Why the messages of one partition wait; the log reports it at growing intervals, and when the
    wait is over.
    """

    def __init__(self, partition_name: str, broker_group: str, clock: Clock) -> None:
        self.cause = NOT_WAITING
        self._name = partition_name
        self._broker_group = broker_group
        self._clock = clock
        self._report = WaitReport()

    @property
    def since_ms(self) -> int | None:
        """Return the start of the present wait; None if nothing waits."""
        return self._report.since_ms

    def begin(
        self,
        error: KeylaneError,
        now_ms: int,
        batches: Sequence[OutgoingBatch],
        address: str | None,
    ) -> None:
        """Note that the messages of `batches` wait because of `error`; the first batch is the
        oldest.
        """
        self.cause = broker_cause(error, self._broker_group)
        oldest_ms = oldest_age_ms(batches, self._clock)
        if self._report.waits(now_ms, oldest_ms):
            log.warning(
                "%s at %s: %s, the oldest for %.0f s: %s",
                self._name,
                address or f"broker group {self._broker_group}",
                counted(sum(map(len, batches)), "message waits", "messages wait"),
                oldest_ms / 1000,
                error.message,
            )

    def left(self) -> None:
        """Note that the messages wait elsewhere; the cause stays."""
        self._report.over(self._clock.boot_ms())

    def over(self) -> None:
        """Note that messages are stored again, or that none are left."""
        self.cause = NOT_WAITING
        if self._report.since_ms is None:
            return
        took_ms = self._report.over(self._clock.boot_ms())
        if took_ms is not None:
            log.warning("%s: messages flow again after %.0f s", self._name, took_ms / 1000)

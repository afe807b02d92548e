"""
Decides how long a reader retries when servers fail: for ten seconds, or indefinitely if it follows
its subject.

first failure ─▶ (10 s) ─▶ raised, or logged as a warning
    ─▶ (20 s, 40 s, …) logged again ─▶ recovered: logged once

Failures are timed per partition. If messages are missing on a broker, the reader gives up after ten
seconds of that error, even when it follows its subject, but not earlier: the broker may still be
recovering.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from ...protocol.errors import (
    KeylaneError,
    OffsetOutOfRangeError,
    OverloadedError,
    PartitionUnknownError,
    RetryRule,
    UnreachableError,
    WrongBrokerError,
)
from ...protocol.limits import READ_GIVE_UP_MS
from ...rpc.connections import NO_CONNECTION

log = logging.getLogger("keylane.consumer")

_MISSING_DATA = (PartitionUnknownError, OffsetOutOfRangeError)
"""The errors of a broker that temporarily runs on an older copy of its data folder."""
_PASSING = (*NO_CONNECTION, OverloadedError, WrongBrokerError)
"""The errors that end when the broker, or the one that has its place, serves."""
TRANSIENT_ERRORS = (*_PASSING, *_MISSING_DATA)
"""The errors that a reader retries."""

Failures: TypeAlias = dict[int | None, KeylaneError]
"""Errors by partition. The key None stands for the metaservers, which report a partition's
children.
"""


@dataclass(slots=True)
class _OngoingFailure:
    """A continuing failure of a partition or of the metaservers. Times are in milliseconds on the
    boot clock.
    """

    error: KeylaneError
    """The most recent error."""
    since_ms: int
    """The time since which every round has failed, with whatever error."""
    permanent_since_ms: int | None = None
    """The time since which all errors have been permanent, meaning that they do not end when a
    server returns; None if the last one was not.
    """
    warned_after_ms: int = 0
    """How long the failure had lasted at the last warning, in milliseconds; 0 if none was
    logged.
    """

    @property
    def lasting_since_ms(self) -> int:
        """The time from which the give-up timeout counts."""
        return self.since_ms if self.permanent_since_ms is None else self.permanent_since_ms


class FailureTracker:
    """Tracks the failures after which a reader retries, and decides when it gives up."""

    def __init__(self, subject: str, *, follows: bool) -> None:
        self._subject = subject
        self._follows = follows
        self._ongoing: dict[int | None, _OngoingFailure] = {}

    def record_failures(self, failures: Mapping[int | None, KeylaneError], now_ms: int) -> None:
        """Record the failures of a round at `now_ms` on the boot clock. Everything not in
        `failures` has recovered or is waiting for messages.
        """
        previous = self._ongoing
        self._ongoing = {}
        logged = {failure.error.message for failure in previous.values()}
        for partition_id, error in failures.items():
            failure = previous.pop(partition_id, None) or _OngoingFailure(error, now_ms)
            self._ongoing[partition_id] = failure
            failure.error = error
            if _is_transient(error):
                failure.permanent_since_ms = None
            elif failure.permanent_since_ms is None:
                failure.permanent_since_ms = now_ms
            if error.message not in logged:
                logged.add(error.message)
                log.info("reader of %s: %s", self._subject, error.message)
        self._log_recovered(previous.values(), now_ms)

    def check(self, now_ms: int, metaserver_error: UnreachableError | None = None) -> None:
        """
        Raise an error that has lasted too long, or log the failures that the reader keeps retrying.

        Args:
            metaserver_error: the reason why no metaserver can say whether messages missing on a
                broker are lost for good; it is raised or logged in place of those errors.

        Raises:
            KeylaneError: an error has lasted for READ_GIVE_UP_MS; a permanent one is preferred. A
                reader that follows never gives up on a server that may return.
        """
        expired = [
            failure
            for failure in self._ongoing.values()
            if now_ms - failure.lasting_since_ms >= READ_GIVE_UP_MS
        ]
        warnings: list[tuple[str, _OngoingFailure]] = []
        for failure in sorted(expired, key=lambda failure: _is_transient(failure.error)):
            error = failure.error
            if metaserver_error is not None and isinstance(error, _MISSING_DATA):
                error = metaserver_error
            if not (self._follows and _is_transient(error)):
                raise error
            warnings.append((error.message, failure))
        self._log_waiting(warnings, now_ms)

    def _log_waiting(self, expired: Iterable[tuple[str, _OngoingFailure]], now_ms: int) -> None:
        """Log one line for each distinct error message, at doubling intervals. There is usually one
        per broker, no matter how many partitions it has.
        """
        for message, same_error in _by_message(expired):
            waited_ms = max(now_ms - failure.since_ms for failure in same_error)
            warned_after_ms = max(failure.warned_after_ms for failure in same_error)
            if waited_ms >= 2 * warned_after_ms:
                warned_after_ms = waited_ms
                log.warning(
                    "reader of %s has been failing for %d s and keeps retrying; it still reads "
                    "from the brokers that it can reach: %s",
                    self._subject,
                    waited_ms // 1000,
                    message,
                )
            for failure in same_error:
                failure.warned_after_ms = warned_after_ms

    def _log_recovered(self, recovered: Iterable[_OngoingFailure], now_ms: int) -> None:
        """Log the end of each error that was logged and that no partition has any more."""
        warnings = [
            (failure.error.message, failure) for failure in recovered if failure.warned_after_ms
        ]
        still_failing = {failure.error.message for failure in self._ongoing.values()}
        for message, same_error in _by_message(warnings):
            if message not in still_failing:
                waited_ms = max(now_ms - failure.since_ms for failure in same_error)
                log.warning(
                    "reader of %s has recovered after %d s (%s)",
                    self._subject,
                    waited_ms // 1000,
                    message,
                )


def _is_transient(error: KeylaneError) -> bool:
    """Return True if the error may go away when a server returns or has room."""
    return isinstance(error, _PASSING) and error.retry is not RetryRule.NEVER


def _by_message(
    failures: Iterable[tuple[str, _OngoingFailure]],
) -> list[tuple[str, list[_OngoingFailure]]]:
    """Group failures by error message."""
    ordered = sorted(failures, key=lambda entry: entry[0])
    return [
        (message, [failure for _, failure in group])
        for message, group in groupby(ordered, key=lambda entry: entry[0])
    ]

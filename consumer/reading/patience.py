"""Decides how long a reader waits for servers that do not answer: for ten seconds, or for ever if
it follows its subject.

first failure ─▶ (10 s) ─▶ given up, or logged as a warning
    ─▶ (20 s, 40 s, …) logged again ─▶ answered: logged once

Each partition has its own times. Messages that a broker lacks are given up after ten seconds of
this error alone: until then the broker may have been away.
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
    PartitionUnknownError,
    RetryRule,
    UnreachableError,
)
from ...protocol.limits import READ_GIVE_UP_MS
from ..unreached import NO_CONNECTION

log = logging.getLogger("keylane.consumer")

_LACKS = (PartitionUnknownError, OffsetOutOfRangeError)
"""The errors of a broker that runs, for a while, on an older copy of its data folder."""
WAITED_FOR = (*NO_CONNECTION, *_LACKS)
"""The failures that may pass."""

Failures: TypeAlias = dict[int | None, KeylaneError]
"""The failures by partition; None stands for the metaservers, which do not report the children of a
partition.
"""


@dataclass(slots=True)
class _ReadTrouble:
    """A partition, or the metaservers, that fail; times are of the boot clock."""

    error: KeylaneError
    """The last error."""
    since_ms: int
    """The time since which each round has failed, for whatever reason."""
    stays_since_ms: int | None = None
    """The time since which each error does not pass when a server returns; None if the last one may
    pass.
    """
    told_ms: int = 0
    """The milliseconds of failure after which the last warning was logged; 0 if none was."""

    @property
    def counts_from_ms(self) -> int:
        """Return the time since which the last error has lasted."""
        return self.since_ms if self.stays_since_ms is None else self.stays_since_ms


class Patience:
    """The failures for which a reader waits, and since when, and whether it gives up."""

    def __init__(self, subject: str, *, follows: bool) -> None:
        self._subject = subject
        self._follows = follows
        self._troubles: dict[int | None, _ReadTrouble] = {}

    def note(self, failures: Mapping[int | None, KeylaneError], now_ms: int) -> None:
        """Note the failures of a round at `now_ms` of the boot clock: everything that is not in
        `failures` has answered, or waits.
        """
        before = self._troubles
        self._troubles = {}
        known = {trouble.error.message for trouble in before.values()}
        for partition_id, error in failures.items():
            trouble = before.pop(partition_id, None) or _ReadTrouble(error, now_ms)
            self._troubles[partition_id] = trouble
            trouble.error = error
            if _may_pass(error):
                trouble.stays_since_ms = None
            elif trouble.stays_since_ms is None:
                trouble.stays_since_ms = now_ms
            if error.message not in known:
                known.add(error.message)
                log.info("reader of %s: %s", self._subject, error.message)
        self._tell_over(before.values(), now_ms)

    def check(self, now_ms: int, unasked: UnreachableError | None = None) -> None:
        """
        Continue to wait, and log it from time to time.

        Args:
            unasked: the reason why no metaserver reports whether messages that brokers lack are
                gone; raised or logged in place of those errors.

        Raises:
            KeylaneError: an error has lasted for READ_GIVE_UP_MS; one that does not pass is
                preferred. A reader that follows waits for ever for a server that may still answer.
        """
        lasting = [
            trouble
            for trouble in self._troubles.values()
            if now_ms - trouble.counts_from_ms >= READ_GIVE_UP_MS
        ]
        told: list[tuple[str, _ReadTrouble]] = []
        for trouble in sorted(lasting, key=lambda each: _may_pass(each.error)):
            error = trouble.error
            if unasked is not None and isinstance(error, _LACKS):
                error = unasked
            if not (self._follows and _may_pass(error)):
                raise error
            told.append((error.message, trouble))
        self._tell(told, now_ms)

    def _tell(self, lasting: Iterable[tuple[str, _ReadTrouble]], now_ms: int) -> None:
        """Log one line for each message of errors, at doubling intervals: usually one for each
        broker, however many partitions it has.
        """
        for message, troubles in _by_message(lasting):
            waited_ms = max(now_ms - trouble.since_ms for trouble in troubles)
            told_ms = max(trouble.told_ms for trouble in troubles)
            if waited_ms >= 2 * told_ms:
                told_ms = waited_ms
                log.warning(
                    "reader of %s has waited for %d s and keeps trying; it continues with the "
                    "brokers it can reach: %s",
                    self._subject,
                    waited_ms // 1000,
                    message,
                )
            for trouble in troubles:
                trouble.told_ms = told_ms

    def _tell_over(self, ended: Iterable[_ReadTrouble], now_ms: int) -> None:
        told = [(trouble.error.message, trouble) for trouble in ended if trouble.told_ms]
        going_on = {trouble.error.message for trouble in self._troubles.values()}
        for message, troubles in _by_message(told):
            if message not in going_on:
                waited_ms = max(now_ms - trouble.since_ms for trouble in troubles)
                log.warning(
                    "reader of %s continues after %d s (%s)",
                    self._subject,
                    waited_ms // 1000,
                    message,
                )


def _may_pass(error: KeylaneError) -> bool:
    """Return whether the error may be over once a server is back at its address, or has a place for
    a connection.
    """
    return isinstance(error, NO_CONNECTION) and error.retry is not RetryRule.NEVER


def _by_message(
    troubles: Iterable[tuple[str, _ReadTrouble]],
) -> list[tuple[str, list[_ReadTrouble]]]:
    ordered = sorted(troubles, key=lambda each: each[0])
    return [
        (message, [trouble for _, trouble in group])
        for message, group in groupby(ordered, key=lambda each: each[0])
    ]

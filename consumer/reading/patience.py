"""How long a reader waits for servers that do not answer: for ten seconds, or for good if it
follows its subject.

first failure ─▶ (10 s) ─▶ given up, or told as a warning ─▶ (20 s, 40 s, …) told again ─▶ answered: told once

Each partition has its own times.  What a broker lacks is given up after ten seconds of that alone:
until then the broker may have been away.
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
"""The broker stands on an older copy of its data folder, for a while."""
WAITED_FOR = (*NO_CONNECTION, *_LACKS)
"""Failures that may pass."""

Failures: TypeAlias = dict[int | None, KeylaneError]
"""By partition; None: of the metaservers, which do not tell what continues a partition."""


@dataclass(slots=True)
class _ReadTrouble:
    """A partition, or the metaservers, that fail; times are of the boot clock."""

    error: KeylaneError
    """The last one."""
    since_ms: int
    """Since when each round has failed, for whatever reason."""
    stays_since_ms: int | None = None
    """Since when each error has been one that does not pass when a server is back; None: the last
    one may.
    """
    told_ms: int = 0
    """After how long the last warning was logged; 0: none was."""

    @property
    def counts_from_ms(self) -> int:
        """Since when the last error has lasted."""
        return self.since_ms if self.stays_since_ms is None else self.stays_since_ms


class Patience:
    """Since when a reader waits for what, and whether it gives up."""

    def __init__(self, subject: str, *, follows: bool) -> None:
        self._subject = subject
        self._follows = follows
        self._troubles: dict[int | None, _ReadTrouble] = {}

    def note(self, failures: Mapping[int | None, KeylaneError], now_ms: int) -> None:
        """Note what a round has met at `now_ms` of the boot clock: all that is not in `failures`
        has answered, or waits.
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
        Wait on, and say so in the log from time to time.

        Args:
            unasked: why no metaserver says whether messages that brokers lack are gone; raised or
                told in place of those errors.

        Raises:
            KeylaneError: one that has lasted for READ_GIVE_UP_MS, and rather one that does not
                pass; a reader that follows waits for good for a server that may answer yet.
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
        """One line for each message of errors, at doubling intervals: mostly one for a broker,
        whatever it has of partitions.
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
    """Whether the error may be over once a server is back at its address, or has a place for a
    connection.
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

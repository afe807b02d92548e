"""What the log says of a full disk: messages are refused, or go before they are old by retention_ms."""

from __future__ import annotations

import logging

from ...protocol.clock import Clock

log = logging.getLogger("keylane.broker")

QUIET_MS = 600_000
"""A line of one kind comes no sooner after the one before: a disk may cross a limit at every check."""


class DiskNotes:
    """Notes a check's result; a refusal that lasts is told once, and its end once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told_refusal = False
        """The last line said that messages are refused."""
        self._refusal_quiet_ms = self._early_quiet_ms = 0

    def refusing(self, reason: str) -> None:
        """Note why messages are refused at the end of a check; "" if they are taken."""
        now_ms = self._clock.boot_ms()
        if not reason and self._told_refusal:
            self._told_refusal = False
            log.warning("messages are taken again: the disk has room")
        if not reason or self._told_refusal or now_ms < self._refusal_quiet_ms:
            return
        self._told_refusal = True
        self._refusal_quiet_ms = now_ms + QUIET_MS
        log.error("messages are refused: %s; make room, or add a disk", reason)

    def removed_early(self, percent: int, position: int) -> None:
        """Note that the log was removed up to `position` because of the disk, against its own limits."""
        now_ms = self._clock.boot_ms()
        if now_ms < self._early_quiet_ms:
            return
        self._early_quiet_ms = now_ms + QUIET_MS
        log.warning(
            "the disk was %d %% full: messages that no group needs are removed before their time,"
            " now up to position %d; make room, add a disk, or shorten retention_ms",
            percent, position,
        )  # fmt: skip

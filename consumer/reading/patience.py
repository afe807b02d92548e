"""How long a reader waits for servers that do not answer: for ten seconds, or for good if it follows its subject.

first failure ─▶ (10 s) ─▶ given up, or told as a warning ─▶ (20 s, 40 s, …) told again ─▶ answered: told once
"""

from __future__ import annotations

import logging

from ...protocol.errors import KeylaneError, RetryRule, UnreachableError
from ...protocol.limits import READ_GIVE_UP_MS

log = logging.getLogger("keylane.consumer")


class Patience:
    """Since when a reader waits, and whether it gives up."""

    def __init__(self, subject: str, *, follows: bool) -> None:
        self._subject = subject
        self._follows = follows
        self._since_ms: int | None = None
        self._told_ms = 0
        """After how long the last warning was logged; 0: none was."""

    def begin(self, error: KeylaneError, now_ms: int) -> None:
        """Note a failure at `now_ms` of the boot clock; the first one counts."""
        if self._since_ms is None:
            self._since_ms = now_ms
            log.info("reader of %s: %s", self._subject, error.message)

    def check(self, error: KeylaneError, now_ms: int) -> None:
        """
        Wait on, and say so in the log from time to time.

        Raises:
            KeylaneError: `error`, if it has lasted for READ_GIVE_UP_MS; a reader that follows waits for good for a server that
                may answer yet.
        """
        waited_ms = now_ms - (now_ms if self._since_ms is None else self._since_ms)
        if waited_ms < READ_GIVE_UP_MS:
            return
        may_answer = isinstance(error, UnreachableError) and error.retry is not RetryRule.NEVER
        if not (self._follows and may_answer):
            raise error
        if waited_ms >= 2 * self._told_ms:
            self._told_ms = waited_ms
            log.warning(
                "reader of %s has waited for %d s, and keeps asking; what it can reach it reads: %s",
                self._subject, waited_ms // 1000, error.message,
            )  # fmt: skip

    def end(self, now_ms: int) -> None:
        """Every server that was asked has answered."""
        if self._told_ms and self._since_ms is not None:
            waited_s = (now_ms - self._since_ms) // 1000
            log.warning("reader of %s goes on after %d s", self._subject, waited_s)
        self._since_ms, self._told_ms = None, 0

"""The loop in which a task of a producer tries again, and what the log says of its troubles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ...protocol.backoff import Pauses
from ...protocol.errors import InternalError, KeylaneError

log = logging.getLogger("keylane.producer")

TOLD_MAX = 100
"""Texts of troubles that a log tells of, between two successes."""
FAULT_HINT = (
    "The log of this program has the traceback: look at what the error names, as threads or memory."
)


class TroubleLog:
    """
    What the log says of a task that sends or follows a route: each trouble once, until a try succeeds.

    Args:
        what: the route or the partition that the task looks after.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.told: set[str] = set()
        """Texts of troubles since the last success: of several servers each has one of its own."""

    def failure(self, error: Exception) -> KeylaneError:
        """The same error; for one that nothing foresaw an InternalError, which names it, after a line with its traceback."""
        if isinstance(error, KeylaneError):
            return error
        text = f"{type(error).__name__}: {error!s:.200}"
        if self._is_new(text):
            log.error("%s: %s; it is tried again", self._what, text, exc_info=error)
        failure = InternalError(f"the producer met {text}")
        failure.hint = FAULT_HINT
        failure.__cause__ = error
        return failure

    def failed(self, error: KeylaneError) -> None:
        """A call ended with `error`."""
        level = logging.INFO if self._is_new(error.message) else logging.DEBUG
        log.log(level, "%s: %s", self._what, error.message)

    def answered(self) -> None:
        """A try has succeeded: what fails from here on is told anew."""
        self.told.clear()

    def _is_new(self, text: str) -> bool:
        """True once of each text, and of TOLD_MAX texts at most."""
        if text in self.told or len(self.told) >= TOLD_MAX:
            return False
        self.told.add(text)
        return True


class RouteLog(TroubleLog):
    """What the log says of the calls for the route of one subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"route of {subject}")
        self._outdated: int | None = None

    def older(self, version: int, followed: int) -> None:
        """The metaserver has a `version` below the one that is followed; told once for each of the latter."""
        if self._outdated != followed:
            self._outdated = followed
            log.warning(
                "%s: the metaserver's is version %d, older than %d, which is followed here: its database "
                "was restored from a copy, or rebuilt. Until it has a newer one nothing of it is followed; a producer "
                "that is started again takes what the metaserver has",
                self._what, version, followed,
            )  # fmt: skip


async def keep_trying(
    attempt: Callable[[], Awaitable[bool]],
    failed: Callable[[Exception], Awaitable[bool]],
    pauses: Pauses,
    troubles: TroubleLog,
) -> None:
    """
    Try again and again.  No error ends it: the messages of a task that ended would wait without a word.

    Args:
        attempt: one try; True if no other one is needed.
        failed: acts on what a try raised; True if the next try begins without a pause.  What it raises is logged.
    """
    while True:
        hurries = False
        try:
            try:
                if await attempt():
                    return
                continue
            except Exception as error:  # noqa: BLE001 - acted on, whatever it is
                hurries = await failed(error)
        except Exception as fault:  # noqa: BLE001 - of acting on the other one; the next try may do without
            with suppress(Exception):
                troubles.failure(fault)
        if hurries:
            pauses.skip()
            continue
        with suppress(Exception):
            await asyncio.sleep(pauses.next_ms() / 1000)

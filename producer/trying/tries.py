"""The loop in which a task of a producer tries again, and the error that it makes of an unforeseen
exception.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ...protocol.backoff import Pauses
from ...protocol.errors import InternalError, KeylaneError
from ...protocol.log_filter import LogFilter

log = logging.getLogger("keylane.producer")

FAULT_HINT = (
    "The log of this program has the traceback: look at what the error names, as threads or memory."
)


def failure_of(raised: Exception, what: str, troubles: LogFilter, now_ms: int) -> KeylaneError:
    """
    Return the same error; an unforeseen exception is logged with its traceback, and becomes an
    InternalError that names it.

    Args:
        what: the route or the partition that the task looks after.
    """
    if isinstance(raised, KeylaneError):
        return raised
    text = f"{type(raised).__name__}: {raised!s:.200}"
    if line := troubles.met(text, now_ms):
        log.error("%s: %s; retrying", what, line, exc_info=raised)
    failure = InternalError(f"the producer met {text}")
    failure.hint = FAULT_HINT
    failure.__cause__ = raised
    return failure


async def keep_trying(
    attempt: Callable[[], Awaitable[bool]],
    failed: Callable[[Exception], Awaitable[bool]],
    pauses: Pauses,
    log_fault: Callable[[Exception], object],
) -> None:
    """
    Try repeatedly. No error ends the loop: the messages of a task that ended would wait silently.

    Args:
        attempt: makes one try; True if no further try is needed.
        failed: acts on the exception of a try; True if the next try begins without a pause.
        log_fault: logs an exception that `failed` raised.
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
        except Exception as fault:  # noqa: BLE001 - the next try may do without the act
            with suppress(Exception):
                log_fault(fault)
        if hurries:
            pauses.skip()
            continue
        with suppress(Exception):
            await asyncio.sleep(pauses.next_ms() / 1000)

"""The retry loop of a producer's tasks, and the conversion of unexpected exceptions."""

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
    "The log of this program has the traceback: check what the error names, such as threads or "
    "memory."
)


def to_keylane_error(
    raised: Exception, name: str, failure_log: LogFilter, now_ms: int
) -> KeylaneError:
    """
    Return a KeylaneError unchanged. Log any other exception with its traceback, and wrap it in an
    InternalError.

    Args:
        name: the partition or route that the task serves, for log lines.
        failure_log: limits repeated log lines.
    """
    if isinstance(raised, KeylaneError):
        return raised
    text = f"{type(raised).__name__}: {raised!s:.200}"
    if log_text := failure_log.count_failure(text, now_ms):
        log.error("%s: %s; retrying", name, log_text, exc_info=raised)
    failure = InternalError(f"unexpected error in the producer: {text}")
    failure.hint = FAULT_HINT
    failure.__cause__ = raised
    return failure


async def retry_until_done(
    attempt: Callable[[], Awaitable[bool]],
    on_failure: Callable[[Exception], Awaitable[bool]],
    pauses: Pauses,
    log_fault: Callable[[Exception], object],
) -> None:
    """
    Call `attempt` until it returns True. No error ends the loop, because messages would then wait
    forever with nothing logged.

    Args:
        attempt: makes one attempt, and returns True if no further one is needed.
        on_failure: handles the exception of a failed attempt, and returns True to retry without a
            pause.
        pauses: the backoff between attempts.
        log_fault: logs an exception that `on_failure` raised.
    """
    while True:
        skip_pause = False
        try:
            try:
                if await attempt():
                    return
                continue
            except Exception as error:  # noqa: BLE001 - handled, whatever it is
                skip_pause = await on_failure(error)
        except Exception as fault:  # noqa: BLE001 - the next attempt may succeed anyway
            with suppress(Exception):
                log_fault(fault)
        if skip_pause:
            pauses.skip()
            continue
        with suppress(Exception):
            await asyncio.sleep(pauses.next_pause_ms() / 1000)

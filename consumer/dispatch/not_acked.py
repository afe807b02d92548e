"""The signals with which a handler declines to ack its message: it raises `Retry`, or returns
`NACK`. Pure.
"""

from __future__ import annotations

from typing import Any, Final

from ...protocol.errors import InvalidRequestError

AFTER_S_MAX = 86_400
SHORTEST_MS_MAX = 1_000
"""The upper limit, in milliseconds, of the minimum pause that is enforced when a handler repeatedly
requests retries.
"""


class Retry(Exception):  # noqa: N818 - a request of the handler, not an error
    """
    Raise this in a handler to have its message retried instead of acked.

    The message is retried before any later message of its key. No traceback is logged.

        raise keylane.Retry("the warehouse is closed", after_s=30)

    Args:
        reason: the reason, for the log.
        after_s: the minimum number of seconds until the next attempt, up to a day; None: a growing
            pause, as after an error. If the lease ends earlier, the next owner handles the message
            at once. 0 means at once, but a message whose attempts repeatedly request this waits 1
            ms, 2 ms, 4 ms and so on, up to 1 s, so that it does not spin.

    Raises:
        InvalidRequestError: `after_s` is not a number from 0 to a day.
    """

    def __init__(self, reason: str = "", *, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_ms = None if after_s is None else parse_wait_ms(after_s)
        """The milliseconds until the next attempt; None: as configured in the consumer's
        settings.
        """


SIGNALS_FROM = 128
"""By convention, the exit code of a program killed by a signal is 128 plus the signal's number."""


def is_signal(error: BaseException) -> bool:
    """Return True for an error that a signal raised. It may occur anywhere, so it says nothing
    about the message being handled.
    """
    if isinstance(error, SystemExit):
        code = error.code
        return code is None or (isinstance(code, int) and not 0 < code < SIGNALS_FROM)
    return isinstance(error, GeneratorExit | KeyboardInterrupt)


def only_retry(error: BaseException) -> Retry | None:
    """Return the Retry with the longest wait if an exception group, such as that of a TaskGroup,
    contains only retries; otherwise None.
    """
    if not isinstance(error, BaseExceptionGroup):
        return None
    causes = [only_retry(cause) or cause for cause in error.exceptions]
    retries = [cause for cause in causes if isinstance(cause, Retry)]
    if len(retries) < len(causes):
        return None
    return max(retries, key=lambda retry: retry.wait_ms or 0)


class _Nack:
    """The type of `NACK`."""

    def __repr__(self) -> str:
        return "keylane.NACK"

    def __reduce__(self) -> str:
        # A handler may return a result that comes from another process. A copy of NACK would not be
        # recognized, so the message would be acked.
        return "NACK"


NACK: Final = _Nack()
"""A handler returns this to have its message retried, as with `raise Retry()`."""


def parse_wait_ms(after_s: Any) -> int:
    """Convert `after_s` to milliseconds. Raises InvalidRequestError if it is not a number from 0 to
    a day.
    """
    is_number = isinstance(after_s, int | float) and not isinstance(after_s, bool)
    if not is_number or not 0 <= after_s <= AFTER_S_MAX:
        raise InvalidRequestError(
            f"after_s must be seconds from 0 to {AFTER_S_MAX}, not {after_s!r:.40}"
        )
    return int(after_s * 1000)


def limited_wait_ms(wait_ms: int, attempt: int) -> int:
    """Return the milliseconds until the next attempt if attempt number `attempt` requested
    `wait_ms`. The result is longer than requested if the handler would otherwise spin.
    """
    if attempt < 2:
        return wait_ms
    return max(wait_ms, min(1 << min(attempt - 2, 10), SHORTEST_MS_MAX))

"""The ways in which a handler does not ack its message: it raises `Retry`, or returns `NACK`.
Pure.
"""

from __future__ import annotations

from typing import Any, Final

from ...protocol.errors import InvalidRequestError

AFTER_S_MAX = 86_400
SHORTEST_MS_MAX = 1_000
"""The limit, in milliseconds, of the shortest pause before a try that is requested repeatedly: the
pause grows to this.
"""


class Retry(Exception):  # noqa: N818 - a request of the handler, not an error
    """
    Raised by a handler that does not ack its message.

    The message is tried again, before any later message of its key. No traceback is logged.

        raise keylane.Retry("the warehouse is closed", after_s=30)

    Args:
        reason: the reason for the log.
        after_s: the least seconds until the next try; up to a day. None: a growing pause, as after
            an error. If the lease ends earlier, the next owner gets the message and tries it at
            once. 0: at once; a message whose tries ask for it again and again waits 1 ms, 2 ms, 4
            ms and so on, up to 1 s, so that it does not spin.

    Raises:
        InvalidRequestError: `after_s` is not such a number.
    """

    def __init__(self, reason: str = "", *, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_ms = None if after_s is None else wait_ms_of(after_s)
        """The milliseconds until the next try; None: the pauses of the consumer's settings."""


SIGNALS_FROM = 128
"""The exit code, by convention, of a program that a signal ends, without the number of the signal,
which is added.
"""


def is_a_signal(error: BaseException) -> bool:
    """Return True for an error that a signal raises, wherever the program is: it says nothing about
    the message there.
    """
    if isinstance(error, SystemExit):
        code = error.code
        return code is None or (isinstance(code, int) and not 0 < code < SIGNALS_FROM)
    return isinstance(error, GeneratorExit | KeyboardInterrupt)


def only_retry(error: BaseException) -> Retry | None:
    """Return the Retry with the longest wait from a group that contains nothing else, as a
    TaskGroup raises it; otherwise None.
    """
    if not isinstance(error, BaseExceptionGroup):
        return None
    asked = [only_retry(each) or each for each in error.exceptions]
    retries = [each for each in asked if isinstance(each, Retry)]
    return max(retries, key=lambda each: each.wait_ms or 0) if len(retries) == len(asked) else None


class _Nack:
    def __repr__(self) -> str:
        return "keylane.NACK"

    def __reduce__(self) -> str:
        # A handler may return the result of a function in another process: a copy would be ignored,
        # which would ack the message.
        return "NACK"


NACK: Final = _Nack()
"""The result by which a handler asks for another try, like `raise Retry()`."""


def wait_ms_of(after_s: Any) -> int:
    """Return `after_s` in milliseconds. Raises InvalidRequestError."""
    number = isinstance(after_s, int | float) and not isinstance(after_s, bool)
    if not number or not 0 <= after_s <= AFTER_S_MAX:
        raise InvalidRequestError(
            f"after_s must be seconds from 0 to {AFTER_S_MAX}, not {after_s!r:.40}"
        )
    return int(after_s * 1000)


def asked_wait_ms(wait_ms: int, attempt: int) -> int:
    """Return the milliseconds until the next try, if try number `attempt` asked for `wait_ms`."""
    if attempt < 2:
        return wait_ms
    return max(wait_ms, min(1 << min(attempt - 2, 10), SHORTEST_MS_MAX))

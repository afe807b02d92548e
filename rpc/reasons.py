"""Describes socket errors in plain words, and shortens their tracebacks to one line."""

from __future__ import annotations

import errno
import re

_WORDS = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "connection reset",
    errno.EPIPE: "connection closed",
    errno.ETIMEDOUT: "timed out",
    errno.ENETUNREACH: "network unreachable",
    errno.EHOSTUNREACH: "no route to the host",
    errno.EADDRINUSE: "the port is in use",
    errno.EADDRNOTAVAIL: "this machine has no such address",
    errno.EACCES: "not allowed",
    errno.EPERM: "not allowed",
    errno.EMFILE: "too many open files",
}


def reason(error: BaseException) -> str:
    """Return the reason for an error in a few words: the error's own text if its number is not in
    `_WORDS`, or the name of its class if it has no text.
    """
    cause: object = getattr(error, "os_error", error)
    if isinstance(cause, OSError):
        number = cause.errno
        quoted = re.search(r"\[Errno ([0-9]+)\]", str(cause))  # one of several addresses tried
        if number is None and quoted is not None:
            number = int(quoted[1])
        if number in _WORDS:
            return _WORDS[number]
    if isinstance(cause, TimeoutError):
        return "timed out"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or type(cause).__name__


def cause(error: Exception) -> Exception:
    """
    Return the operating system's error, or `error` itself, without its traceback, for use in `raise
    … from`.

    The frames inside aiohttp do not help users, and they hide the line that does.
    """
    system_error: object = getattr(error, "os_error", error)
    system_error = system_error if isinstance(system_error, OSError) else error
    system_error.__cause__ = None
    system_error.__context__ = None
    system_error.__traceback__ = None
    return system_error

"""Gives requests ids, which join a client's error with the lines of a server's log.

HTTP         each answer has its id in the header Keylane-Request-Id, and so has each line that is
logged meanwhile
data plane   a call gets an id when it fails because of a bug, in its error and in the log
"""

from __future__ import annotations

import logging
import secrets
from contextvars import ContextVar

from ..protocol.errors import InternalError

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request that is being handled; "" outside of one."""


def new_request_id() -> str:
    """Return 16 hexadecimal digits."""
    return secrets.token_hex(8)


def log_fault(log: logging.Logger, call: str, error: BaseException) -> InternalError:
    """Log a bug that has made a call fail, with its traceback. Return the error for the caller,
    with the id of the log line.
    """
    token = REQUEST_ID.set(REQUEST_ID.get() or new_request_id())
    try:
        log.error("%s failed", call, exc_info=error)
        return InternalError(request_id=REQUEST_ID.get())
    finally:
        REQUEST_ID.reset(token)

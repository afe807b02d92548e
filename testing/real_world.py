"""Calls that virtual time cannot wait for, refused while a story runs: real sleeps, new threads, sockets.

The interpreter tells its audit hooks of these calls, however they are spelled and whichever library makes them.  A hook
cannot be taken away again: the first story of a process adds it, and between stories it lets everything pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from typing import Any

from ..protocol.errors import RealWorldError, StoryError

REFUSED = {
    "time.sleep": "time.sleep stops the test, and virtual time does not pass meanwhile",
    "_thread.start_new_thread": "virtual time cannot wait for a thread",
    "socket.connect": "virtual time cannot wait for a socket",
    "socket.bind": "virtual time cannot wait for a socket",
    "socket.getaddrinfo": "virtual time cannot wait for a name server",
}
"""By the name of the audit event: why."""


class _Watched:
    """The thread whose calls are refused now, and who is told of them."""

    thread = 0
    tell: Callable[[RealWorldError], None]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event not in REFUSED or get_ident() != _Watched.thread:
        return
    if event == "time.sleep" and args and args[0] == 0:  # gives way to other threads
        return
    error = RealWorldError(f"{REFUSED[event]}: {event}{args!r:.120}", call=event)
    _Watched.tell(error)
    raise error


@cache
def _add_hook() -> None:
    sys.addaudithook(_hook)


@contextmanager
def refused_here(tell: Callable[[RealWorldError], None]) -> Iterator[None]:
    """Refuse these calls in this thread with a RealWorldError, which `tell` gets too: their caller may swallow it."""
    if _Watched.thread:
        raise StoryError("another story runs in this process")
    _add_hook()
    _Watched.tell = tell
    _Watched.thread = get_ident()
    try:
        yield
    finally:
        _Watched.thread = 0

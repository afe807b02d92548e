"""While a story runs, refuses calls that virtual time cannot wait for: real sleeps, new threads,
and sockets.

The functions are patched in their modules during the story, but only for its thread. Code that
imported a function earlier, as with `from time import sleep`, still calls the original.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import get_ident
from typing import Any
from unittest.mock import patch

from ..protocol.errors import Reason, StoryError

REFUSED: tuple[tuple[Any, str, str], ...] = (
    (time, "sleep", "time.sleep stops the test, and virtual time does not pass meanwhile"),
    (threading.Thread, "start", "virtual time cannot wait for a thread"),
    (socket.socket, "connect", "virtual time cannot wait for a socket"),
    (socket.socket, "connect_ex", "virtual time cannot wait for a socket"),
    (socket.socket, "bind", "virtual time cannot wait for a socket"),
    (socket, "getaddrinfo", "virtual time cannot wait for a name server"),
)
"""The owner of each refused function, the function's name, and the reason."""
_running: list[int] = []
"""The thread id of the running story, if there is one."""


def _make_refusal(
    owner: Any, name: str, reason: str, report: Callable[[StoryError], None]
) -> Callable[..., Any]:
    original = getattr(owner, name)
    story_thread_id = get_ident()
    call = f"{owner.__name__}.{name}"

    @wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        is_yield = name == "sleep" and args == (0,)
        if get_ident() != story_thread_id or is_yield:
            return original(*args, **kwargs)
        error = StoryError(Reason.REAL_WORLD, f"{reason}: {call}", call=call)
        report(error)
        raise error

    return refuse


@contextmanager
def refuse_real_world(report: Callable[[StoryError], None]) -> Iterator[None]:
    """
    Refuse these calls in this thread with a StoryError. The error is also passed to `report`,
    because callers may swallow it.

    Raises:
        StoryError: another story is running in this process.
    """
    if _running:
        raise StoryError("another story runs in this process")
    _running.append(get_ident())
    try:
        with ExitStack() as stack:
            for owner, name, reason in REFUSED:
                stack.enter_context(
                    patch.object(owner, name, _make_refusal(owner, name, reason, report))
                )
            yield
    finally:
        _running.clear()

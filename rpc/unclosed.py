"""Closes the connections of a client that the program forgot to close, and reports where the client
was created.

Without this, aiohttp would log several lines about each of its own sessions, which the program has
never seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import warnings
import weakref
from collections.abc import Sequence

import aiohttp

from .loop_binding import process_id
from .race import start_task

log = logging.getLogger("keylane")
_PACKAGE = __name__.partition(".")[0]


def creation_place() -> str:
    """Return the file and line of the innermost caller outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != _PACKAGE:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def watch_network(
    network: object, sessions: Sequence[aiohttp.ClientSession], owner: str
) -> weakref.finalize[..., object]:
    """Call `close_unclosed` when the network is garbage-collected or the program ends, unless the
    returned finalizer is detached. The sessions belong to the running event loop.
    """
    loop = asyncio.get_running_loop()
    return weakref.finalize(network, close_unclosed, sessions, loop, owner, process_id())


def close_unclosed(
    sessions: Sequence[aiohttp.ClientSession],
    loop: asyncio.AbstractEventLoop,
    owner: str,
    opened_in: int,
) -> None:
    """
    Close the sessions, which belong to `loop`, and warn that `owner` was not closed.

    The warning is logged, because Python does not show ResourceWarning by default.
    """
    if process_id() != opened_in:  # the parent is using the connections
        return
    for session in sessions:
        if loop.is_running():
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(_close_soon, session)
        elif session.connector is not None:
            with contextlib.suppress(StopIteration, RuntimeError):
                next(session.connector.close().__await__())  # the first step closes everything
            session.detach()
    text = f"{owner} was never closed: use `async with`, or await its close()"
    log.warning("%s", text)
    warnings.warn(text, ResourceWarning, stacklevel=2)


def _close_soon(session: aiohttp.ClientSession) -> None:
    task = start_task(session.close(), name="close a forgotten session")
    task.add_done_callback(lambda _: session)

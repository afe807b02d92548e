"""The end of a callback of the event loop, where its parts do what they can share, such as a write
or the begin of a commit.

    in_turn(callback) ─▶ at_end(call) … at_end(call) ─▶ the callback has returned ─▶ call, call, …

A `call_soon` would do it a turn of the loop later, after one more poll of all sockets.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("keylane.rpc")

Call = Callable[[], object]


class _Left(threading.local):
    """The calls that the callback running in this thread has scheduled for its end."""

    calls: list[Call] | None = None
    """Scheduled calls; None: `in_turn` is not running."""


_left = _Left()


def at_end(call: Call, loop: asyncio.AbstractEventLoop) -> None:
    """Call a function at the end of the callback that `in_turn` runs, or otherwise in the next turn
    of the loop; the order is kept.
    """
    calls = _left.calls
    if calls is None:
        loop.call_soon(call)
    else:
        calls.append(call)


def in_turn(callback: Callable[..., object], /, *args: Any) -> None:
    """Call `callback(*args)` in the thread of an event loop, then the calls that it has scheduled,
    and those that they have scheduled.
    """
    if _left.calls is not None:
        callback(*args)
        return
    calls: list[Call] = []
    _left.calls = calls
    done = 0
    try:
        try:
            callback(*args)
        finally:
            for call in calls:
                done += 1
                try:
                    call()
                except Exception:
                    log.exception("a callback failed at its end")
    finally:
        _left.calls = None
        for call in calls[done:]:  # the program is being ended
            asyncio.get_running_loop().call_soon(call)

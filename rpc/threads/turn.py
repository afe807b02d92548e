"""The end of a callback of the event loop: where its parts leave what they share, as a write or the
begin of a commit.

    in_turn(callback) ─▶ at_end(call) … at_end(call) ─▶ the callback has returned ─▶ call, call, …

A `call_soon` would do it a turn of the loop later, behind one more poll of all sockets.
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
    """What the callback that runs in this thread has left for its end."""

    calls: list[Call] | None = None
    """None: none of `in_turn` runs."""


_left = _Left()


def at_end(call: Call, loop: asyncio.AbstractEventLoop) -> None:
    """Have `call` called at the end of the callback that `in_turn` runs, or else in the next turn
    of the loop; in order.
    """
    calls = _left.calls
    if calls is None:
        loop.call_soon(call)
    else:
        calls.append(call)


def in_turn(callback: Callable[..., object], /, *args: Any) -> None:
    """Call `callback(*args)` in the thread of an event loop, then what it leaves, and what that
    leaves.
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

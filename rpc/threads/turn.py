"""Runs functions at the end of the current event loop callback, for work that its parts can share,
such as a write or the start of a commit.

    in_turn(callback) ─▶ at_end(call) … at_end(call) ─▶ the callback has returned ─▶ call, call, …

`call_soon` would run them one iteration of the loop later, after another poll of all sockets.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("keylane.rpc")

Call = Callable[[], object]


class _Scheduled(threading.local):
    """The calls that this thread's current callback has scheduled for its end."""

    calls: list[Call] | None = None
    """The scheduled calls; None if `in_turn` is not running."""


_scheduled = _Scheduled()


def at_end(call: Call, loop: asyncio.AbstractEventLoop) -> None:
    """Call a function at the end of the callback that `in_turn` runs, or without one in the loop's
    next iteration; functions are called in order.
    """
    scheduled_calls = _scheduled.calls
    if scheduled_calls is None:
        loop.call_soon(call)
    else:
        scheduled_calls.append(call)


def in_turn(callback: Callable[..., object], /, *args: Any) -> None:
    """Call `callback(*args)`, and then the functions that it has scheduled with `at_end`, including
    those that they schedule themselves. Call this in an event loop's thread.
    """
    if _scheduled.calls is not None:
        callback(*args)
        return
    calls: list[Call] = []
    _scheduled.calls = calls
    done_count = 0
    try:
        try:
            callback(*args)
        finally:
            for call in calls:
                done_count += 1
                try:
                    call()
                except Exception:
                    log.exception("a function scheduled for the end of a callback failed")
    finally:
        _scheduled.calls = None
        for call in calls[done_count:]:  # left over after KeyboardInterrupt or SystemExit
            asyncio.get_running_loop().call_soon(call)

"""Runs functions at the end of the current event loop callback, for work that can be shared by
everything in the callback, such as a write or the start of a commit.

    in_turn(callback) ─▶ at_end(call) … at_end(call) ─▶ the callback has returned ─▶ call, call, …

`call_soon` would run them one loop iteration later, after another poll of all sockets.
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
    """The calls that were scheduled for the end of this thread's current callback."""

    calls: list[Call] | None = None
    """The scheduled calls; None while `in_turn` is not running."""


_scheduled = _Scheduled()


def at_end(call: Call, loop: asyncio.AbstractEventLoop) -> None:
    """Call a function at the end of the callback that `in_turn` runs or, outside of one, in the
    loop's next iteration. Functions are called in order.
    """
    scheduled_calls = _scheduled.calls
    if scheduled_calls is None:
        loop.call_soon(call)
    else:
        scheduled_calls.append(call)


def in_turn(callback: Callable[..., object], /, *args: Any) -> None:
    """Call `callback(*args)`, and then the functions that were scheduled with `at_end`, including
    those that these schedule. Call this in an event loop's thread.
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
        for call in calls[done_count:]:  # left over after a KeyboardInterrupt or SystemExit
            asyncio.get_running_loop().call_soon(call)

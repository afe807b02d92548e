"""The turn of a consumer's messages that may end its process: one of them runs at a time, across
all partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class AloneTurn:
    """A turn; if the process ends during it, the message whose turn it is has probably ended it."""

    def __init__(self) -> None:
        self._lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def taken(self, limit_s: float) -> AsyncIterator[None]:
        """Wait for the turn, in the order of the calls; it ends with the block, or after `limit_s`,
        so that no caller waits for ever.
        """
        loop = asyncio.get_running_loop()
        if self._lock is None or self._loop is not loop:
            self._lock = asyncio.Lock()
            self._loop = loop
        lock, over = self._lock, False
        await lock.acquire()

        def end() -> None:
            nonlocal over
            if not over:
                over = True
                lock.release()

        timer = loop.call_later(limit_s, end)
        try:
            yield
        finally:
            timer.cancel()
            end()

"""A lock that lets only one suspect message of a consumer run at a time, across all partitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SuspectLock:
    """Serializes messages that may kill the process: if it dies, the message that held the lock is
    probably the cause.
    """

    def __init__(self) -> None:
        self._lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def acquire(self, limit_s: float) -> AsyncIterator[None]:
        """Wait for the lock, in FIFO order, and hold it inside the block, but for at most `limit_s`
        seconds, so that a hanging handler does not block other suspects forever.
        """
        loop = asyncio.get_running_loop()
        if self._lock is None or self._loop is not loop:
            self._lock = asyncio.Lock()
            self._loop = loop
        lock, is_released = self._lock, False
        await lock.acquire()

        def release() -> None:
            nonlocal is_released
            if not is_released:
                is_released = True
                lock.release()

        timer = loop.call_later(limit_s, release)
        try:
            yield
        finally:
            timer.cancel()
            release()

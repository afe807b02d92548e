"""Caches the last result of a database read for probes and scrapes, which time out after a second
and cannot wait for an unresponsive database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..protocol.errors import KeylaneError

T = TypeVar("T")
WAIT_S = 0.6
"""How long, in seconds, a call waits for a new result; the rest of the second is needed to send the
reply.
"""


@dataclass(frozen=True, slots=True)
class CachedResult(Generic[T]):
    """The result of the last successful read, with its age."""

    value: T | None
    """The result; None if no read has succeeded yet."""
    age_s: float
    """Seconds since the read finished; 0 if this call started it."""
    error: KeylaneError | None = None
    """The error of the most recent read; None if it succeeded or is still running."""


class CachedRead(Generic[T]):
    """Runs a read on demand, at most once at a time, and caches the last result."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._read = read
        self._task: asyncio.Task[None] | None = None
        self._value: T | None = None
        self._read_at_s = 0.0
        self._error: KeylaneError | None = None

    async def get(self) -> CachedResult[T]:
        """Return a fresh result if the read finishes within `WAIT_S`, else the cached one."""
        clock = asyncio.get_running_loop().time
        if self._task is None:
            self._task = asyncio.create_task(self._refresh())
        task = self._task
        finished, _ = await asyncio.wait([task], timeout=WAIT_S)
        if finished:
            task.result()
            if self._error is None:
                return CachedResult(self._value, 0.0)
        age_s = 0.0 if self._value is None else clock() - self._read_at_s
        return CachedResult(self._value, age_s, self._error)

    async def _refresh(self) -> None:
        """Run the read once, and cache its result or its error."""
        try:
            self._value = await self._read()
            self._read_at_s = asyncio.get_running_loop().time()
            self._error = None
        except KeylaneError as error:
            self._error = error
        finally:
            self._task = None

    async def close(self) -> None:
        """Cancel a running read."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

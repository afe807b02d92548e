"""Remembers the last result of a read, for callers such as probes and scrapes, which have a second
and cannot wait for a database that does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..protocol.errors import KeylaneError

T = TypeVar("T")
WAIT_S = 0.6
"""Time, in seconds, for which a call waits for a new reading; the rest of the second is for its
answer.
"""


@dataclass(frozen=True, slots=True)
class Recalled(Generic[T]):
    """The result of the last successful reading, with its age."""

    value: T | None
    """The result; None before the first reading."""
    age_s: float
    """Time, in seconds, since the reading ended; 0: it was made for this call."""
    error: KeylaneError | None = None
    """Error of a later reading; None: the last reading succeeded, or has not ended."""


class Remembered(Generic[T]):
    """Runs at most one reading at a time, when it is asked, and remembers the last result."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._read = read
        self._reading: asyncio.Task[None] | None = None
        self._value: T | None = None
        self._read_at_s = 0.0
        self._error: KeylaneError | None = None

    async def ask(self) -> Recalled[T]:
        """Return a new result if its reading ends in time, else the last one."""
        clock = asyncio.get_running_loop().time
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_now())
        reading = self._reading
        done, _ = await asyncio.wait([reading], timeout=WAIT_S)
        if done:
            reading.result()
            if self._error is None:
                return Recalled(self._value, 0.0)
        age_s = 0.0 if self._value is None else clock() - self._read_at_s
        return Recalled(self._value, age_s, self._error)

    async def _read_now(self) -> None:
        try:
            self._value = await self._read()
            self._read_at_s = asyncio.get_running_loop().time()
            self._error = None
        except KeylaneError as error:
            self._error = error
        finally:
            self._reading = None

    async def close(self) -> None:
        """Cancel the reading that is running."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

"""What was read last, for who cannot wait for a database that does not answer: probes and scrapes
have a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..protocol.errors import KeylaneError

T = TypeVar("T")
WAIT_S = 0.6
"""How long an ask waits for a new reading; what remains of the second is for the rest of its
answer.
"""


@dataclass(frozen=True, slots=True)
class Recalled(Generic[T]):
    """The last reading."""

    value: T | None
    """None: there was none yet."""
    age_s: float
    """Since its end; 0: it was read for this ask."""
    error: KeylaneError | None = None
    """Why there is no newer one; None: it is not over, or it is this one."""


class Remembered(Generic[T]):
    """Reads when it is asked, one reading at a time, and remembers the last one."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._read = read
        self._reading: asyncio.Task[None] | None = None
        self._value: T | None = None
        self._read_at_s = 0.0
        self._error: KeylaneError | None = None

    async def ask(self) -> Recalled[T]:
        """Return a new reading if it is over in time, else the last one."""
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
        """End the reading that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

"""What a measured handler does, the same for keylane's consumers and for the bare one: it reads key and value, and counts.

The bytes of all keys and values are in the figures, so that a message that was counted and never made shows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

Figures = dict[str, float]


class Handled(Protocol):
    """A message, of keylane or of the bare path."""

    key: bytes
    value: bytes


class Clock:
    """Wall clock and processor time from the first message to the last."""

    def __init__(self) -> None:
        self._began = (0.0, 0.0)
        self.figures: Figures = {}
        self.done = asyncio.Event()

    def edge(self, size_bytes: int) -> None:
        """Note the first message, and then the last one, with the bytes that were read until then."""
        now, cpu = time.monotonic(), time.process_time()
        if not self._began[0]:
            self._began = now, cpu
        elif not self.figures:
            began, cpu_began = self._began
            self.figures = {
                "seconds": now - began,
                "ended": now,
                "cpu_seconds": cpu - cpu_began,
                "read_bytes": size_bytes,
            }
            self.done.set()


def handler_of(clock: Clock, count: int) -> Callable[[Handled], Awaitable[None]]:
    """An `async` handler of `count` messages."""
    left, size_bytes, last = count, 0, count - 1

    async def handle(message: Handled) -> None:
        nonlocal left, size_bytes
        size_bytes += len(message.key) + len(message.value)
        left -= 1
        if not 0 < left < last:
            clock.edge(size_bytes)

    return handle


def reader_of(clock: Clock, count: int) -> Callable[[Iterable[Handled]], None]:
    """As the body of `handler_of`, of many messages in a loop."""
    left, size_bytes, begun = count, 0, False

    def read(messages: Iterable[Handled]) -> None:
        nonlocal left, size_bytes, begun
        if not begun:
            begun = True
            clock.edge(0)
        for message in messages:
            size_bytes += len(message.key) + len(message.value)
            left -= 1
        if left <= 0:
            clock.edge(size_bytes)

    return read

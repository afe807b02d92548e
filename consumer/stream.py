"""
Messages for `async for`: one queue, no handlers, acks by hand.

While the iteration goes on, a partition that goes to another consumer waits for the acks of what was taken; once
the consumer closes, what was not acked is given up at once and comes again.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ..protocol.clock import Clock
from ..protocol.message import Message
from .pull_client import PullClient

MESSAGES_PER_TURN = 256


class Stream:
    """Hands messages out one by one, in the order of their offsets within each partition."""

    def __init__(self, *, clock: Clock) -> None:
        self._waiting: deque[Message] = deque()
        self._boot_ns = clock.boot_ns
        self._work = asyncio.Event()
        self._left = MESSAGES_PER_TURN
        self._error: BaseException | None = None
        self._closed = False
        self._leaving = asyncio.Event()

    def put(self, messages: list[Message]) -> None:
        """Add messages of one partition."""
        self._waiting.extend(messages)
        self._work.set()

    async def next(self) -> Message:
        """The next message whose lease has not ended.  Raises StopAsyncIteration after close."""
        while True:
            self._left -= 1
            if not self._left:
                self._left = MESSAGES_PER_TURN
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            if not self._waiting:
                self._work.clear()
                await self._work.wait()
                continue
            message = self._waiting.popleft()
            client: PullClient = message.delivery  # type: ignore[assignment]
            if self._boot_ns() < client.deadline_ns:
                client.taken(message)
                return message
            client.forget(1)

    async def quiesce(self, client: PullClient, *, timeout_ms: int) -> None:
        """
        Forget what waits of `client`'s partition, and wait for the acks of what the user holds; after `leave` not.
        """
        kept = deque(
            one
            for one in self._waiting
            if one.delivery.holder is not client  # type: ignore[union-attr]
        )
        client.forget(len(self._waiting) - len(kept))
        self._waiting = kept
        waits = [
            asyncio.ensure_future(client.settled()),
            asyncio.ensure_future(self._leaving.wait()),
        ]
        try:
            await asyncio.wait(
                waits, timeout=timeout_ms / 1000, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def leave(self) -> None:
        """The consumer closes, so nobody is left to ack: no hand-over waits for what was taken any more."""
        self._leaving.set()

    def fail(self, error: BaseException) -> None:
        """End the iteration with `error`."""
        self._error = error
        self._work.set()

    async def close(self) -> None:
        """End the iteration."""
        self._closed = True
        self._waiting.clear()
        self._work.set()

"""A call whose answer a task awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...protocol.frames import Answer, Request
from ...rpc.plane.prompt import Handled


class AwaitedCall:
    """
    A `PromptCall` with a single answer; the awaiting task itself takes room for messages.

    Args:
        handle: answers a request that is handed on.
    """

    takes_parts = False

    def __init__(self, handle: Callable[[Request, memoryview], Awaitable[Handled]]) -> None:
        self._handle = handle
        self._ended: asyncio.Future[Handled | Request]
        self._ended = asyncio.get_running_loop().create_future()
        self._wait: asyncio.Future[None] | None = None

    async def answered(self) -> Handled:
        """Return the answer, or raise the error with which the call is refused."""
        try:
            ended = await self._ended
        except asyncio.CancelledError:  # the client has left
            if self._wait is not None:
                self._wait.cancel()
            raise
        return ended if isinstance(ended, tuple) else await self._handle(ended, memoryview(b""))

    def answer(self, answer: Answer, data: bytes = b"") -> None:
        """See `PromptCall`."""
        self._end((answer, data))

    def part(self, answer: Answer, data: bytes = b"") -> None:
        """See `PromptCall`."""
        raise AssertionError("an awaited call has one answer")

    def refuse(self, error: BaseException) -> None:
        """See `PromptCall`."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def hand_on(self, request: Request) -> None:
        """See `PromptCall`."""
        self._end(request)

    def _end(self, ended: Handled | Request) -> None:
        if not self._ended.done():
            self._ended.set_result(ended)

    def waits_for(self, future: asyncio.Future[None]) -> None:
        """See `PromptCall`."""
        self._wait = future

    def take_room(self, _bytes_max: int) -> bool:
        """See `PromptCall`."""
        return False

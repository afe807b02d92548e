"""A call whose reply a task awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...protocol.frames import Answer, Request
from ...rpc.plane.prompt import Handled


class AwaitedCall:
    """
    A `PromptCall` with a single reply, which a task awaits.

    Reading messages is left to `handle`, in the awaiting task, because only a task can wait for
    room.

    Args:
        handle: answers a request that must be answered in a task.
    """

    accepts_parts = False

    def __init__(self, handle: Callable[[Request, memoryview], Awaitable[Handled]]) -> None:
        self._handle = handle
        self._outcome: asyncio.Future[Handled | Request]
        self._outcome = asyncio.get_running_loop().create_future()
        self._cancel_on_disconnect: asyncio.Future[None] | None = None

    async def wait_answer(self) -> Handled:
        """Wait for the reply and return it, or raise the error with which the call was refused."""
        try:
            outcome = await self._outcome
        except asyncio.CancelledError:  # the client has disconnected
            if self._cancel_on_disconnect is not None:
                self._cancel_on_disconnect.cancel()
            raise
        if isinstance(outcome, tuple):
            return outcome
        return await self._handle(outcome, memoryview(b""))

    def answer(self, answer: Answer, data: bytes = b"") -> None:
        """See `PromptCall`."""
        self._end((answer, data))

    def send_part(self, answer: Answer, data: bytes = b"") -> None:
        """See `PromptCall`."""
        raise AssertionError("an awaited call has a single reply")

    def refuse(self, error: BaseException) -> None:
        """See `PromptCall`."""
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def hand_to_task(self, request: Request) -> None:
        """See `PromptCall`."""
        self._end(request)

    def _end(self, outcome: Handled | Request) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def cancel_on_disconnect(self, future: asyncio.Future[None]) -> None:
        """See `PromptCall`."""
        self._cancel_on_disconnect = future

    def reserve_bytes(self, _bytes_max: int) -> bool:
        """See `PromptCall`."""
        return False

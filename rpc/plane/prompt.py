"""The service that answers requests at a server of the data plane: in a task, or without one if a
request needs none.

begin(request, payload, call) ─▶ True: `call` is answered, at once or by a callback
                              └▶ False: nothing was done; `handle` answers it in a task
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ...protocol.frames import Answer, Request

Handled = tuple[Answer, bytes]


class PromptCall(Protocol):
    """A request that is answered once, by `answer`, `refuse` or `hand_on`, and before that by any
    number of `part`s.
    """

    def answer(self, answer: Answer, data: bytes = b"") -> None:
        """Answer the call."""
        ...

    def part(self, answer: Answer, data: bytes = b"") -> None:
        """Give one of several answers, after which others follow; the client must have asked for
        them.
        """
        ...

    @property
    def takes_parts(self) -> bool:
        """Return True while the client takes its answers as they arrive, and may have further ones
        without asking again.
        """
        ...

    def refuse(self, error: BaseException) -> None:
        """Answer with an error; an error that is not a KeylaneError is logged, and reported as an
        internal one.
        """
        ...

    def hand_on(self, request: Request) -> None:
        """Let `handle` answer `request` in its place, in a task."""
        ...

    def waits_for(self, future: asyncio.Future[None]) -> None:
        """Cancel `future` if the client leaves."""
        ...

    def take_room(self, bytes_max: int) -> bool:
        """Return True if an answer of up to `bytes_max` bytes may be made now; see
        `answer_room`.
        """
        ...


class DataService(Protocol):
    """Answers requests."""

    async def handle(self, request: Request, payload: memoryview) -> Handled:
        """Return the answer to a request, and its payload. Raises KeylaneError."""
        ...

    def begin(self, request: Request, payload: memoryview, call: PromptCall) -> bool:
        """
        Answer a request by `call`, at once or later; return False if nothing was done.

        Raises:
            KeylaneError: the request is refused; `call` was not used.
        """
        ...

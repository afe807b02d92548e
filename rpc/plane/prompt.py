"""The interface of the service that answers data-plane requests, without a task if possible.

begin(request, payload, call) ─▶ True: `call` is answered, at once or by a callback
                              └▶ False: nothing was done; `handle` answers it in a task
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ...protocol.frames import Answer, Request

Handled = tuple[Answer, bytes]


class PromptCall(Protocol):
    """A request that is answered without a task: by any number of calls of `send_part`, and then by
    exactly one call of `answer`, `refuse` or `hand_to_task`.
    """

    def answer(self, answer: Answer, data: bytes = b"") -> None:
        """Send the last or only answer."""
        ...

    def send_part(self, answer: Answer, data: bytes = b"") -> None:
        """Send an answer that is followed by others. The client must have asked for several
        answers.
        """
        ...

    @property
    def accepts_parts(self) -> bool:
        """True while the client keeps up with the answers that were sent, and may get more of them
        without another request.
        """
        ...

    def refuse(self, error: BaseException) -> None:
        """Answer with an error. An error that is not a KeylaneError is logged, and sent as
        InternalError.
        """
        ...

    def hand_to_task(self, request: Request) -> None:
        """Let `handle` answer `request` in a task instead."""
        ...

    def cancel_on_disconnect(self, future: asyncio.Future[None]) -> None:
        """Cancel `future` if the client disconnects before the call is answered."""
        ...

    def reserve_bytes(self, bytes_max: int) -> bool:
        """Reserve `bytes_max` bytes for the answer, or return False if they are not available now.
        See `answer_budget`.
        """
        ...


class DataService(Protocol):
    """Answers the requests of a data plane."""

    async def handle(self, request: Request, payload: memoryview) -> Handled:
        """Return the answer to a request, and the payload of the answer. Raises KeylaneError."""
        ...

    def begin(self, request: Request, payload: memoryview, call: PromptCall) -> bool:
        """
        Answer a request through `call`, now or later. Return False if nothing was done.

        Raises:
            KeylaneError: the request is refused, and `call` has not been used.
        """
        ...

"""The interface of the service that answers a data plane's requests: without a task if possible,
otherwise in one.

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
        """Send an answer that is followed by others; the client must have asked for several."""
        ...

    @property
    def accepts_parts(self) -> bool:
        """True while the client keeps up with the answers that were sent, and may have more of them
        without another request.
        """
        ...

    def refuse(self, error: BaseException) -> None:
        """Answer with an error; one that is not a KeylaneError is logged, and sent as
        InternalError.
        """
        ...

    def hand_to_task(self, request: Request) -> None:
        """Let `handle` answer `request` instead, in a task."""
        ...

    def cancel_on_disconnect(self, future: asyncio.Future[None]) -> None:
        """Cancel `future` if the client disconnects before the call is answered."""
        ...

    def reserve_bytes(self, bytes_max: int) -> bool:
        """Reserve `bytes_max` bytes for the answer; return False if they are not free now. See
        `answer_budget`.
        """
        ...


class DataService(Protocol):
    """Answers the requests of a data plane."""

    async def handle(self, request: Request, payload: memoryview) -> Handled:
        """Return the answer to a request, and its payload. Raises KeylaneError."""
        ...

    def begin(self, request: Request, payload: memoryview, call: PromptCall) -> bool:
        """
        Answer a request through `call`, now or later; return False if nothing was done.

        Raises:
            KeylaneError: the request is refused; `call` was not used.
        """
        ...

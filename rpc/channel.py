"""A data-plane channel over one WebSocket."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from ..protocol.errors import FrameError, NotSentError, OutcomeUnknownError
from ..protocol.frames import (
    Answer,
    Refused,
    Request,
    Throttled,
    decode_answer,
    frame_parts,
    refusal_error,
)
from .websocket.socket import DataSocket

WAIT_MS_MAX = 60_000
"""No broker makes a call wait for longer, whatever it says."""


class WebSocketChannel:
    """
    Pipelines calls by correlation id; see `network.Channel` for the contract.

    Args:
        on_throttled: called when the broker says that calls wait, because a limit is used up.
    """

    def __init__(
        self,
        socket: DataSocket,
        address: str,
        on_throttled: Callable[[Throttled], None] = lambda _told: None,
    ) -> None:
        self._socket = socket
        self._address = address
        self._waiting: dict[int, asyncio.Future[tuple[Answer, memoryview]]] = {}
        self._limits: dict[int, tuple[asyncio.Timeout, float]] = {}
        """The time that each call has, and how long that was at first."""
        self._on_throttled = on_throttled
        self._next_id = itertools.count(1).__next__
        self._broken: str | None = None
        self._reader = asyncio.create_task(self._read(), name=f"channel {address}")

    @property
    def closed(self) -> bool:
        """True once it cannot carry calls any more."""
        return self._broken is not None

    async def call(
        self, request: Request, payload: bytes = b"", *, timeout_ms: int
    ) -> tuple[Answer, memoryview]:
        """See `network.Channel.call`; a frame over the limit is a MessageTooLargeError."""
        if self._broken is not None:
            raise NotSentError(f"the connection to {self._address} is closed: {self._broken}")
        correlation_id = self._next_id()
        parts = frame_parts(correlation_id, request, payload)
        future = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = future
        try:
            async with asyncio.timeout(timeout_ms / 1000) as limit:
                self._limits[correlation_id] = limit, timeout_ms / 1000
                await self._socket.send(parts)
                answer, rest = await future
        except TimeoutError:
            raise OutcomeUnknownError(
                f"no answer from {self._address} to {type(request).__name__} within {timeout_ms} ms"
            ) from None
        except ConnectionError as error:
            raise OutcomeUnknownError(
                f"the connection to {self._address} broke: {str(error) or type(error).__name__}"
            ) from error
        finally:
            self._waiting.pop(correlation_id, None)
            self._limits.pop(correlation_id, None)
            if future.done() and not future.cancelled():
                future.exception()
        if isinstance(answer, Refused):
            raise refusal_error(answer)
        return answer, rest

    async def _read(self) -> None:
        reason = ""
        try:
            while (data := await self._socket.receive()) is not None:
                correlation_id, answer, payload = decode_answer(data)
                if isinstance(answer, Refused) and correlation_id == 0:
                    reason = answer.message
                elif isinstance(answer, Throttled):
                    self._give_time(answer)
                    continue
                future = self._waiting.get(correlation_id)
                if future is not None and not future.done():
                    future.set_result((answer, payload))
        except FrameError as error:
            reason = str(error)
        finally:
            code = self._socket.close_code
            reason = reason or self._socket.problem or f"closed by the other side, code {code}"
            reason = self._broken = self._broken or reason
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(
                        OutcomeUnknownError(f"the connection to {self._address} ended: {reason}")
                    )
            if not self._socket.closed:
                await self._socket.close()

    def _give_time(self, told: Throttled) -> None:
        """Calls under way may take so much longer."""
        now = asyncio.get_running_loop().time()
        for limit, seconds in self._limits.values():
            until = now + min(told.wait_ms, WAIT_MS_MAX) / 1000 + seconds
            if (limit.when() or until) < until:
                limit.reschedule(until)
        self._on_throttled(told)

    async def close(self) -> None:
        """Close the connection; calls under way fail with OutcomeUnknownError."""
        self._broken = self._broken or "closed on this side"
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        if not self._socket.closed:  # the reader was cancelled before its first step
            await self._socket.close()

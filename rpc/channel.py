"""A data-plane channel over one WebSocket."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import NamedTuple

from ..protocol.errors import FrameError, KeylaneError, NotSentError, OutcomeUnknownError
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
_NEVER = float("inf")


class _Call(NamedTuple):
    """A call under way."""

    future: asyncio.Future[tuple[Answer, memoryview]]
    kind: type[Request]
    timeout_ms: int


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
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, _Call] = {}
        self._ends: dict[int, float] = {}
        """When the time of each call is over."""
        self._next_end = _NEVER
        """When `_end_late` is called: at the earliest of these times, or before it."""
        self._timer: asyncio.TimerHandle | None = None
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
        return await self.begin(request, payload, timeout_ms=timeout_ms)

    def begin(
        self, request: Request, payload: bytes = b"", *, timeout_ms: int
    ) -> asyncio.Future[tuple[Answer, memoryview]]:
        """See `network.Channel.begin`."""
        future: asyncio.Future[tuple[Answer, memoryview]] = self._loop.create_future()
        if self._broken is not None:
            text = f"the connection to {self._address} is closed: {self._broken}"
            _fail(future, NotSentError(text))
            return future
        correlation_id = self._next_id()
        try:
            self._socket.write(frame_parts(correlation_id, request, payload))
        except KeylaneError as error:
            _fail(future, error)
        except ConnectionError as error:
            text = f"the connection to {self._address} broke: {str(error) or type(error).__name__}"
            _fail(future, OutcomeUnknownError(text))
        else:
            self._waiting[correlation_id] = _Call(future, type(request), timeout_ms)
            end = self._ends[correlation_id] = self._loop.time() + timeout_ms / 1000
            if end < self._next_end:
                self._end_late_at(end)
        return future

    def _end_late_at(self, end: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_end = end
        self._timer = self._loop.call_at(end, self._end_late)

    def _end_late(self) -> None:
        """Fail the calls whose time is over.  One timer serves all of them, because nearly every call ends before."""
        now = self._loop.time()
        self._timer, self._next_end = None, _NEVER
        late = [correlation_id for correlation_id, end in self._ends.items() if end <= now]
        for correlation_id in late:
            future, kind, timeout_ms = self._waiting.pop(correlation_id)
            del self._ends[correlation_id]
            if not future.done():
                text = f"no answer from {self._address} to {kind.__name__} within {timeout_ms} ms"
                _fail(future, OutcomeUnknownError(text))
        if self._ends:
            self._end_late_at(min(self._ends.values()))

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
                call = self._waiting.pop(correlation_id, None)
                if call is None:
                    continue
                del self._ends[correlation_id]
                if call.future.done():
                    continue
                if isinstance(answer, Refused):
                    _fail(call.future, refusal_error(answer))
                else:
                    call.future.set_result((answer, payload))
        except FrameError as error:
            reason = str(error)
        finally:
            code = self._socket.close_code
            reason = reason or self._socket.problem or f"closed by the other side, code {code}"
            reason = self._broken = self._broken or reason
            text = f"the connection to {self._address} ended: {reason}"
            for call in self._waiting.values():
                if not call.future.done():
                    _fail(call.future, OutcomeUnknownError(text))
            self._waiting.clear()
            self._ends.clear()
            if self._timer is not None:
                self._timer.cancel()
            if not self._socket.closed:
                await self._socket.close()

    def _give_time(self, told: Throttled) -> None:
        """Calls under way may take so much longer."""
        now = self._loop.time()
        for correlation_id, call in self._waiting.items():
            end = now + (min(told.wait_ms, WAIT_MS_MAX) + call.timeout_ms) / 1000
            self._ends[correlation_id] = max(end, self._ends[correlation_id])
        self._on_throttled(told)

    async def close(self) -> None:
        """Close the connection; calls under way fail with OutcomeUnknownError."""
        self._broken = self._broken or "closed on this side"
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        if not self._socket.closed:  # the reader was cancelled before its first step
            await self._socket.close()


def _fail(future: asyncio.Future[tuple[Answer, memoryview]], error: KeylaneError) -> None:
    future.set_exception(error)
    future.exception()  # marks it as retrieved: its caller may have been cancelled

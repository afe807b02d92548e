"""A client's end of a data-plane connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from ..protocol.errors import FrameError, KeylaneError, NotSentError
from ..protocol.frames import (
    Answer,
    Follow,
    Pull,
    PullShared,
    Read,
    Refused,
    Request,
    Throttled,
    decode_answer,
    frame_parts,
    is_long_poll,
    refusal_error,
)
from .frames.frame_socket import FrameSocket
from .liveness.silence import SilenceTimeouts, SilenceWatchdog
from .network import Call, Calling, OnAnswer, OnPart
from .race import start_task

WAIT_MS_MAX = 60_000
"""The maximum time in milliseconds by which the deadline of a throttled call is extended at
once.
"""
_NEVER = float("inf")

_FETCHES = frozenset({Pull, PullShared, Read, Follow})
"""Kinds of frames that may be long polls, for a cheap check before `is_long_poll`."""


class DataChannel:
    """
    A channel that pipelines calls by correlation id; see `network.Channel` for the contract.

    Args:
        on_throttled: called when the broker reports that calls are waiting because of a limit.
    """

    def __init__(
        self,
        socket: FrameSocket,
        address: str,
        on_throttled: Callable[[Throttled], None] = lambda _throttled: None,
    ) -> None:
        self._socket = socket
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, Call] = {}
        self._deadlines: dict[int, float] = {}
        """The deadline of each pending call, in the event loop's time."""
        self._next_expiry = _NEVER
        """When `_fail_overdue` is called next: at the earliest deadline, or before it."""
        self._timer: asyncio.TimerHandle | None = None
        self._on_throttled = on_throttled
        self._next_id = itertools.count(1).__next__
        self._close_reason: str | None = None
        self.closed = False
        """True once the channel can carry no more calls."""
        self.gather = socket.gather
        self.flush = socket.flush
        """See `network.Gathering`."""
        self._watchdog: SilenceWatchdog | None = None
        self._has_received = False
        self._broker_reason = ""
        """Why the broker is closing the connection, if it has said so."""
        socket.on_frame = self._on_frame
        self._reader = start_task(self._read(), name=f"channel {address}")

    def watch_silence(
        self, is_answering: Callable[[], Awaitable[bool]], silence_timeouts: SilenceTimeouts
    ) -> None:
        """
        Start to watch for silence, and close the channel if the connection is lost; see
        `liveness.silence`.

        Args:
            is_answering: returns True if the broker answers on a new connection.
            silence_timeouts: shared by all connections of the client.
        """
        self._has_received = False
        self._watchdog = SilenceWatchdog(
            self._socket,
            self._address,
            is_answering,
            silence_timeouts,
            has_received=lambda: self._has_received,
            is_reply_outstanding=lambda: (
                not all(call.is_long_poll for call in self._pending.values())
            ),
        )

    async def call(
        self, request: Request, payload: bytes = b"", *, timeout_ms: int
    ) -> tuple[Answer, memoryview]:
        """See `network.Channel.call`. Raises MessageTooLargeError for a frame over the limit."""
        return await self.begin(request, payload, timeout_ms=timeout_ms)

    def begin(
        self,
        request: Request,
        payload: bytes | bytearray = b"",
        *,
        timeout_ms: int,
        on_answer: OnAnswer | None = None,
        on_part: OnPart | None = None,
    ) -> Calling:
        """See `network.Channel.begin`."""
        loop = self._loop
        kind = type(request)
        call = Call(asyncio.Future(loop=loop), on_answer, kind, timeout_ms, on_part)
        if kind in _FETCHES:
            call.is_long_poll = is_long_poll(request)
        if self.closed:
            text = f"the connection to {self._address} is closed: {self._close_reason}"
            call.fail(NotSentError(text))
            return call.future
        correlation_id = self._next_id()
        try:
            self._socket.write(frame_parts(correlation_id, request, payload))
        except KeylaneError as error:
            call.fail(error)
        except ConnectionError as error:
            text = f"the connection to {self._address} broke: {str(error) or type(error).__name__}"
            call.fail_unanswered(text)
        else:
            self._pending[correlation_id] = call
            deadline = self._deadlines[correlation_id] = loop.time() + timeout_ms / 1000
            if deadline < self._next_expiry:
                self._schedule_expiry(deadline)
        return call.future

    def _schedule_expiry(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_expiry = at_s
        self._timer = self._loop.call_at(at_s, self._fail_overdue)

    def _fail_overdue(self) -> None:
        """Fail the calls whose deadline has passed. One timer serves all calls, because almost
        every call is answered earlier.
        """
        now_s = self._loop.time()
        self._timer = None
        self._next_expiry = _NEVER
        overdue = [id_ for id_, deadline in self._deadlines.items() if deadline <= now_s]
        for correlation_id in overdue:
            call = self._pending.pop(correlation_id)
            del self._deadlines[correlation_id]
            text = (
                f"no answer from {self._address} to {call.kind.__name__} within "
                f"{call.timeout_ms} ms"
            )
            call.fail_unanswered(text)
        if self._deadlines:
            self._schedule_expiry(min(self._deadlines.values()))

    def _on_frame(self, data: bytearray) -> bool:
        """Handle an incoming frame from the broker. Return False if it cannot be decoded, so that
        `_read` closes the channel.
        """
        try:
            correlation_id, answer, payload = decode_answer(data)
        except FrameError:
            return False
        if type(answer) is Refused and correlation_id == 0:
            self._broker_reason = answer.message
            self._socket.end()
            return True
        if type(answer) is Throttled:
            self._extend_deadlines(answer)
            return True
        self._has_received = True
        call = self._pending.get(correlation_id)
        if call is None or (call.on_part is not None and call.deliver_part(answer, payload)):
            return True
        del self._pending[correlation_id], self._deadlines[correlation_id]
        if type(answer) is Refused:
            call.fail(refusal_error(answer))
        else:
            call.complete((answer, payload))
        return True

    async def _read(self) -> None:
        """Read until the connection ends, and then fail all pending calls. This also handles frames
        that arrived before `on_frame` was set, and frames that cannot be decoded.
        """
        reason = ""
        try:
            while (data := await self._socket.receive()) is not None:
                if not self._on_frame(data):
                    decode_answer(data)  # raises
        except FrameError as error:
            reason = str(error)
        except GeneratorExit:  # the event loop has ended: nobody waits for a call
            self.closed = True
            raise
        except BaseException:
            await self._end("")
            raise
        await self._end(reason)

    async def _end(self, reason: str) -> None:
        """Fail all pending calls, because the connection ended."""
        reason = (
            self._broker_reason or self._socket.close_reason or reason or "closed by the other side"
        )
        reason = self._close_reason = self._close_reason or reason
        self.closed = True
        if self._watchdog is not None:
            self._watchdog.end()
        text = f"the connection to {self._address} ended: {reason}"
        pending, self._pending = self._pending, {}
        self._deadlines.clear()
        for call in pending.values():
            call.fail_unanswered(text)
        if self._timer is not None:
            self._timer.cancel()
        if not self._socket.closing:
            await self._socket.close()

    def _extend_deadlines(self, throttled: Throttled) -> None:
        """Extend the deadlines of all pending calls by the wait that the broker has announced."""
        now_s = self._loop.time()
        if self._watchdog is not None:
            self._watchdog.excuse(min(throttled.wait_ms, WAIT_MS_MAX) / 1000)
        for correlation_id, call in self._pending.items():
            deadline = now_s + (min(throttled.wait_ms, WAIT_MS_MAX) + call.timeout_ms) / 1000
            self._deadlines[correlation_id] = max(deadline, self._deadlines[correlation_id])
        self._on_throttled(throttled)

    async def close(self) -> None:
        """Close the connection. Pending calls fail with OutcomeUnknownError."""
        self._close_reason = self._close_reason or "closed on this side"
        self.closed = True
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        if not self._socket.closing:  # the reader task was cancelled before its first step
            await self._socket.close()

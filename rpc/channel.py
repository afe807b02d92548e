"""A client's end of a connection of the data plane."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from ..protocol.errors import FrameError, KeylaneError, NotSentError
from ..protocol.frames import (
    Answer,
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
from .liveness.silence import Silence, SilencePatience
from .network import Call, Calling, OnAnswer, OnPart
from .race import start_task

WAIT_MS_MAX = 60_000
"""Longest wait in milliseconds that a broker may impose on a call, whatever it reports."""
_NEVER = float("inf")

_FETCHES = frozenset({Pull, PullShared, Read})
"""Kinds of frames of which some wait at the broker for messages; for other calls this look-up is
cheaper than `is_long_poll`.
"""


class DataChannel:
    """
    Pipelines calls by correlation id; see `network.Channel` for the contract.

    Args:
        on_throttled: called when the broker says that calls wait, because a limit is used up.
    """

    def __init__(
        self,
        socket: FrameSocket,
        address: str,
        on_throttled: Callable[[Throttled], None] = lambda _told: None,
    ) -> None:
        self._socket = socket
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Call] = {}
        self._ends: dict[int, float] = {}
        """When the time of each call is over."""
        self._next_end = _NEVER
        """When `_end_late` is called: at the earliest of these times, or before it."""
        self._timer: asyncio.TimerHandle | None = None
        self._on_throttled = on_throttled
        self._next_id = itertools.count(1).__next__
        self._broken: str | None = None
        self.closed = False
        """True once it cannot carry calls any more."""
        self.gather = socket.gather
        self.flush = socket.flush
        """See `network.Gathering`."""
        self._silence: Silence | None = None
        self._had_answers = False
        self._told = ""
        """Why the broker ends the connection."""
        socket.on_frame = self._take
        self._reader = start_task(self._read(), name=f"channel {address}")

    def judge_silence(
        self, answers: Callable[[], Awaitable[bool]], patience: SilencePatience
    ) -> None:
        """
        Have a new connection decide what a silence means, from here on; see `liveness.silence`.

        Args:
            answers: whether the broker answers on a new connection.
            patience: of all connections of the client.
        """
        self._had_answers = False
        self._silence = Silence(
            self._socket,
            self._address,
            answers,
            patience,
            had_answers=lambda: self._had_answers,
            owed=lambda: not all(call.waits for call in self._waiting.values()),
        )

    async def call(
        self, request: Request, payload: bytes = b"", *, timeout_ms: int
    ) -> tuple[Answer, memoryview]:
        """See `network.Channel.call`; a frame over the limit is a MessageTooLargeError."""
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
            call.waits = is_long_poll(request)
        if self.closed:
            text = f"the connection to {self._address} is closed: {self._broken}"
            call.failed(NotSentError(text))
            return call.future
        correlation_id = self._next_id()
        try:
            self._socket.write(frame_parts(correlation_id, request, payload))
        except KeylaneError as error:
            call.failed(error)
        except ConnectionError as error:
            text = f"the connection to {self._address} broke: {str(error) or type(error).__name__}"
            call.unanswered(text)
        else:
            self._waiting[correlation_id] = call
            end = self._ends[correlation_id] = loop.time() + timeout_ms / 1000
            if end < self._next_end:
                self._end_late_at(end)
        return call.future

    def _end_late_at(self, end: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_end = end
        self._timer = self._loop.call_at(end, self._end_late)

    def _end_late(self) -> None:
        """Fail the calls whose time is over. One timer serves all of them, because nearly every
        call ends before.
        """
        now = self._loop.time()
        self._timer = None
        self._next_end = _NEVER
        late = [correlation_id for correlation_id, end in self._ends.items() if end <= now]
        for correlation_id in late:
            call = self._waiting.pop(correlation_id)
            del self._ends[correlation_id]
            text = (
                f"no answer from {self._address} to {call.kind.__name__} within "
                f"{call.timeout_ms} ms"
            )
            call.unanswered(text)
        if self._ends:
            self._end_late_at(min(self._ends.values()))

    def _take(self, data: bytearray) -> bool:
        """Take a frame of the broker where it arrives; False: it cannot be read, and ends the
        channel.
        """
        try:
            correlation_id, answer, payload = decode_answer(data)
        except FrameError:
            return False
        if type(answer) is Refused and correlation_id == 0:
            self._told = answer.message
            self._socket.end()
            return True
        if type(answer) is Throttled:
            self._give_time(answer)
            return True
        self._had_answers = True
        call = self._waiting.get(correlation_id)
        if call is None or (call.on_part is not None and call.takes_part(answer, payload)):
            return True
        del self._waiting[correlation_id], self._ends[correlation_id]
        if type(answer) is Refused:
            call.failed(refusal_error(answer))
        else:
            call.answered((answer, payload))
        return True

    async def _read(self) -> None:
        """Read what came before `_take` was known, or cannot be read, until the connection ends."""
        reason = ""
        try:
            while (data := await self._socket.receive()) is not None:
                if not self._take(data):
                    decode_answer(data)  # raises
        except FrameError as error:
            reason = str(error)
        finally:
            reason = self._told or self._socket.problem or reason or "closed by the other side"
            reason = self._broken = self._broken or reason
            self.closed = True
            if self._silence is not None:
                self._silence.end()
            text = f"the connection to {self._address} ended: {reason}"
            waiting, self._waiting = self._waiting, {}
            self._ends.clear()
            for call in waiting.values():
                call.unanswered(text)
            if self._timer is not None:
                self._timer.cancel()
            if not self._socket.closed:
                await self._socket.close()

    def _give_time(self, told: Throttled) -> None:
        """Calls under way may take so much longer."""
        now = self._loop.time()
        if self._silence is not None:
            self._silence.excuse(min(told.wait_ms, WAIT_MS_MAX) / 1000)
        for correlation_id, call in self._waiting.items():
            end = now + (min(told.wait_ms, WAIT_MS_MAX) + call.timeout_ms) / 1000
            self._ends[correlation_id] = max(end, self._ends[correlation_id])
        self._on_throttled(told)

    async def close(self) -> None:
        """Close the connection; calls under way fail with OutcomeUnknownError."""
        self._broken = self._broken or "closed on this side"
        self.closed = True
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        if not self._socket.closed:  # the reader was cancelled before its first step
            await self._socket.close()

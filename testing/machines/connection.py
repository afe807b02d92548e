"""A simulated data-plane connection: two ordered queues of frames, until it breaks."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ...protocol.errors import InternalError, KeylaneError, NotSentError
from ...protocol.frames import (
    Answer,
    Refused,
    Request,
    decode_answer,
    decode_request,
    encode_frame,
    refusal,
    refusal_error,
)
from ...rpc.network import Call, Calling, OnAnswer, OnPart
from ...rpc.plane.prompt import DataService
from .loop import Process, SimLoop
from .machine import Machine


class ServerEnd(Protocol):
    """The server's end of a connection: a process that serves requests on a machine."""

    process: Process
    machine: Machine
    data_service: DataService | None


class Carrier(Protocol):
    """The parts of the network that a connection uses."""

    loop: SimLoop
    messages: int
    on_frame: Callable[[Process, Request, bool], None]

    def draw_delay_s(self) -> float:
        """Return the latency of a message in seconds."""
        ...

    def draw_duplicate_delay_s(self) -> float:
        """Return the latency, in seconds, of calls that arrive after their connection has ended."""
        ...

    def loses_message(self) -> bool:
        """Return True if the next message should be lost."""
        ...

    def serves_lost_calls(self) -> bool:
        """Return True if a server still reads the calls that were in flight when their connection
        ended.
        """
        ...

    def is_cut(self, source: str, target: str) -> bool:
        """Return True if the link from `source` to `target` is cut."""
        ...


class _Pipe:
    """One direction of a connection. `held_count` frames are held until a cut is healed."""

    def __init__(self, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self.frames: deque[bytes] = deque()
        self.last_arrival_s = 0.0
        self.held_count = 0


class Connection:
    """A connection between a client's channel and a listener. Either end may be dead or paused."""

    def __init__(self, internet: Carrier, client: Process, server: ServerEnd) -> None:
        self.client = client
        self.server = server
        self.channel: SimChannel | None = None
        self.broken = False
        self._internet = internet
        self._to_server = _Pipe(client.name, server.process.name)
        self._to_client = _Pipe(server.process.name, client.name)
        self.cancellable_futures: dict[asyncio.Future[None], None] = {}
        """The futures that pending replies are waiting for."""

    def report_request(self, request: Request, *, is_open: bool) -> None:
        """Report a request from the client. `is_open` tells whether the channel is open."""
        self._internet.on_frame(self.client, request, is_open)

    def send_to_server(self, frame: bytes) -> None:
        """Send a frame to the server."""
        self._send(self._to_server, frame)

    def _send(self, pipe: _Pipe, frame: bytes) -> None:
        internet = self._internet
        internet.messages += 1
        if self.broken:
            return
        if internet.loses_message():
            self.reset()
            return
        loop = internet.loop
        pipe.last_arrival_s = max(pipe.last_arrival_s + 1e-6, loop.now + internet.draw_delay_s())
        pipe.frames.append(frame)
        loop.after(pipe.last_arrival_s - loop.now, self._on_arrival, pipe)

    def _on_arrival(self, pipe: _Pipe) -> None:
        """Deliver the next frame of a pipe, or hold it if the link is cut."""
        if self.broken:
            return
        if self._internet.is_cut(pipe.source, pipe.target):
            pipe.held_count += 1
            return
        self._deliver(pipe)

    def _deliver(self, pipe: _Pipe) -> None:
        """Hand the oldest frame of a pipe to its receiver."""
        frame = pipe.frames.popleft()
        post = self._internet.loop.post
        if pipe is self._to_server:
            if self.server.process.alive:
                post(self.server.process, self._serve, frame)
            elif self.server.machine.up:
                self.reset()
        elif self.channel is not None:
            post(self.client, self.channel.receive, frame)

    def flush(self) -> None:
        """Deliver the held frames after a cut has been healed."""
        for pipe in (self._to_server, self._to_client):
            while pipe.held_count and not self._internet.is_cut(pipe.source, pipe.target):
                pipe.held_count -= 1
                self._deliver(pipe)

    def reset(self) -> None:
        """Reset the connection. Frames in flight are lost, and both ends are notified."""
        if self.broken:
            return
        self.broken = True
        internet = self._internet
        if self._to_server.frames and internet.serves_lost_calls():
            later_s = internet.draw_duplicate_delay_s()
            for frame in self._to_server.frames:
                # The server reads a call that was sent before the connection ended; the reply is
                # lost.
                internet.loop.after(
                    later_s, internet.loop.post, self.server.process, self._serve, frame
                )
        if self.channel is not None:
            internet.loop.after(
                internet.draw_delay_s(),
                internet.loop.post,
                self.client,
                self.channel.fail_pending,
                "reset",
            )
        internet.loop.after(
            internet.draw_delay_s(), internet.loop.post, self.server.process, self._cancel_waiting
        )

    # ── in the server's process ───────────────────────────────────────────────────────────────────
    def _serve(self, frame: bytes) -> None:
        """Handle a frame in the server's process."""
        assert self.server.data_service is not None
        correlation_id, request, payload = decode_request(frame)
        call = _ServedCall(self, correlation_id)
        try:
            if not self.server.data_service.begin(request, payload, call):
                self.serve_in_task(correlation_id, request, payload)
        except Exception as error:  # noqa: BLE001 - the real server refuses it in the same way
            call.refuse(error)

    def serve_in_task(self, correlation_id: int, request: Request, payload: memoryview) -> None:
        """Handle a request in a task."""
        task = asyncio.ensure_future(self._answer(correlation_id, request, payload))
        self.cancellable_futures[task] = None
        task.add_done_callback(lambda done: self.cancellable_futures.pop(done, None))

    async def _answer(self, correlation_id: int, request: Request, payload: memoryview) -> None:
        assert self.server.data_service is not None
        try:
            answer, data = await self.server.data_service.handle(request, payload)
            frame = encode_frame(correlation_id, answer, data)
        except Exception as error:  # noqa: BLE001 - the real server refuses it in the same way
            self.send_refusal(correlation_id, error)
        else:
            self.send_to_client(frame)

    def send_to_client(self, frame: bytes) -> None:
        """Send a frame to the client."""
        self._send(self._to_client, frame)

    def send_refusal(self, correlation_id: int, error: BaseException) -> None:
        """Reply with an error. An error that the real server would log is recorded as a fault."""
        if not isinstance(error, KeylaneError):
            self._internet.loop.faults.append(error)
            error = InternalError()
        self.send_to_client(encode_frame(correlation_id, refusal(error)))

    def _cancel_waiting(self) -> None:
        for future in list(self.cancellable_futures):
            future.cancel()


class _ServedCall:
    """A call that is handled without a task; see `keylane.rpc.plane.prompt.PromptCall`."""

    def __init__(self, connection: Connection, correlation_id: int) -> None:
        self._connection = connection
        self._id = correlation_id

    def answer(self, answer: Answer, data: bytes = b"") -> None:
        """See `PromptCall`."""
        try:
            frame = encode_frame(self._id, answer, data)
        except KeylaneError as error:
            self.refuse(error)
        else:
            self._connection.send_to_client(frame)

    def send_part(self, answer: Answer, data: bytes = b"") -> None:
        """See `PromptCall`."""
        self._connection.send_to_client(encode_frame(self._id, answer, data))

    @property
    def accepts_parts(self) -> bool:
        """See `PromptCall`."""
        return not self._connection.broken

    def refuse(self, error: BaseException) -> None:
        """See `PromptCall`."""
        self._connection.send_refusal(self._id, error)

    def hand_to_task(self, request: Request) -> None:
        """See `PromptCall`."""
        self._connection.serve_in_task(self._id, request, memoryview(b""))

    def cancel_on_disconnect(self, future: asyncio.Future[None]) -> None:
        """See `PromptCall`."""
        futures = self._connection.cancellable_futures
        futures[future] = None
        future.add_done_callback(lambda done: futures.pop(done, None))

    def reserve_bytes(self, _bytes_max: int) -> bool:
        """See `PromptCall`."""
        return True


class SimChannel:
    """The client's end of a connection; see `keylane.rpc.network.Channel`."""

    def __init__(self, connection: Connection, address: str) -> None:
        self.connection = connection
        connection.channel = self
        self._address = address
        self._pending: dict[int, Call] = {}
        self._next_id = itertools.count(1).__next__
        self._close_reason: str | None = None

    @property
    def closed(self) -> bool:
        """See `Channel.closed`."""
        return self._close_reason is not None

    async def call(
        self, request: Request, payload: bytes = b"", *, timeout_ms: int
    ) -> tuple[Answer, memoryview]:
        """See `Channel.call`."""
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
        """See `Channel.begin`."""
        loop = asyncio.get_running_loop()
        call = Call(loop.create_future(), on_answer, type(request), timeout_ms, on_part)
        future = call.future
        self.connection.report_request(request, is_open=self._close_reason is None)
        if self._close_reason is not None:
            text = f"the connection to {self._address} is closed: {self._close_reason}"
            call.fail(NotSentError(text))
            return future
        correlation_id = self._next_id()
        try:
            frame = encode_frame(correlation_id, request, payload)
        except KeylaneError as error:
            call.fail(error)
            return future
        self._pending[correlation_id] = call
        timeout = loop.call_later(timeout_ms / 1000, self._fail_overdue, correlation_id)
        future.add_done_callback(lambda _done: timeout.cancel())
        self.connection.send_to_server(frame)
        return future

    def _fail_overdue(self, correlation_id: int) -> None:
        call = self._pending.pop(correlation_id, None)
        if call is not None:
            call.fail_unanswered(f"no answer from {self._address} in time")

    def receive(self, frame: bytes) -> None:
        """Handle a frame from the server."""
        if self._close_reason is not None:
            return
        correlation_id, answer, payload = decode_answer(frame)
        call = self._pending.get(correlation_id)
        if call is None or call.deliver_part(answer, payload):
            return
        del self._pending[correlation_id]
        if isinstance(answer, Refused):
            call.fail(refusal_error(answer))
        else:
            call.complete((answer, payload))

    def fail_pending(self, reason: str) -> None:
        """Fail all pending calls, because the connection has ended."""
        if self._close_reason is None:
            self._close_reason = reason
            pending, self._pending = self._pending, {}
            for call in pending.values():
                call.fail_unanswered(f"the connection ended: {reason}")

    async def close(self) -> None:
        """See `Channel.close`."""
        self.fail_pending("closed on this side")
        self.connection.reset()

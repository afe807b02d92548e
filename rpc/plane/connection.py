"""The server's end of a data-plane connection, and its calls that are answered without a task.
Performs socket I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from ...protocol.errors import FrameError, KeylaneError
from ...protocol.frames import Answer, Request, Throttled, frame_parts, refusal
from ...protocol.limits import IN_FLIGHT_PER_CONNECTION_MAX
from ..access.guard import ConnectionAccess
from ..access.pacing import Delay
from ..answer_budget import AnswerBudget
from ..frames.frame_socket import Buffer, FrameSocket
from ..race import start_task
from ..request_ids import log_fault

log = logging.getLogger("keylane.rpc")

GOODBYE_S = 2.0
"""The time in seconds that a closed connection has to send buffered data."""
Parts = tuple[bytes, Buffer]
"""The header and the payload of an encoded frame."""


class PlaneConnection:
    """A connection to one client: its calls in progress, its memory budget, and how fast the client
    reads its answers.
    """

    def __init__(
        self,
        socket: FrameSocket,
        answer_budget: AnswerBudget,
        access: ConnectionAccess | None,
    ) -> None:
        self.socket = socket
        self.access = access
        """The caller's access; None if this server does not authenticate callers."""
        self.transport = socket.transport
        self.budget = answer_budget.for_connection()
        self.pull_count = 0
        """The number of pulls in progress."""
        self.unstarted_tasks = 0
        """The number of answering tasks that have not taken their first step. Until they have,
        later frames are not answered without a task.
        """
        self.other_count = 0
        """The number of calls in progress that are not pulls."""
        self.slot_freed: asyncio.Future[None] | None = None
        """Done when a call other than a pull ends; set while `wait_for_slot` is waiting."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.cancellable_futures: set[asyncio.Future[None]] = set()
        """Futures that calls without a task are waiting for. They are cancelled with the
        connection.
        """
        self._send_lock = asyncio.Lock()
        self._waiting_sends = 0
        """The number of answers that are waiting for the lock or the socket; later answers must
        wait too.
        """
        self._accepted_bytes: int | None = None
        """The number of bytes that the kernel had accepted when `stuck_s` last saw progress."""
        self._progress_at_s = 0.0
        self._silent_s = 0.0
        self._accepted_bytes_at_check = 0
        """The number of bytes that the kernel had accepted at the last call of `silent_s`."""
        self._is_refused = self.has_ended = False
        self.has_said_hello = False
        """True once the client has sent a supported version."""
        self.opened_s = asyncio.get_running_loop().time()
        self._auth_frames = 0
        self._auth_window_s = self.opened_s

    def count_auth_frame(self, limit: int, within_s: float) -> None:
        """Count a Hello, Challenge or Authenticate frame. Raises FrameError if there were more than
        `limit` within `within_s` seconds.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s - self._auth_window_s > within_s:
            self._auth_window_s = now_s
            self._auth_frames = 0
        self._auth_frames += 1
        if self._auth_frames > limit:
            raise FrameError(f"over {limit} Hello or authentication frames within {within_s:g} s")

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────
    def start(
        self, body: Coroutine[Any, Any, None], on_done: Callable[[], object] | None = None
    ) -> None:
        """Run `body` in a task that is cancelled with the connection. `on_done` is called when the
        task is done, even if it never took its first step.
        """
        task = start_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if on_done is not None:
            task.add_done_callback(lambda _task: on_done())

    def start_answer(self, body: Coroutine[Any, Any, None]) -> None:
        """Run `body`, which answers a frame, in a task; see `unstarted_tasks`."""
        self.unstarted_tasks += 1
        self.start(self._begin(body))

    async def _begin(self, body: Coroutine[Any, Any, None]) -> None:
        """Run `body` as a started task; see `unstarted_tasks`."""
        self.unstarted_tasks -= 1
        await body

    @property
    def is_writable(self) -> bool:
        """True if the client keeps up, so that an answer would be sent immediately."""
        socket = self.socket
        return socket.writable and not (
            self._waiting_sends or socket.closing or self.has_ended or self._is_refused
        )

    async def wait_for_slot(self) -> None:
        """Wait until fewer than IN_FLIGHT_PER_CONNECTION_MAX calls other than pulls are in
        progress.
        """
        while self.other_count >= IN_FLIGHT_PER_CONNECTION_MAX:
            self.slot_freed = asyncio.get_running_loop().create_future()
            try:
                await self.slot_freed
            finally:
                self.slot_freed = None

    def free_slot(self) -> None:
        """Record that a call other than a pull has ended."""
        self.other_count -= 1
        if self.slot_freed is not None and not self.slot_freed.done():
            self.slot_freed.set_result(None)

    # ── answers ───────────────────────────────────────────────────────────────────────────────────
    async def send(self, parts: Parts) -> None:
        """Send a frame, and wait until the socket's buffer is nearly empty again."""
        self._waiting_sends += 1
        try:
            async with self._send_lock:
                if not self.socket.closing and not self._is_refused:
                    await self.socket.send(parts)
        finally:
            self._waiting_sends -= 1

    def post(self, parts: Parts, on_sent: Callable[[], object]) -> bool:
        """
        Send a frame like `send`, but without waiting.

        Returns:
            True if the frame was sent or the connection is closed; False if `on_sent` will be
            called once the frame has been sent.
        """
        socket = self.socket
        if self._waiting_sends or not socket.writable:
            self.start(self._send_later(parts), on_sent)
            return False
        if not (socket.closing or self._is_refused):
            socket.write(parts)
            if not self.socket.writable:  # the write may have changed this
                self.start(self._send_later(None), on_sent)
                return False
        return True

    async def _send_later(self, parts: Parts | None) -> None:
        """Send a frame, or wait until the socket can take more if the frame was already written."""
        try:
            if parts is None:
                await self.socket.wait_writable()
            else:
                await self.send(parts)
        except (ConnectionError, RuntimeError):
            log.debug("the client left before its answer")

    def stuck_s(self, now_s: float) -> float:
        """Return how many seconds the client has left data unread, or 0 if there is none. The
        precision is the interval between calls.
        """
        buffered_bytes = self.transport.get_write_buffer_size()
        accepted_bytes = self.socket.written_bytes - buffered_bytes
        if (
            not buffered_bytes
            or self._accepted_bytes is None
            or accepted_bytes > self._accepted_bytes
        ):
            self._accepted_bytes = accepted_bytes
            self._progress_at_s = now_s
        return now_s - self._progress_at_s

    def silent_s(self, elapsed_s: float) -> float:
        """
        Return how many seconds nothing has been received, and the kernel has accepted no data to
        send.

        The value grows by `elapsed_s` with each call, so a time for which this process was stopped
        counts as one interval.
        """
        socket = self.socket
        socket.pings = 0
        accepted_bytes = socket.written_bytes - self.transport.get_write_buffer_size()
        if (
            socket.has_received
            or not socket.reading
            or accepted_bytes != self._accepted_bytes_at_check
        ):
            socket.has_received = False
            self._accepted_bytes_at_check = accepted_bytes
            self._silent_s = 0.0
        else:
            self._silent_s += elapsed_s
        return self._silent_s

    async def refuse(self, error: KeylaneError) -> None:
        """Send the error and close the connection. No other answer is sent."""
        self._is_refused = True
        try:
            await self.socket.send(frame_parts(0, refusal(error)))
            await self.socket.close()
        except (ConnectionError, RuntimeError):
            log.debug("the client left before it was refused")

    async def notify_throttled(self, delay: Delay) -> None:
        """Tell the client that its calls are waiting because of a limit."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            await self.send(frame_parts(0, Throttled(round(delay.ms), delay.limit)))

    def end(self) -> None:
        """Cancel the calls in progress. Data that the client does not read within `GOODBYE_S` is
        discarded.
        """
        self.has_ended = True
        if self.access is not None:
            self.access.release_connection()
        for task in self._tasks:
            task.cancel()
        for future in list(self.cancellable_futures):
            future.cancel()
        asyncio.get_running_loop().call_later(GOODBYE_S, self.transport.abort)


class PlaneCall:
    """
    A call that is answered without a task; see `PromptCall`.

    Args:
        number: the call's correlation id.
        hand_to_task: answers a request with this correlation id in a task.
        on_refusal: called with each error that is sent.
    """

    __slots__ = (
        "_request",
        "_connection",
        "_answer_in_task",
        "_unsent_bytes",
        "_number",
        "_on_refusal",
        "_is_pull",
        "_reserved_bytes",
        "_cancellable_future",
    )

    def __init__(
        self,
        connection: PlaneConnection,
        number: int,
        request: Request,
        hand_to_task: Callable[[PlaneConnection, int, Request], None],
        on_refusal: Callable[[KeylaneError], None],
        *,
        pull: bool,
    ) -> None:
        self._connection = connection
        self._number = number
        self._request = request
        self._answer_in_task = hand_to_task
        self._on_refusal = on_refusal
        self._is_pull = pull
        self._reserved_bytes = 0
        self._unsent_bytes = 0
        """The size of the answer, which counts against the connection's budget until the answer is
        sent.
        """
        self._cancellable_future: asyncio.Future[None] | None = None
        if pull:
            connection.pull_count += 1
        else:
            connection.other_count += 1

    def reserve_bytes(self, bytes_max: int) -> bool:
        """Reserve bytes for the answer, or return False; see `PromptCall`."""
        if not self._connection.budget.try_reserve(bytes_max):
            return False
        self._reserved_bytes = bytes_max
        return True

    def cancel_on_disconnect(self, future: asyncio.Future[None]) -> None:
        """Cancel `future` if the client disconnects; see `PromptCall`."""
        if self._cancellable_future is not None:
            self._connection.cancellable_futures.discard(self._cancellable_future)
        self._cancellable_future = future
        self._connection.cancellable_futures.add(future)

    def answer(self, answer: Answer, data: bytes = b"") -> None:
        """Send the last or only answer; see `PromptCall`."""
        try:
            parts = frame_parts(self._number, answer, data)
        except KeylaneError as error:
            self.refuse(error)
            return
        self._post(parts, data)

    def send_part(self, answer: Answer, data: bytes = b"") -> None:
        """Send an answer that is followed by others; see `PromptCall`."""
        parts = frame_parts(self._number, answer, data)
        size = len(data) if self._reserved_bytes else 0
        budget = self._connection.budget
        is_sent = self._connection.post(parts, partial(budget.release, size))
        if self._reserved_bytes:
            budget.settle(self._reserved_bytes, 0 if is_sent else size)
            self._reserved_bytes = 0

    @property
    def accepts_parts(self) -> bool:
        """True while further answers may be sent; see `PromptCall`."""
        connection = self._connection
        access = connection.access
        # Changes in the caller's rights or quotas take effect at its next pull.
        return connection.is_writable and (
            access is None or access.is_allowed_at_once(self._request)
        )

    def refuse(self, error: BaseException) -> None:
        """Answer with an error; see `PromptCall`."""
        sent_error = error
        if not isinstance(sent_error, KeylaneError):
            sent_error = log_fault(log, type(self._request).__name__, error)
        self._on_refusal(sent_error)
        self._post(frame_parts(self._number, refusal(sent_error)))

    def _post(self, parts: Parts, data: bytes = b"") -> None:
        """Send the last answer, and settle the reservation for its `data` if there is one."""
        connection = self._connection
        is_sent = connection.has_ended or connection.post(parts, self._on_sent)
        if self._reserved_bytes:
            self._unsent_bytes = 0 if is_sent else len(data)
            connection.budget.settle(self._reserved_bytes, self._unsent_bytes)
            self._reserved_bytes = 0
        if is_sent:
            self.mark_done()

    def _on_sent(self) -> None:
        """End the call, because its answer was sent or the client has disconnected."""
        self.mark_done()
        if self._unsent_bytes:
            self._connection.budget.release(self._unsent_bytes)
            self._unsent_bytes = 0

    def hand_to_task(self, request: Request) -> None:
        """Answer `request` in a task instead; see `PromptCall`."""
        self.mark_done()
        if self._reserved_bytes:
            self._connection.budget.settle(self._reserved_bytes, 0)
            self._reserved_bytes = 0
        if not self._connection.has_ended:
            self._answer_in_task(self._connection, self._number, request)

    def mark_done(self) -> None:
        """Stop counting the call as in progress."""
        connection = self._connection
        if self._cancellable_future is not None:
            connection.cancellable_futures.discard(self._cancellable_future)
        if self._is_pull:
            connection.pull_count -= 1
        elif connection.slot_freed is None:
            connection.other_count -= 1
        else:
            connection.free_slot()

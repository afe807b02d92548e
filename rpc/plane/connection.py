"""A connection of the data plane at the server, and its calls that are answered without a task.
I/O: sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from ...protocol.errors import FrameError, InternalError, KeylaneError
from ...protocol.frames import Answer, Request, Throttled, frame_parts, refusal
from ...protocol.limits import IN_FLIGHT_PER_CONNECTION_MAX
from ..access.guard import ConnectionAccess
from ..access.pacing import Delay
from ..answer_room import AnswerRoom
from ..frames.frame_socket import Buffer, FrameSocket
from ..race import start_task

log = logging.getLogger("keylane.rpc")

GOODBYE_S = 2.0
Parts = tuple[bytes, Buffer]
"""The parts of a frame."""


class PlaneConnection:
    """A client's connection: its share of the room, its answers under way, and the bytes that it
    has taken.
    """

    def __init__(
        self,
        socket: FrameSocket,
        room: AnswerRoom,
        access: ConnectionAccess | None,
    ) -> None:
        self.socket = socket
        self.access = access
        """The caller's access; None if this server does not authenticate callers."""
        self.transport = socket.transport
        self.share = room.share()
        self.pulls = 0
        self.not_begun = 0
        """The number of tasks that answer frames and have not begun; until they have, no later
        frame is answered without a task.
        """
        self.others = 0
        """The number of calls under way that are not pulls."""
        self.freed: asyncio.Future[None] | None = None
        """The future that is done when one of these calls ends; set while `wait_for_slot` waits."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.waits: set[asyncio.Future[None]] = set()
        """The futures for which calls without a task wait; they end with the connection."""
        self._turn = asyncio.Lock()
        self._sending = 0
        """The number of answers that wait for their turn or for the socket; later answers
        wait too.
        """
        self._taken: int | None = None
        self._taken_at = 0.0
        self._silent_s = 0.0
        self._sent_bytes = 0
        """The bytes that the kernel had taken at the last check."""
        self._refused = self.ended = False
        self.greeted = False
        """True once the client has sent its version, and it is supported."""
        self.opened_s = asyncio.get_running_loop().time()
        self._introductions = 0
        self._counted_from_s = self.opened_s

    def count_introduction(self, most: int, within_s: float) -> None:
        """Count a frame that identifies the caller. Raises FrameError if there were more than
        `most` within `within_s` seconds.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s - self._counted_from_s > within_s:
            self._counted_from_s = now_s
            self._introductions = 0
        self._introductions += 1
        if self._introductions > most:
            raise FrameError(f"over {most} frames within {within_s:g} s say who calls")

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────
    def start(
        self, body: Coroutine[Any, Any, None], ended: Callable[[], object] | None = None
    ) -> None:
        """Run a task that ends with the connection; `ended` is called at its end, even if it never
        began.
        """
        task = start_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if ended is not None:
            task.add_done_callback(lambda _task: ended())

    def start_answer(self, body: Coroutine[Any, Any, None]) -> None:
        """Run a task that answers a frame; see `not_begun`."""
        self.not_begun += 1
        self.start(self._begin(body))

    async def _begin(self, body: Coroutine[Any, Any, None]) -> None:
        self.not_begun -= 1
        await body

    @property
    def takes_now(self) -> bool:
        """Return True if the client has taken nearly all that was sent, and nothing waits before
        the next answer.
        """
        socket = self.socket
        return socket.writable and not (
            self._sending or socket.closed or self.ended or self._refused
        )

    async def wait_for_slot(self) -> None:
        """Wait until fewer than IN_FLIGHT_PER_CONNECTION_MAX calls that are not pulls are under
        way.
        """
        while self.others >= IN_FLIGHT_PER_CONNECTION_MAX:
            self.freed = asyncio.get_running_loop().create_future()
            try:
                await self.freed
            finally:
                self.freed = None

    def free_slot(self) -> None:
        """Count the end of a call that is not a pull."""
        self.others -= 1
        if self.freed is not None and not self.freed.done():
            self.freed.set_result(None)

    # ── answers ───────────────────────────────────────────────────────────────────────────────────
    async def send(self, parts: Parts) -> None:
        """Write one frame, and wait until the socket has taken nearly all of it."""
        self._sending += 1
        try:
            async with self._turn:
                if not self.socket.closed and not self._refused:
                    await self.socket.send(parts)
        finally:
            self._sending -= 1

    def post(self, parts: Parts, taken: Callable[[], object]) -> bool:
        """
        Write one frame, as `send` does, but without waiting.

        Returns:
            True if the socket has taken nearly all of it, or is closed; False if `taken` will be
            called once it has.
        """
        socket = self.socket
        if self._sending or not socket.writable:
            self.start(self._send_later(parts), taken)
            return False
        if not (socket.closed or self._refused):
            socket.write(parts)
            if not self.socket.writable:  # the write may have changed it
                self.start(self._send_later(None), taken)
                return False
        return True

    async def _send_later(self, parts: Parts | None) -> None:
        try:
            if parts is None:
                await self.socket.wait_writable()
            else:
                await self.send(parts)
        except (ConnectionError, RuntimeError):
            log.debug("the client left before its answer")

    def waiting_s(self, now: float) -> float:
        """Return the seconds since the client last read something that is ready for it; 0 if
        nothing is. Call it often.
        """
        left = self.transport.get_write_buffer_size()
        taken = self.socket.written_bytes - left
        if not left or self._taken is None or taken > self._taken:
            self._taken = taken
            self._taken_at = now
        return now - self._taken_at

    def silent_s(self, look_s: float) -> float:
        """
        Return the seconds for which nothing has arrived, and the kernel has taken no answer.

        They grow by `look_s` with each call: a server that was stopped for a while counts that
        time once.
        """
        socket = self.socket
        socket.signs = 0
        taken = socket.written_bytes - self.transport.get_write_buffer_size()
        if socket.heard or not socket.reading or taken != self._sent_bytes:
            socket.heard = False
            self._sent_bytes = taken
            self._silent_s = 0.0
        else:
            self._silent_s += look_s
        return self._silent_s

    async def refuse(self, error: KeylaneError) -> None:
        """Send the error, and close."""
        self._refused = True
        try:
            await self.socket.send(frame_parts(0, refusal(error)))
            await self.socket.close()
        except (ConnectionError, RuntimeError):
            log.debug("the client left before it was refused")

    async def tell(self, delay: Delay) -> None:
        """Notify the client that it waits."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            await self.send(frame_parts(0, Throttled(round(delay.ms), delay.limit)))

    def end(self) -> None:
        """Cancel the answers under way; data that the client does not read within `GOODBYE_S` is
        discarded.
        """
        self.ended = True
        if self.access is not None:
            self.access.end()
        for task in self._tasks:
            task.cancel()
        for future in list(self.waits):
            future.cancel()
        asyncio.get_running_loop().call_later(GOODBYE_S, self.transport.abort)


class PlaneCall:
    """
    A call of a connection that is answered without a task; see `PromptCall`.

    Args:
        hand_on: answers another request with the same number in a task.
        on_refusal: is called with each refusal.
    """

    __slots__ = (
        "_asked",
        "_connection",
        "_hand_on",
        "_kept_bytes",
        "_number",
        "_on_refusal",
        "_pull",
        "_room_bytes",
        "_wait",
    )

    def __init__(
        self,
        connection: PlaneConnection,
        number: int,
        asked: Request,
        hand_on: Callable[[PlaneConnection, int, Request], None],
        on_refusal: Callable[[KeylaneError], None],
        *,
        pull: bool,
    ) -> None:
        self._connection = connection
        self._number = number
        self._asked = asked
        self._hand_on = hand_on
        self._on_refusal = on_refusal
        self._pull = pull
        self._room_bytes = 0
        self._kept_bytes = 0
        """The bytes of the answer that count in the room, until the client has taken it."""
        self._wait: asyncio.Future[None] | None = None
        if pull:
            connection.pulls += 1
        else:
            connection.others += 1

    def take_room(self, bytes_max: int) -> bool:
        """Return True if an answer of this size may be made now; see `PromptCall`."""
        if not self._connection.share.take_now(bytes_max):
            return False
        self._room_bytes = bytes_max
        return True

    def waits_for(self, future: asyncio.Future[None]) -> None:
        """Cancel `future` if the client leaves; see `PromptCall`."""
        if self._wait is not None:
            self._connection.waits.discard(self._wait)
        self._wait = future
        self._connection.waits.add(future)

    def answer(self, answer: Answer, data: bytes = b"") -> None:
        """Answer the call; see `PromptCall`."""
        try:
            parts = frame_parts(self._number, answer, data)
        except KeylaneError as error:
            self.refuse(error)
            return
        self._post(parts, data)

    def part(self, answer: Answer, data: bytes = b"") -> None:
        """Give one of several answers; see `PromptCall`."""
        parts = frame_parts(self._number, answer, data)
        size = len(data) if self._room_bytes else 0
        share = self._connection.share
        taken = self._connection.post(parts, partial(share.free, size))
        if self._room_bytes:
            share.note_size(self._room_bytes, 0 if taken else size)
            self._room_bytes = 0

    @property
    def takes_parts(self) -> bool:
        """Return True while the client takes further answers; see `PromptCall`."""
        connection = self._connection
        access = connection.access
        # If the rights or the quota of a caller have changed, they are checked again with the next
        # pull.
        return connection.takes_now and (access is None or access.is_cleared(self._asked))

    def refuse(self, error: BaseException) -> None:
        """Answer with an error; see `PromptCall`."""
        told = error
        if not isinstance(told, KeylaneError):
            log.error("%s failed", type(self._asked).__name__, exc_info=error)
            told = InternalError()
        self._on_refusal(told)
        self._post(frame_parts(self._number, refusal(told)))

    def _post(self, parts: Parts, data: bytes = b"") -> None:
        """Give the last answer; room may have been taken for `data`."""
        connection = self._connection
        taken = connection.ended or connection.post(parts, self._taken)
        if self._room_bytes:
            self._kept_bytes = 0 if taken else len(data)
            connection.share.note_size(self._room_bytes, self._kept_bytes)
            self._room_bytes = 0
        if taken:
            self.forget()

    def _taken(self) -> None:
        """Note that the client has taken the whole answer, or has left."""
        self.forget()
        if self._kept_bytes:
            self._connection.share.free(self._kept_bytes)
            self._kept_bytes = 0

    def hand_on(self, request: Request) -> None:
        """Hand the call on to a task; see `PromptCall`."""
        self.forget()
        if self._room_bytes:
            self._connection.share.note_size(self._room_bytes, 0)
            self._room_bytes = 0
        if not self._connection.ended:
            self._hand_on(self._connection, self._number, request)

    def forget(self) -> None:
        """Count the call as no longer under way."""
        connection = self._connection
        if self._wait is not None:
            connection.waits.discard(self._wait)
        if self._pull:
            connection.pulls -= 1
        elif connection.freed is None:
            connection.others -= 1
        else:
            connection.free_slot()

"""A connection that carries frames after its HTTP upgrade, without copying large ones. Performs
socket I/O.

    socket ─▶ shared receive buffer (small frames) ─▶ on_frame, or receive()
         └──▶ the rest of a large frame, straight into its own memory

    send(parts) ─▶ one gathered write

Invariants
    The memory for a frame grows with the bytes that have arrived, whatever size its header
    announces.
    While `QUEUED_BYTES_MAX` wait for `receive`, nothing is read from the socket.
    A server (which has a `budget`) answers pings at most once per read, and not while the client
    reads nothing.
    The unfinished frames of all connections share a memory budget (`incoming`).
    The number of frames per iteration of the event loop is limited, so that no peer can monopolize
    the loop.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from ...protocol.errors import FrameError
from ...protocol.frames import SIGN_OF_LIFE, SIZE
from ..threads.turn import at_end, in_turn
from .incoming import IncomingBudget

Buffer = bytes | bytearray | memoryview
RECEIVE_BUFFER_BYTES = 16 << 10
"""The size of the receive buffer, and the most bytes of a large frame that are copied."""
FRAME_BYTES_FIRST = 256 << 10
"""The memory that is initially allocated for a larger frame; it grows as the frame arrives."""
QUEUED_BYTES_MAX = 256 << 10
"""The size of the queued frames, in bytes, above which reading is paused."""
FRAME_OVERHEAD_BYTES = 128
"""The memory in bytes that a queued frame uses besides its content."""
GATHERED_BYTES_MIN = 4 << 10
"""Frames smaller than this are joined, because writing one buffer costs less than writing two."""
GATHERED_BYTES_MAX = 16 << 10
"""The number of gathered bytes at which they are written."""
ITERATION_FRAMES_MAX = 1_000
"""The number of frames accepted from a peer in one iteration of the event loop; uvloop reads a
socket up to 32 times per iteration.
"""
PINGS_MAX = 1_000
"""The number of pings that a server accepts between two checks of a connection."""
WRITELINES_APPLIES_BACKPRESSURE = not (
    (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)
)
"""True if asyncio's `writelines` calls `pause_writing`. In the excluded versions it does not, and
its buffer grows without limit (CVE-2024-12254).
"""
CLOSE_S = 1.0
"""The maximum time in seconds that `close` waits until the connection is closed."""


class _ReceiveBuffer(threading.local):
    """The buffer into which a thread's event loop reads. Its sockets share the buffer, because the
    loop reads from one at a time.
    """

    def __init__(self) -> None:
        self.view = memoryview(bytearray(RECEIVE_BUFFER_BYTES))


_receive_buffer = _ReceiveBuffer()


class FrameSocket(asyncio.BufferedProtocol):
    """
    One end of a connection that sends and receives frames.

    It starts to read when it is created, so create it when the upgrade is done, or just before the
    server answers the upgrade.

    Args:
        transport: the transport of the connection, taken over from aiohttp.
        bytes_max: the largest frame that is accepted, in bytes.
        budget: the server's memory budget for unfinished frames; None at a client's end.
    """

    frame_started_s = 0.0
    """When the unfinished frame began, in the event loop's time; pauses in reading move it
    forward.
    """
    _paused_s = 0.0
    """When reading was last paused."""
    _iteration_s = -1.0
    _iteration_frames = 0
    """The number of frames in the loop iteration that started at `_iteration_s`."""

    def __init__(
        self, transport: asyncio.Transport, *, bytes_max: int, budget: IncomingBudget | None = None
    ) -> None:
        self.transport = self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._aiohttp_protocol = transport.get_protocol()
        """aiohttp's protocol, which must be notified when the connection is lost."""
        self.bytes_max = bytes_max
        """The largest frame that is accepted, in bytes; a change applies to later frames."""
        self._partial_size = b""
        """The first bytes of a size field that has not arrived completely."""
        self._frame = bytearray()
        """The memory allocated for the unfinished frame."""
        self._frame_bytes = 0
        """The full size of the unfinished frame; 0 if there is none."""
        self._arrived_bytes = 0
        """The number of bytes of the unfinished frame that have arrived."""
        self._budget = budget
        self._gathered = list[Buffer]()
        self._gathered_bytes = 0
        self._flush_scheduled = self._gathering = False
        """True if the gathered frames will be written at the end of this callback, or by
        `flush`.
        """
        self.on_frame: Callable[[bytearray], bool] | None = None
        """
        Called with each frame that arrives while `receive` is waiting. If it returns False,
        `receive` returns the frame.

        It may call every method except `receive`, and must not raise.
        """
        self._frames = deque[bytearray]()
        self._queued_bytes = 0
        self.reading = True
        """False while reading from the socket is paused."""
        self._receive_waiter: asyncio.Future[None] | None = None
        """The future that `receive` is waiting for."""
        self.writable = True
        """True while the transport's write buffer is nearly empty."""
        self._writable_event = asyncio.Event()
        """Set while `writable` is True."""
        self._writable_event.set()
        self.written_bytes = 0
        """The number of bytes that have been passed to the transport."""
        self.has_received = True
        """True once anything was received; the watchdog for silent connections sets it to False."""
        self.pings = 0
        """The number of pings received; the watchdog for silent connections resets it to 0."""
        self.closing = False
        """True once the connection is being closed: nothing more can be sent."""
        self._transport_closed = False
        self._accepts_data = True
        """False once incoming data is discarded."""
        self._lost_future: asyncio.Future[None] = self._loop.create_future()
        """Done once the connection is lost."""
        self.close_reason = ""
        """Why this end is closing the connection; "" if the other end closed it."""
        transport.pause_reading()  # uvloop changes the kind of protocol only between two reads
        transport.set_protocol(self)
        transport.resume_reading()

    def add_lost_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the connection is lost."""
        self._lost_future.add_done_callback(lambda _lost: callback())

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return the memory for the next read; see `asyncio.BufferedProtocol`."""
        if self._frame_bytes:
            return memoryview(self._frame)[self._arrived_bytes :]
        prefix, view = self._partial_size, _receive_buffer.view
        if not prefix:
            return view
        view[: len(prefix)] = prefix
        return view[len(prefix) :]

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes that have been read; see `asyncio.BufferedProtocol`."""
        self.has_received = True
        if self._accepts_data:
            in_turn(self._process, nbytes)

    def _process(self, nbytes: int) -> None:
        if not self._frame_bytes:
            self._split_frames(_receive_buffer.view, len(self._partial_size) + nbytes)
            return
        self._arrived_bytes += nbytes
        size = self._frame_bytes
        if self._arrived_bytes == size:
            frame, self._frame, self._frame_bytes = self._frame, bytearray(), 0
            self._deliver(frame)
        elif self._arrived_bytes == len(self._frame):
            larger_frame = bytearray(min(2 * self._arrived_bytes, size))
            larger_frame[: self._arrived_bytes] = self._frame
            self._frame = larger_frame  # a bytearray cannot grow while the loop holds a view of it
        self._record_incoming()

    def _split_frames(self, data: memoryview, end: int) -> None:
        """Deliver the frames in `data[:end]`. The last one may be completed by later reads."""
        start = frame_count = 0
        self._partial_size = b""
        is_pinged = False
        while start < end and self._accepts_data:
            if end - start < SIZE.size:
                self._partial_size = bytes(data[start:end])
                break
            frame_count += 1
            size: int = SIZE.unpack_from(data, start)[0] + SIZE.size
            stop = start + size
            if size == SIZE.size:
                is_pinged, start = True, stop
                self.pings += 1
            elif size > self.bytes_max:
                self.refuse(f"a frame of {size} bytes, over the limit of {self.bytes_max}")
            elif stop <= end:
                frame, start = bytearray(data[start:stop]), stop
                self._deliver(frame)
            else:
                self._arrived_bytes = end - start
                self._frame = bytearray(max(min(size, FRAME_BYTES_FIRST), self._arrived_bytes))
                self._frame[: self._arrived_bytes] = data[start:end]
                self._frame_bytes = size
                self.frame_started_s = self._loop.time()
                self._record_incoming()
                break
        if is_pinged and self._budget is not None and self.writable and not self.closing:
            self.write((SIGN_OF_LIFE,))
        if self.pings > PINGS_MAX and self._budget is not None:
            self.refuse(f"over {PINGS_MAX} pings between two checks")
        if frame_count > ITERATION_FRAMES_MAX // 16:
            self._count_frames(frame_count)

    def _record_incoming(self) -> None:
        """Report to the budget how much of the unfinished frame has arrived."""
        budget = self._budget
        if budget is None:
            return
        if not self._frame_bytes:
            budget.release(self)
            return
        budget.record_progress(self, self._arrived_bytes, self._loop.time(), self._refuse_slow)
        if not self.reading:
            budget.pause(self, self._paused_s)

    def _refuse_slow(self) -> None:
        self.refuse("the rest of a frame did not arrive in time")

    def unfinished_s(self) -> float:
        """Return the age of the unfinished frame in seconds, not counting pauses in reading; 0 if
        there is none.
        """
        if not self._frame_bytes:
            return 0.0
        return (self._loop.time() if self.reading else self._paused_s) - self.frame_started_s

    def _count_frames(self, count: int) -> None:
        """Pause reading until the loop's next iteration if this one has had enough frames. The
        loop's time does not change within an iteration.
        """
        now_s = self._loop.time()
        if now_s != self._iteration_s:
            self._iteration_s = now_s
            self._iteration_frames = 0
        self._iteration_frames += count
        if self._iteration_frames > ITERATION_FRAMES_MAX and self.reading and self._accepts_data:
            self._pause_reading()
            self._loop.call_soon(self._resume_reading)

    def _pause_reading(self) -> None:
        self.reading = False
        self._paused_s = self._loop.time()
        self._transport.pause_reading()
        if self._budget is not None:
            self._budget.pause(self, self._paused_s)

    def _resume_reading(self) -> None:
        """Resume reading, unless too many bytes are queued for `receive`, which will resume it
        later.
        """
        if not self.reading and self._accepts_data and self._queued_bytes <= QUEUED_BYTES_MAX:
            now_s = self._loop.time()
            self.frame_started_s += now_s - self._paused_s  # the peer did not cause this delay
            if self._budget is not None:
                self._budget.resume(self, now_s)
            self.reading = True
            self._transport.resume_reading()

    def _deliver(self, frame: bytearray) -> None:
        """Pass a frame to `on_frame` if `receive` is waiting, otherwise queue it for `receive`."""
        on_frame = self.on_frame
        if on_frame is None or self._receive_waiter is None or self._frames or not on_frame(frame):
            self._frames.append(frame)
            self._queued_bytes += len(frame) + FRAME_OVERHEAD_BYTES
            self._wake_receive()
            if self._queued_bytes > QUEUED_BYTES_MAX and self.reading:
                self._pause_reading()

    def _wake_receive(self) -> None:
        waiter, self._receive_waiter = self._receive_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def receive(self) -> bytearray | None:
        """
        Return the next frame, or None at the end of the connection.

        Raises:
            FrameError: the bytes after the last frame do not form a frame.
        """
        while not self._frames:
            if self.close_reason:
                raise FrameError(self.close_reason)
            if self._transport_closed:
                return None
            self._receive_waiter = self._loop.create_future()
            await self._receive_waiter
        frame = self._frames.popleft()
        self._queued_bytes -= len(frame) + FRAME_OVERHEAD_BYTES
        if not self.reading and self._queued_bytes <= QUEUED_BYTES_MAX // 2:
            self._resume_reading()
        return frame

    # ── writing ───────────────────────────────────────────────────────────────────────────────────
    async def send(self, parts: Sequence[Buffer]) -> None:
        """
        Send a frame, and wait until the write buffer is nearly empty again.

        Raises:
            ConnectionError: the connection is closed or was lost.
        """
        self.write(parts)
        if not self.writable:
            await self.wait_writable()

    async def wait_writable(self) -> None:
        """Wait until the write buffer is nearly empty. Raises ConnectionError if the connection was
        lost.
        """
        await self._writable_event.wait()
        if self._lost_future.done():
            raise ConnectionResetError("the connection was lost")

    def write(self, parts: Sequence[Buffer]) -> None:
        """
        Send a frame. Small frames that are written in one event loop callback share a system call.

        Args:
            parts: the parts of the frame, in order; they must not be changed afterwards.

        Raises:
            ConnectionError: the connection is closed.
        """
        if self.closing:
            raise ConnectionResetError("the connection is closed")
        self._gathered += parts
        self._gathered_bytes += sum(map(len, parts))
        if self._gathered_bytes >= GATHERED_BYTES_MAX:
            self._write_gathered()
        elif not (self._flush_scheduled or self._gathering):
            self._flush_scheduled = True
            at_end(self._flush_scheduled_frames, self._loop)

    def ping(self) -> None:
        """Send a ping to the server."""
        if not self.closing:
            self.write((SIGN_OF_LIFE,))

    def gather(self) -> None:
        """Hold back small frames until `flush`, instead of only until the end of the callback."""
        self._gathering = True

    def flush(self) -> None:
        """Write the frames that have been held back since `gather`."""
        self._gathering = False
        if self._gathered:
            self._write_gathered()

    def _flush_scheduled_frames(self) -> None:
        self._flush_scheduled = False
        if self._gathered:
            self._write_gathered()

    def _write_gathered(self) -> None:
        """Write the gathered frames. A large last part is written without a copy."""
        parts, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if not parts or self._transport.is_closing():
            return
        if len(parts[-1]) >= GATHERED_BYTES_MIN:
            self.written_bytes += sum(map(len, parts))
            head = b"".join(parts[:-1])
            if WRITELINES_APPLIES_BACKPRESSURE:
                self._transport.writelines((head, parts[-1]))
            else:
                self._transport.write(head)
                self._transport.write(parts[-1])
        else:
            data = b"".join(parts)
            self.written_bytes += len(data)
            self._transport.write(data)

    def pause_writing(self) -> None:
        """Record that the write buffer is full; see `asyncio.BaseProtocol`."""
        self.writable = False
        self._writable_event.clear()

    def resume_writing(self) -> None:
        """Record that the write buffer is nearly empty; see `asyncio.BaseProtocol`."""
        self.writable = True
        self._writable_event.set()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    def refuse(self, problem: str) -> None:
        """Stop reading because of this problem. `receive` returns the frames that have arrived, and
        then raises a FrameError.
        """
        if self._accepts_data:
            self.close_reason = problem
            self._discard_incoming()
            if self.reading:
                self._pause_reading()
            self._wake_receive()

    def _discard_incoming(self) -> None:
        self._accepts_data = False
        self._partial_size = b""
        self._frame = bytearray()
        self._frame_bytes = 0
        if self._budget is not None:
            self._budget.release(self)

    async def close(self) -> None:
        """
        Close the connection once all data has been sent, or after `CLOSE_S`.

        Meanwhile, both ends read and discard data: if a socket is closed while it has unread data,
        the kernel resets the connection, and the peer loses what it has not read yet. A client
        first shuts down its sending half, which TLS does not support.
        """
        self.closing = True
        self._write_gathered()
        self._discard_incoming()
        if self._budget is None and not self._transport.can_write_eof():
            self.end()
        elif not self._transport_closed and not self._transport.is_closing():
            if self._budget is None:
                self._transport.write_eof()
            if not self.reading:
                self.reading = True
                self._transport.resume_reading()
        if not self._lost_future.done():
            await asyncio.wait([self._lost_future], timeout=CLOSE_S)
        self.end()

    def end(self) -> None:
        """Close the connection without waiting. Buffered data is still sent."""
        if not self._transport_closed:
            self.closing = self._transport_closed = True
            self._discard_incoming()
            self._write_gathered()
            self._transport.close()
            self._wake_receive()

    def abort(self, reason: str) -> None:
        """Abort the connection. Buffered data is discarded."""
        if not self._transport_closed:
            self.close_reason = reason
            self.end()
            self._transport.abort()

    def eof_received(self) -> bool:
        """Let the transport close itself; see `asyncio.BufferedProtocol`."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake everything that is waiting for the connection; see `asyncio.BaseProtocol`."""
        self.end()
        if not self._lost_future.done():
            self._lost_future.set_result(None)
        self.writable = True
        self._writable_event.set()
        cast(asyncio.Protocol, self._aiohttp_protocol).connection_lost(exc)

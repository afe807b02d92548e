"""A connection that carries frames once its HTTP upgrade is done; it does not copy large data. I/O:
sockets.

    socket ─▶ landing (small frames) ─▶ on_frame, or receive()
         └──▶ the rest of a large frame, straight into its memory

    send(parts) ─▶ one gathered write

Invariants
    Memory for a frame grows with the bytes that have arrived, whatever size it claims. While
    `QUEUED_BYTES_MAX` wait for `receive`, nothing is read. A server (which has a `room`) answers
    requests for a sign of life once for each read, and not while the client reads nothing.
    Unfinished frames have a common bound (`incoming`). Frames of one turn of the event loop are
    counted, so that no peer monopolises the loop.

The HTTP upgrade that opens a connection of the data plane, until a `FrameSocket` takes it over.

    GET /v1/data                        HTTP/1.1 101 Switching Protocols
    Connection: Upgrade          ─▶     Connection: Upgrade               ─▶  frames, both ways
    Upgrade: keylane/1                  Upgrade: keylane/1

The server part imports aiohttp's server only when needed, because a client with that import starts
more slowly.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import aiohttp

from ...protocol.errors import FrameError, InvalidRequestError
from ...protocol.frames import SIGN_OF_LIFE, SIZE
from ..liveness.silence import keep_alive
from ..threads.turn import at_end, in_turn
from .incoming import IncomingRoom

if TYPE_CHECKING:
    from aiohttp import web


Buffer = bytes | bytearray | memoryview
LANDING_BYTES = 16 << 10
"""The most bytes of a large frame that are copied, because they arrive with its beginning."""
FRAME_BYTES_FIRST = 256 << 10
"""A frame that claims more bytes than this gets its memory as it arrives."""
QUEUED_BYTES_MAX = 256 << 10
FRAME_BYTES_MORE = 128
"""The bytes that a waiting frame takes besides its content."""
GATHERED_BYTES_MIN = 4 << 10
"""Frames smaller than this are joined, because one buffer costs less to write than two."""
GATHERED_BYTES_MAX = 16 << 10
"""If more bytes than this are gathered, they are written at once."""
TURN_FRAMES_MAX = 1_000
"""The number of frames that are taken from a peer in one turn of the event loop; uvloop reads a
socket up to 32 times in one turn.
"""
SIGNS_MAX = 1_000
"""The most requests for a sign of life that a server takes between two checks of a connection."""
WRITELINES_HOLD_BACK = not (
    (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)
)
"""True where asyncio's `writelines` calls `pause_writing`; in the excluded versions it does not,
and its buffer grows (CVE-2024-12254).
"""
CLOSE_S = 1.0
"""Seconds for which `close` waits for the end of the connection."""


class _ReceiveBuffer(threading.local):
    """The buffer into which the event loop of a thread reads; the loop reads from one socket at a
    time.
    """

    def __init__(self) -> None:
        self.view = memoryview(bytearray(LANDING_BYTES))


_receive_buffer = _ReceiveBuffer()


class FrameSocket(asyncio.BufferedProtocol):
    """
    One connection. Create it when the upgrade is done, or about to be answered: it reads from then
    on.

    Args:
        transport: the transport of the connection.
        bytes_max: the largest frame that is received.
        room: the server's room for the unfinished frames of all its connections; None: this is the
            client's end.
    """

    begun_s = 0.0
    """The time at which the unfinished frame began, by the loop's clock; moved later by the time in
    which nothing was read.
    """
    _paused_s = 0.0
    """The time at which the last pause of reading began."""
    _turn_s = -1.0
    _turn_frames = 0
    """The number of frames in the turn of the event loop that began at `_turn_s`."""

    def __init__(
        self, transport: asyncio.Transport, *, bytes_max: int, room: IncomingRoom | None = None
    ) -> None:
        self.transport = self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._before = transport.get_protocol()
        """The protocol of aiohttp, which must be notified of the end of the connection."""
        self.bytes_max = bytes_max
        """The largest frame that is received, in bytes; a change applies to frames that begin after
        it.
        """
        self._rest = b""
        """The beginning of a size."""
        self._frame = bytearray()
        """The unfinished frame; its length is the memory that it has."""
        self._size = 0
        """The bytes that this frame will have; 0 if there is none."""
        self._filled = 0
        self._room = room
        self._gathered = list[Buffer]()
        self._gathered_bytes = 0
        self._leaves = self._gathering = False
        """True if the gathered frames leave at the end of this callback, or with `flush`."""
        self.on_frame: Callable[[bytearray], bool] | None = None
        """
        A callable that gets a frame as it arrives, while `receive` waits for it; if it returns
        False, `receive` returns the frame.

        It may call every method except `receive`, and must not raise.
        """
        self._frames = deque[bytearray]()
        self._queued_bytes = 0
        self.reading = True
        self._news: asyncio.Future[None] | None = None
        """The future for which `receive` waits."""
        self.writable = True
        """True while the socket has taken nearly all that was sent."""
        self._resumed = asyncio.Event()
        """The event that is set while `writable`, for those that wait."""
        self._resumed.set()
        self.written_bytes = 0
        """The number of bytes that were given to the transport."""
        self.heard = True
        """True once something arrived; whatever watches for silence sets it to False."""
        self.signs = 0
        """The number of signs of life that arrived; whatever watches for silence sets it to 0."""
        self.closed = self._ended = False
        """`closed` is True once nothing can be sent."""
        self._takes = True
        """False once arriving data is dropped."""
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self.problem = ""
        """The reason why the connection ends, if it was found here."""
        transport.pause_reading()  # uvloop takes another kind of protocol only between two reads
        transport.set_protocol(self)
        transport.resume_reading()

    def when_lost(self, call: Callable[[], object]) -> None:
        """Call `call` once the connection is gone."""
        self._lost.add_done_callback(lambda _lost: call())

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return the memory for the next read; see `asyncio.BufferedProtocol`."""
        if self._size:
            return memoryview(self._frame)[self._filled :]
        rest, view = self._rest, _receive_buffer.view
        if not rest:
            return view
        view[: len(rest)] = rest
        return view[len(rest) :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take the bytes that were read; see `asyncio.BufferedProtocol`."""
        self.heard = True
        if self._takes:
            in_turn(self._came, nbytes)

    def _came(self, nbytes: int) -> None:
        if not self._size:
            self._land(_receive_buffer.view, len(self._rest) + nbytes if self._rest else nbytes)
            return
        self._filled += nbytes
        size = self._size
        if self._filled == size:
            frame, self._frame, self._size = self._frame, bytearray(), 0
            self._hear(frame)
        elif self._filled == len(self._frame):
            larger = bytearray(min(2 * self._filled, size))
            larger[: self._filled] = self._frame
            self._frame = larger  # the old one cannot be extended while the loop has a view of it
        self._note_incoming()

    def _land(self, data: memoryview, end: int) -> None:
        """Take the frames in `data[:end]`; the last one may continue in the next read."""
        start = frames = 0
        self._rest = b""
        asked = False
        while start < end and self._takes:
            if end - start < SIZE.size:
                self._rest = bytes(data[start:end])
                break
            frames += 1
            size: int = SIZE.unpack_from(data, start)[0] + SIZE.size
            stop = start + size
            if size == SIZE.size:
                asked, start = True, stop
                self.signs += 1
            elif size > self.bytes_max:
                self.refuse(f"a frame of {size} bytes, over the limit of {self.bytes_max}")
            elif stop <= end:
                frame, start = bytearray(data[start:stop]), stop
                self._hear(frame)
            else:
                self._filled = end - start
                self._frame = bytearray(max(min(size, FRAME_BYTES_FIRST), self._filled))
                self._frame[: self._filled] = data[start:end]
                self._size = size
                self.begun_s = self._loop.time()
                self._note_incoming()
                break
        if asked and self._room is not None and self.writable and not self.closed:
            self.write((SIGN_OF_LIFE,))
        if self.signs > SIGNS_MAX and self._room is not None:
            self.refuse(f"over {SIGNS_MAX} requests for a sign of life between two checks")
        if frames > TURN_FRAMES_MAX // 16:
            self._count_frames(frames)

    def _note_incoming(self) -> None:
        """Note how much of the unfinished frame has arrived."""
        room = self._room
        if room is None:
            return
        if not self._size:
            room.free(self)
            return
        room.note(self, self._filled, self._loop.time(), self._refuse_late)
        if not self.reading:
            room.pause(self, self._paused_s)

    def _refuse_late(self) -> None:
        self.refuse("the rest of a frame did not arrive in time")

    def waits_for_end_s(self) -> float:
        """Return the seconds since the unfinished frame began, without the time in which the socket
        was not read; 0 if there is none.
        """
        if not self._size:
            return 0.0
        return (self._loop.time() if self.reading else self._paused_s) - self.begun_s

    def _count_frames(self, frames: int) -> None:
        """Continue reading in the next turn of the event loop once this turn has had enough frames;
        uvloop has one time for a turn.
        """
        now_s = self._loop.time()
        if now_s != self._turn_s:
            self._turn_s = now_s
            self._turn_frames = 0
        self._turn_frames += frames
        if self._turn_frames > TURN_FRAMES_MAX and self.reading and self._takes:
            self._pause_reading()
            self._loop.call_soon(self._read_on)

    def _pause_reading(self) -> None:
        self.reading = False
        self._paused_s = self._loop.time()
        self._transport.pause_reading()
        if self._room is not None:
            self._room.pause(self, self._paused_s)

    def _read_on(self) -> None:
        """Read again, unless too much waits for `receive`, which then resumes reading."""
        if not self.reading and self._takes and self._queued_bytes <= QUEUED_BYTES_MAX:
            now_s = self._loop.time()
            self.begun_s += now_s - self._paused_s  # the peer was not the cause of the delay
            if self._room is not None:
                self._room.resume(self, now_s)
            self.reading = True
            self._transport.resume_reading()

    def _hear(self, frame: bytearray) -> None:
        """Pass a frame to `on_frame` as it arrives, or to `receive`."""
        on_frame = self.on_frame
        if on_frame is None or self._news is None or self._frames or not on_frame(frame):
            self._frames.append(frame)
            self._queued_bytes += len(frame) + FRAME_BYTES_MORE
            self._tell()
            if self._queued_bytes > QUEUED_BYTES_MAX and self.reading:
                self._pause_reading()

    def _tell(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    async def receive(self) -> bytearray | None:
        """
        Return the next frame, or None if there is no further frame.

        Raises:
            FrameError: the bytes after the last frame are not a frame.
        """
        while not self._frames:
            if self.problem:
                raise FrameError(self.problem)
            if self._ended:
                return None
            self._news = self._loop.create_future()
            await self._news
        frame = self._frames.popleft()
        self._queued_bytes -= len(frame) + FRAME_BYTES_MORE
        if not self.reading and self._queued_bytes <= QUEUED_BYTES_MAX // 2:
            self._read_on()
        return frame

    # ── writing ───────────────────────────────────────────────────────────────────────────────────
    async def send(self, parts: Sequence[Buffer]) -> None:
        """
        Send a frame, and wait until the socket has taken nearly all of it.

        Raises:
            ConnectionError: the connection is closed, or was lost.
        """
        self.write(parts)
        if not self.writable:
            await self.wait_writable()

    async def wait_writable(self) -> None:
        """Wait until the connection is `writable`. Raises ConnectionError if it was lost."""
        await self._resumed.wait()
        if self._lost.done():
            raise ConnectionResetError("the connection was lost")

    def write(self, parts: Sequence[Buffer]) -> None:
        """
        Send a frame; small frames of one callback of the event loop share a system call.

        Args:
            parts: the parts of the frame, in order; they must not change until they are sent.

        Raises:
            ConnectionError: the connection is closed.
        """
        if self.closed:
            raise ConnectionResetError("the connection is closed")
        self._gathered += parts
        self._gathered_bytes += sum(map(len, parts))
        if self._gathered_bytes >= GATHERED_BYTES_MAX:
            self._write_gathered()
        elif not (self._leaves or self._gathering):
            self._leaves = True
            at_end(self._leave, self._loop)

    def ask(self) -> None:
        """Ask the server for a sign of life."""
        if not self.closed:
            self.write((SIGN_OF_LIFE,))

    def gather(self) -> None:
        """Keep small frames from here on until `flush`, instead of until the end of the
        callback.
        """
        self._gathering = True

    def flush(self) -> None:
        """Write the frames that were kept since `gather`."""
        self._gathering = False
        if self._gathered:
            self._write_gathered()

    def _leave(self) -> None:
        self._leaves = False
        if self._gathered:
            self._write_gathered()

    def _write_gathered(self) -> None:
        """Write the gathered frames; a large last part is not joined to the others."""
        parts, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if not parts or self._transport.is_closing():
            return
        if len(parts[-1]) >= GATHERED_BYTES_MIN:
            self.written_bytes += sum(map(len, parts))
            before = b"".join(parts[:-1])
            if WRITELINES_HOLD_BACK:
                self._transport.writelines((before, parts[-1]))
            else:
                self._transport.write(before)
                self._transport.write(parts[-1])
        else:
            data = b"".join(parts)
            self.written_bytes += len(data)
            self._transport.write(data)

    def pause_writing(self) -> None:
        """Note that the socket takes no more now; see `asyncio.BaseProtocol`."""
        self.writable = False
        self._resumed.clear()

    def resume_writing(self) -> None:
        """Note that the socket takes data again; see `asyncio.BaseProtocol`."""
        self.writable = True
        self._resumed.set()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    def refuse(self, problem: str) -> None:
        """Take nothing more from the peer: `receive` returns the frames that arrived earlier, and
        then raises this problem.
        """
        if self._takes:
            self.problem = problem
            self._take_no_more()
            if self.reading:
                self._pause_reading()
            self._tell()

    def _take_no_more(self) -> None:
        self._takes = False
        self._rest = b""
        self._frame = bytearray()
        self._size = 0
        if self._room is not None:
            self._room.free(self)

    async def close(self) -> None:
        """
        End the connection once all sent data has left, and wait for this for `CLOSE_S` at most.

        Either end reads on until then, and drops what it reads: the kernel resets a connection that
        is closed before all that arrived was read, and the peer loses what it has not read yet. A
        client says that it sends nothing more; TLS has no such half, and reads to its own end.
        """
        self.closed = True
        self._write_gathered()
        self._take_no_more()
        if self._room is None and not self._transport.can_write_eof():
            self.end()
        elif not self._ended and not self._transport.is_closing():
            if self._room is None:
                self._transport.write_eof()
            if not self.reading:
                self.reading = True
                self._transport.resume_reading()
        if not self._lost.done():
            await asyncio.wait([self._lost], timeout=CLOSE_S)
        self.end()

    def end(self) -> None:
        """End the connection; data that was written still leaves."""
        if not self._ended:
            self._ended = self.closed = True
            self._take_no_more()
            self._write_gathered()
            self._transport.close()
            self._tell()

    def give_up(self, why: str) -> None:
        """End the connection at once."""
        if not self._ended:
            self.problem = why
            self.end()
            self._transport.abort()

    def eof_received(self) -> bool:
        """Return False, so that the transport closes; see `asyncio.BufferedProtocol`."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone; see `asyncio.BaseProtocol`."""
        self.end()
        if not self._lost.done():
            self._lost.set_result(None)
        self.writable = True
        self._resumed.set()
        cast(asyncio.Protocol, self._before).connection_lost(exc)


UPGRADE = "keylane/1"
"""The name of the frame protocol, with the version of its layout."""
UPGRADE_HEADERS = {"Connection": "Upgrade", "Upgrade": UPGRADE}
_HINT = (
    "Only clients of keylane call this path. A proxy before the server has to forward the headers "
    "Connection and Upgrade, and the status 101."
)


async def open_socket(
    session: aiohttp.ClientSession,
    url: str,
    *,
    tls: ssl.SSLContext | bool = True,
    bytes_max: int,
) -> FrameSocket:
    """
    Connect to a server.

    Args:
        tls: the `ssl` argument of an aiohttp request.

    Raises:
        aiohttp.ClientError, OSError, ValueError: the request failed, or the server does not speak
            this protocol.
    """
    response = await session.get(
        url,
        ssl=tls,
        headers=UPGRADE_HEADERS,
        allow_redirects=False,
        read_until_eof=False,
        timeout=aiohttp.ClientTimeout(total=None),
    )
    connection = response.connection
    opened = response.status == 101 and response.headers.get("Upgrade") == UPGRADE
    if not opened or connection is None or connection.transport is None:
        response.close()
        raise aiohttp.ClientResponseError(
            response.request_info,
            response.history,
            status=response.status,
            message=f"the server does not speak {UPGRADE}",
            headers=response.headers,
        )
    if (kernel := connection.transport.get_extra_info("socket")) is not None:
        keep_alive(kernel)
    socket = FrameSocket(connection.transport, bytes_max=bytes_max)
    socket.when_lost(response.close)
    return socket


async def accept_socket(
    request: web.Request, *, bytes_max: int, room: IncomingRoom
) -> tuple[web.StreamResponse, FrameSocket]:
    """
    Answer a client, and return the response, which the caller returns to aiohttp when the socket is
    closed, and the socket.

    Raises:
        InvalidRequestError: the client speaks another protocol.
        ConnectionResetError: the client has left.
    """
    from aiohttp import web

    wanted = request.headers.get("Upgrade", "")
    if wanted != UPGRADE or "upgrade" not in request.headers.get("Connection", "").lower():
        told = f"not {wanted[:80]!r}" if wanted else "and has none"
        error = InvalidRequestError(f"{request.path} needs the header Upgrade: {UPGRADE}, {told}")
        error.hint = _HINT
        raise error
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has left")
    response = web.StreamResponse(status=101, headers=UPGRADE_HEADERS)
    response.force_close()
    # This happens before the answer, so that the client's first frame is read here.
    socket = FrameSocket(transport, bytes_max=bytes_max, room=room)
    await response.prepare(request)
    return response, socket

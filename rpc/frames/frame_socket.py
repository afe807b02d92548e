"""A connection of frames, which takes over from HTTP after its upgrade, and copies nothing that is
large.  I/O: sockets.

    socket ─▶ landing (small frames) ─▶ on_frame, or receive()
         └──▶ the rest of a large frame, straight into its memory

    send(parts) ─▶ one gathered write

Invariants
    Memory for a frame grows with what has come of it, whatever size it claims.
    While `QUEUED_BYTES_MAX` wait for `receive`, nothing is read.
    A server (which has a `room`) answers a client that asks for a sign of life once a read, and not
    while the client takes nothing. Frames that are not whole have a bound in all (`incoming`).
    Frames of one turn of the event loop are counted: no peer keeps it from the others.
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
from .incoming import IncomingRoom

Buffer = bytes | bytearray | memoryview
LANDING_BYTES = 16 << 10
"""Of a large frame, what comes with its beginning is copied: at most so much."""
FRAME_BYTES_FIRST = 256 << 10
"""A frame that claims more gets its memory as it comes."""
QUEUED_BYTES_MAX = 256 << 10
FRAME_BYTES_MORE = 128
"""What a waiting frame takes beside its bytes."""
GATHERED_BYTES_MIN = 4 << 10
"""Smaller frames are joined: one buffer costs less to write than two."""
GATHERED_BYTES_MAX = 16 << 10
"""More is written at once."""
TURN_FRAMES_MAX = 1_000
"""Frames that are taken of a peer in one turn of the event loop; uvloop reads a socket up to 32
times in one.
"""
WRITELINES_HOLD_BACK = not (
    (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)
)
"""asyncio's `writelines` calls `pause_writing`; in these versions it does not, and its buffer grows
(CVE-2024-12254).
"""
CLOSE_S = 1.0
"""How long `close` waits for the end of the connection."""


class _Landing(threading.local):
    """Where the event loop of a thread reads into: it reads from one socket at a time."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(LANDING_BYTES))


_landing = _Landing()


class FrameSocket(asyncio.BufferedProtocol):
    """
    One connection.  Make it when the upgrade is done, or about to be answered: it reads from then
    on.

    Args:
        transport: of the connection.
        bytes_max: of a frame that comes.
        room: of a server, for the frames that are not whole on all its connections; None: this is
            the client's end.
    """

    begun_s = 0.0
    """When the frame began that is not whole, by the loop's clock; later by the time that nothing
    was read.
    """
    _paused_s = 0.0
    """When the last pause of reading began."""
    _turn_s = -1.0
    _turn_frames = 0
    """Frames of the turn of the event loop that began at `_turn_s`."""

    def __init__(
        self, transport: asyncio.Transport, *, bytes_max: int, room: IncomingRoom | None = None
    ) -> None:
        self.transport = self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._before = transport.get_protocol()
        """aiohttp's, which has to hear of the end of the connection."""
        self.bytes_max = bytes_max
        """Of a frame that comes; a change counts for those that begin after it."""
        self._rest = b""
        """The beginning of a size."""
        self._frame = bytearray()
        """Of the frame that is not whole; its length is the memory that it has."""
        self._size = 0
        """Bytes that this frame will have; 0: there is none."""
        self._filled = 0
        self._room = room
        self._gathered, self._gathered_bytes = list[Buffer](), 0
        self._leaves = self._gathering = False
        """What is gathered leaves at the end of this callback, or with `flush`."""
        self.on_frame: Callable[[bytearray], bool] | None = None
        """
        Called with a frame where it arrives, while `receive` waits for it; False: `receive` returns
        it.

        It may call every method but `receive`, and must not raise.
        """
        self._frames, self._queued_bytes = deque[bytearray](), 0
        self.reading = True
        self._news: asyncio.Future[None] | None = None
        """`receive` waits for it."""
        self.writable = True
        """True while the socket has taken nearly all that was sent."""
        self._resumed = asyncio.Event()
        """Set while `writable`; it is for who waits."""
        self._resumed.set()
        self.written_bytes = 0
        """All that was given to the transport."""
        self.heard = True
        """True once something came; who watches for silence sets it to False."""
        self.closed = self._ended = False
        """`closed` is True once nothing can be sent."""
        self._takes = True
        """False once what comes is dropped."""
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self.problem = ""
        """Why the connection ends, if the reason was found here."""
        transport.pause_reading()  # uvloop takes another kind of protocol between two readings only
        transport.set_protocol(self)
        transport.resume_reading()

    def when_lost(self, call: Callable[[], object]) -> None:
        """Have `call` called once the connection is gone."""
        self._lost.add_done_callback(lambda _lost: call())

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def get_buffer(self, _sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        if self._size:
            return memoryview(self._frame)[self._filled :]
        rest, view = self._rest, _landing.view
        if not rest:
            return view
        view[: len(rest)] = rest
        return view[len(rest) :]

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self.heard = True
        if self._takes:
            in_turn(self._came, nbytes)

    def _came(self, nbytes: int) -> None:
        if not self._size:
            self._land(_landing.view, len(self._rest) + nbytes if self._rest else nbytes)
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
        """Take the frames in `data[:end]`; the last one may continue in what comes next."""
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
        if frames > TURN_FRAMES_MAX // 16:
            self._count_frames(frames)

    def _note_incoming(self) -> None:
        """Note what has come of the frame that is not whole."""
        room = self._room
        if room is None:
            return
        if not self._size:
            room.free(self)
            return
        late = "a frame whose end is late"
        room.note(self, self._filled, self._loop.time(), lambda: self.refuse(late))
        if not self.reading:
            room.pause(self, self._paused_s)

    def waits_for_end_s(self) -> float:
        """Seconds since the frame began that is not whole, in which the socket was read; 0: there
        is none.
        """
        if not self._size:
            return 0.0
        return (self._loop.time() if self.reading else self._paused_s) - self.begun_s

    def _count_frames(self, frames: int) -> None:
        """Read on in the next turn of the event loop once this one has had enough frames; uvloop
        has one time for a turn.
        """
        now_s = self._loop.time()
        if now_s != self._turn_s:
            self._turn_s, self._turn_frames = now_s, 0
        self._turn_frames += frames
        if self._turn_frames > TURN_FRAMES_MAX and self.reading and self._takes:
            self._pause_reading()
            self._loop.call_soon(self._read_on)

    def _pause_reading(self) -> None:
        self.reading, self._paused_s = False, self._loop.time()
        self._transport.pause_reading()
        if self._room is not None:
            self._room.pause(self, self._paused_s)

    def _read_on(self) -> None:
        """Read again, unless too much waits for `receive`, which then reads on."""
        if not self.reading and self._takes and self._queued_bytes <= QUEUED_BYTES_MAX:
            now_s = self._loop.time()
            self.begun_s += now_s - self._paused_s  # it was not the peer that was late
            if self._room is not None:
                self._room.resume(self, now_s)
            self.reading = True
            self._transport.resume_reading()

    def _hear(self, frame: bytearray) -> None:
        """Give a frame to who hears it where it arrives, or to `receive`."""
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
        The next frame; None: there is no further one.

        Raises:
            FrameError: what came behind the last one is no frame.
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
            ConnectionError: it is closed, or was lost.
        """
        self.write(parts)
        if not self.writable:
            await self.wait_writable()

    async def wait_writable(self) -> None:
        """Wait until it is `writable`.  Raises ConnectionError: it was lost."""
        await self._resumed.wait()
        if self._lost.done():
            raise ConnectionResetError("the connection was lost")

    def write(self, parts: Sequence[Buffer]) -> None:
        """
        Send a frame; small ones of one callback of the event loop share a system call.

        Args:
            parts: one after another; they must not change until they are sent.

        Raises:
            ConnectionError: it is closed.
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
        """Keep small frames from here on until `flush`, in place of the end of the callback."""
        self._gathering = True

    def flush(self) -> None:
        """Write what was kept since `gather`."""
        self._gathering = False
        if self._gathered:
            self._write_gathered()

    def _leave(self) -> None:
        self._leaves = False
        if self._gathered:
            self._write_gathered()

    def _write_gathered(self) -> None:
        """Write what was gathered; a large last part is not joined to the others."""
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
        """See `asyncio.BaseProtocol`."""
        self.writable = False
        self._resumed.clear()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self.writable = True
        self._resumed.set()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    def refuse(self, problem: str) -> None:
        """Take nothing more of the peer: `receive` returns what came before, and then raises
        this.
        """
        if self._takes:
            self.problem = problem
            self._take_no_more()
            if self.reading:
                self._pause_reading()
            self._tell()

    def _take_no_more(self) -> None:
        self._takes = False
        self._rest, self._frame, self._size = b"", bytearray(), 0
        if self._room is not None:
            self._room.free(self)

    async def close(self) -> None:
        """
        End the connection, once what was sent has left, and wait for that for `CLOSE_S` at most.

        A server waits for the client to end it: what a client has not read would be lost if bytes
        came from it after the end.
        """
        self.closed = True
        self._write_gathered()
        self._take_no_more()
        if self._room is None:
            self.end()
        elif not (self.reading or self._ended):
            self.reading = True
            self._transport.resume_reading()
        if not self._lost.done():
            await asyncio.wait([self._lost], timeout=CLOSE_S)
        self.end()

    def end(self) -> None:
        """End the connection; what was written still leaves."""
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
        """See `asyncio.BufferedProtocol`: the transport closes."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self.end()
        if not self._lost.done():
            self._lost.set_result(None)
        self.writable = True
        self._resumed.set()
        cast(asyncio.Protocol, self._before).connection_lost(exc)

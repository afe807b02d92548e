"""A WebSocket that takes over a connection after its handshake, and copies nothing that is large.
I/O: sockets.

    socket ─▶ landing (heads, small frames) ─▶ messages ─▶ receive()
         └──▶ the rest of a large frame, straight into its message

    send(parts) ─▶ one gathered write

Invariants
    Memory for a frame grows with what has come of it, whatever length its head claims.
    While `QUEUED_BYTES_MAX` wait for `receive`, nothing is read; an empty message counts too.
    A server takes masked frames only, and a client none that is masked.
    Of the pings of a peer that does not read, only the last one is answered.
    A peer from which nothing comes for `heartbeat_s` is asked, and lost after half of that again.
    With a `judge` it is asked then only if it owes an answer, else after 8 s, and lost when the
    judge says so. A server waits `MESSAGE_S` for the end of a message that has begun, and all of
    these together have a bound (`incoming`). Pings and small fragments are counted, and frames of
    one turn of the event loop: no peer keeps it from the others.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from ...protocol.clock import at_a_tick
from ...protocol.errors import FrameError
from ..liveness.silence import Silence
from ..threads.turn import at_end, in_turn
from .framing import (
    HEAD_BYTES_MAX,
    SHORT_BYTES,
    BrokenSocketError,
    Buffer,
    CloseCode,
    Head,
    Joiner,
    Opcode,
    decode_head,
    encode_head,
    ordinary_frame,
    short_heads,
    unmask,
)
from .incoming import IncomingRoom

LANDING_BYTES = 16 << 10
"""Of a large frame, what comes with its head is copied: at most so much."""
FRAME_BYTES_FIRST = 256 << 10
"""A frame that claims more gets its memory as it comes."""
QUEUED_BYTES_MAX = 256 << 10
MESSAGE_BYTES = 128
"""What a waiting message takes beside its content."""
GATHERED_BYTES_MIN = 4 << 10
"""Smaller frames are joined: one buffer costs less to write than two."""
GATHERED_BYTES_MAX = 16 << 10
"""More is written at once."""
CONTROL_FRAMES_MAX = 1_000
"""Pings, pongs and small fragments of a peer between two looks whether it is alive."""
FRAGMENT_BYTES_MIN = 1 << 10
"""A smaller part in the midst of a message costs more than it brings; libraries send parts of 4 KiB
and more.
"""
TURN_FRAMES_MAX = 1_000
"""Frames that are taken of a peer in one turn of the event loop; uvloop reads a socket up to 32
times in one.
"""
MESSAGE_S = 60.0
WRITELINES_HOLD_BACK = not (
    (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)
)
"""asyncio's `writelines` calls `pause_writing`; in these versions it does not, and its buffer grows
(CVE-2024-12254).
"""
CLOSE_S = 1.0
"""How long `close` waits for the peer's goodbye."""


class _Landing(threading.local):
    """Where the event loop of a thread reads into: it reads from one socket at a time."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(LANDING_BYTES))


_landing = _Landing()
_HEADS = {masked: short_heads(Opcode.BINARY, masked=masked) for masked in (False, True)}
"""By whether the frame is a client's."""


class DataSocket(asyncio.BufferedProtocol):
    """
    One WebSocket.  Make it when the handshake is done, or about to be answered: it reads from then
    on.

    Args:
        transport: of the connection.
        client: this is the client's end.
        bytes_max: of a message that comes.
        room: of a server, for the messages whose end has not come on all its connections.
    """

    _begun_s = 0.0
    """When the message began whose end has not come, by the loop's clock; later by the time that
    nothing was read.
    """
    _paused_s = 0.0
    """When the last pause of reading began."""
    _turn_s = -1.0
    _turn_frames = 0
    """Frames of the turn of the event loop that began at `_turn_s`."""
    _control_frames = 0

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        client: bool,
        bytes_max: int,
        heartbeat_s: float,
        room: IncomingRoom | None = None,
    ) -> None:
        self.transport = self._transport = transport
        self._client = client
        self._heads = _HEADS[client]
        self._loop = asyncio.get_running_loop()
        self._before = transport.get_protocol()
        """aiohttp's, which has to hear of the end of the connection."""
        self._joiner = Joiner(bytes_max)
        self._rest = b""
        """The beginning of a head."""
        self._head: Head | None = None
        self._frame = bytearray()
        """Of the frame that is being read; its size is the memory that it has."""
        self._filled = 0
        self._incoming = room
        self._gathered, self._gathered_bytes = list[Buffer](), 0
        self._leaves = self._gathering = False
        """What is gathered leaves at the end of this callback, or with `flush`."""
        self.on_message: Callable[[bytearray], bool] | None = None
        """
        Called with a binary message where it arrives, while `receive` waits for it; False:
        `receive` returns it.

        It may call every method but `receive`, and must not raise.
        """
        self._messages, self._queued_bytes = deque[tuple[Opcode, bytearray]](), 0
        self._reading = True
        self._news: asyncio.Future[None] | None = None
        """`receive` waits for it."""
        self.writable = True
        """True while the socket has taken nearly all that was sent."""
        self._resumed = asyncio.Event()
        """Set while `writable`; it is for who waits."""
        self._resumed.set()
        self._last_ping: bytearray | None = None
        """Not answered yet, because the peer does not read."""
        self.written_bytes = 0
        """All that was given to the transport."""
        self.closed = self._ended = False
        """`closed` is True once nothing can be sent: a goodbye was said, or the connection has
        ended.
        """
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self.close_code: int | None = None
        """Once it is closed."""
        self.problem = ""
        """Why it was closed here, if the peer's bytes were the reason."""
        self._heartbeat_s = heartbeat_s
        self._heard, self._asked, self._silent_s = False, False, 0.0
        self.judge: Silence | None = None
        """Decides whether a peer that does not answer pings is lost; None: it is."""
        self._beat = self._check_alive_in(heartbeat_s)
        transport.pause_reading()  # uvloop takes another kind of protocol between two readings only
        transport.set_protocol(self)
        transport.resume_reading()

    def when_lost(self, call: Callable[[], object]) -> None:
        """Have `call` called once the connection is gone."""
        self._lost.add_done_callback(lambda _lost: call())

    @property
    def bytes_max(self) -> int:
        """Of a message that comes; a change counts for frames whose head comes after it."""
        return self._joiner.bytes_max

    @bytes_max.setter
    def bytes_max(self, bytes_max: int) -> None:
        self._joiner.bytes_max = bytes_max

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def get_buffer(self, _sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        if self._head is not None:
            return memoryview(self._frame)[self._filled :]
        rest, view = self._rest, _landing.view
        if not rest:
            return view
        view[: len(rest)] = rest
        return view[len(rest) :]

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._heard = True
        if not self._ended:
            in_turn(self._came, nbytes)

    def _came(self, nbytes: int) -> None:
        try:
            if self._head is not None:
                self._filled += nbytes
                self._grow_or_take(self._head)
            else:
                self._land(_landing.view, len(self._rest) + nbytes if self._rest else nbytes)
        except BrokenSocketError as error:
            self._break(error)

    def _grow_or_take(self, head: Head) -> None:
        size = len(self._frame)
        if self._filled == head.length:
            frame, self._frame, self._head = self._frame, bytearray(), None
            self._take(head, frame)
            if self._incoming is not None:
                self._note_incoming(self._incoming)
            return
        if self._filled == size:
            larger = bytearray(min(2 * size, head.length))
            larger[:size] = self._frame
            self._frame = larger  # the old one cannot be extended while the loop has a view of it
        if self._incoming is not None:
            self._note_incoming(self._incoming)

    def _note_incoming(self, room: IncomingRoom) -> None:
        """Note what has come of the message whose end has not come."""
        size = self._joiner.begun_bytes + (self._filled if self._head is not None else 0)
        if size and not self._ended:
            room.note(self, size, self._loop.time(), self._give_up)
            if not self._reading:
                room.pause(self, self._paused_s)
        else:
            room.free(self)

    def _give_up(self) -> None:
        self._break(BrokenSocketError("a message whose end is late", CloseCode.TRY_AGAIN_LATER))

    def _land(self, data: memoryview, end: int) -> None:
        """Take the frames in `data[:end]`; the last one may go on in what comes next."""
        start = frames = 0
        self._rest = b""
        joiner, masked, on_message = self._joiner, not self._client, self.on_message
        while start < end and not self._ended:
            frames += 1
            body, stop = ordinary_frame(data, start, end, masked=masked)
            if stop and joiner.opcode is None and stop - body <= joiner.bytes_max:
                message, start = bytearray(data[body:stop]), stop
                if (
                    on_message is None
                    or self._news is None
                    or self._messages
                    or not on_message(message)
                ):
                    self._keep(Opcode.BINARY, message)
                continue
            head = decode_head(data[start : min(start + HEAD_BYTES_MAX, end)])
            if head is None:
                self._rest = bytes(data[start:end])
                break
            if bool(head.key) is self._client:
                raise BrokenSocketError("a frame whose mask is that of the other end")
            joiner.check(head)
            if joiner.opcode is None:
                self._begun_s = self._loop.time()
            start += head.head_bytes
            stop = min(end, start + head.length)
            if stop - start == head.length:
                self._take(head, bytearray(data[start:stop]))
            else:
                self._filled = stop - start
                size = max(min(head.length, FRAME_BYTES_FIRST), self._filled)
                frame = bytearray(size)
                frame[: self._filled] = data[start:stop]
                self._head, self._frame = head, frame
            if self._incoming is not None:
                self._note_incoming(self._incoming)
            start = stop
        if frames > TURN_FRAMES_MAX // 16:
            self._count_frames(frames)

    def _count_frames(self, frames: int) -> None:
        """Read on in the next turn of the event loop once this one has had enough frames; uvloop
        has one time for a turn.
        """
        now_s = self._loop.time()
        if now_s != self._turn_s:
            self._turn_s, self._turn_frames = now_s, 0
        self._turn_frames += frames
        if self._turn_frames > TURN_FRAMES_MAX and self._reading and not self._ended:
            self._pause_reading()
            self._loop.call_soon(self._read_on)

    def _pause_reading(self) -> None:
        self._reading, self._paused_s = False, self._loop.time()
        self._transport.pause_reading()
        if self._incoming is not None:
            self._incoming.pause(self, self._paused_s)

    def _read_on(self) -> None:
        """Read again, unless too much waits for `receive`, which then reads on."""
        if not self._reading and not self._ended and self._queued_bytes <= QUEUED_BYTES_MAX:
            now_s = self._loop.time()
            self._begun_s += now_s - self._paused_s  # it was not the peer that was late
            if self._incoming is not None:
                self._incoming.resume(self, now_s)
            self._reading = True
            self._transport.resume_reading()

    def _take(self, head: Head, payload: bytearray) -> None:
        unmask(payload, head.key)
        small = (
            head.opcode is Opcode.CONTINUATION
            and not head.final
            and len(payload) < FRAGMENT_BYTES_MIN
        )
        if small or head.opcode > Opcode.CLOSE:
            self._control_frames += 1
            if self._control_frames > CONTROL_FRAMES_MAX:
                what = "small fragments" if small else "pings"
                raise BrokenSocketError(f"too many {what}", CloseCode.POLICY_VIOLATION)
        if head.opcode is Opcode.PING:
            self._last_ping = payload
            if self.writable:
                self._answer_ping()
        elif head.opcode is Opcode.CLOSE:
            self._peer_says_goodbye(payload)
        elif head.opcode is not Opcode.PONG:
            message = self._joiner.add(head, payload)
            if message is not None:
                self._hear(*message)

    def _hear(self, opcode: Opcode, message: bytearray) -> None:
        """Give a message to who hears it where it arrives, or to `receive`."""
        on_message = self.on_message
        waits = self._news is not None and not self._messages
        if (
            on_message is None
            or opcode is not Opcode.BINARY
            or not waits
            or not on_message(message)
        ):
            self._keep(opcode, message)

    def _keep(self, opcode: Opcode, message: bytearray) -> None:
        """Keep a message for `receive`."""
        self._messages.append((opcode, message))
        self._queued_bytes += len(message) + MESSAGE_BYTES
        self._tell()
        if self._queued_bytes > QUEUED_BYTES_MAX and self._reading:
            self._pause_reading()

    def _answer_ping(self) -> None:
        """Once for all pings that have come, as RFC 6455, 5.5.3, lets."""
        ping, self._last_ping = self._last_ping, None
        if ping is not None and not self.closed:
            self.write((ping,), Opcode.PONG)

    def _tell(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    async def receive(self) -> bytearray | None:
        """
        The next message; None: there is no further one.

        Raises:
            FrameError: it is text.
        """
        while not self._messages:
            if self._ended:
                return None
            self._news = self._loop.create_future()
            await self._news
        opcode, message = self._messages.popleft()
        self._queued_bytes -= len(message) + MESSAGE_BYTES
        if not self._reading and self._queued_bytes <= QUEUED_BYTES_MAX // 2:
            self._read_on()
        if opcode is not Opcode.BINARY:
            raise FrameError("a text frame on the data plane")
        return message

    # ── writing ───────────────────────────────────────────────────────────────────────────────────
    async def send(self, parts: Sequence[Buffer]) -> None:
        """
        Send a message, and wait until the socket has taken nearly all of it.

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
            raise ConnectionResetError("the WebSocket was lost")

    def write(self, parts: Sequence[Buffer], opcode: Opcode = Opcode.BINARY) -> None:
        """
        Send a message, or a control frame; small ones of one callback of the event loop share a
        system call.

        Args:
            parts: one after another; they must not change until they are sent.

        Raises:
            ConnectionError: it is closed.
        """
        if self.closed:
            raise ConnectionResetError("the WebSocket is closed")
        size = sum(map(len, parts))
        if size < SHORT_BYTES and opcode is Opcode.BINARY:
            head = self._heads[size]
        else:
            head = encode_head(opcode, size, masked=self._client)
        self._gathered += (head, *parts)
        self._gathered_bytes += size
        if self._gathered_bytes >= GATHERED_BYTES_MAX:
            self._write_gathered()
        elif not (self._leaves or self._gathering):
            self._leaves = True
            at_end(self._leave, self._loop)

    def gather(self) -> None:
        """Keep small messages from here on until `flush`, in place of the end of the callback."""
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
        self._answer_ping()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    async def close(self, code: CloseCode = CloseCode.OK, message: str = "") -> None:
        """Say goodbye, and wait `CLOSE_S` for the peer's; then the connection is closed, what was
        sent still leaves.
        """
        self._say_goodbye(code, message)
        if not self._ended:
            if not self._reading:
                self._reading = True
                self._transport.resume_reading()
            await asyncio.wait([self._lost], timeout=CLOSE_S)
        self._end(CloseCode.ABNORMAL)

    def _say_goodbye(self, code: int, message: str = "") -> None:
        if not self.closed:
            payload = code.to_bytes(2, "big") + message.encode()[:120]
            self.write((payload,), Opcode.CLOSE)
            self.closed = True

    def _peer_says_goodbye(self, payload: bytearray) -> None:
        code = int.from_bytes(payload[:2], "big") if payload else CloseCode.OK
        self._say_goodbye(code)
        self._end(code)

    def _break(self, error: BrokenSocketError) -> None:
        self.problem = error.message
        self._say_goodbye(error.close_code, error.message)
        self._end(error.close_code)

    def _end(self, code: int) -> None:
        """Nothing comes any more; what was written still leaves."""
        if not self._ended:
            self._ended = self.closed = True
            self.close_code = code
            self._beat.cancel()
            self._head, self._frame = None, bytearray()
            if self._incoming is not None:
                self._incoming.free(self)
            self._write_gathered()
            self._transport.close()
            self._tell()

    @property
    def silent(self) -> bool:
        """True if nothing has come since the last ping."""
        return self._asked and not self._heard and self._reading

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        if not self.closed:
            self.write((), Opcode.PING)

    def give_up(self, why: str) -> None:
        """End the connection at once, without a goodbye."""
        if not self._ended:
            self.problem = why
            self._end(CloseCode.ABNORMAL)
            self._transport.abort()

    def _check_alive(self) -> None:
        if self._is_late():
            self._give_up()
            return
        after_s, judge = self._heartbeat_s, self.judge
        if self._heard or not self._reading:
            if self._asked and judge is not None:
                judge.heard()
            self._asked, self._silent_s = False, 0.0
        elif self._asked:
            after_s /= 2
            self._silent_s += after_s
            if judge is None or not judge.goes_on(self._silent_s):
                self.give_up(f"nothing came for {self._silent_s:g} s")
                return
        else:
            self._silent_s += after_s
            if judge is None or judge.asks(self._silent_s):
                self._asked = True
                after_s /= 2
                self.ping()
        self._heard = False
        self._control_frames = 0
        self._beat = self._check_alive_in(after_s)

    def _is_late(self) -> bool:
        """True if a client's message that has begun takes too long to end."""
        if self._client or (self._head is None and self._joiner.opcode is None):
            return False
        until_s = self._loop.time() if self._reading else self._paused_s
        return until_s - self._begun_s > MESSAGE_S

    def _check_alive_in(self, after_s: float) -> asyncio.TimerHandle:
        return self._loop.call_at(at_a_tick(after_s, self._loop.time()), self._check_alive)

    def eof_received(self) -> bool:
        """See `asyncio.BufferedProtocol`: the transport closes."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._end(CloseCode.ABNORMAL)
        if not self._lost.done():
            self._lost.set_result(None)
        self.writable = True
        self._resumed.set()
        cast(asyncio.Protocol, self._before).connection_lost(exc)

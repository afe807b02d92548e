"""Gathers what is written to a socket in one turn of the event loop, so that small frames share a system call.

Transports of asyncio and of uvloop write each piece at once.  A frame by itself costs both ends a system call, and the reader a
wake-up, many times the work of the frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

GATHERED_BYTES_MAX = 16 << 10
"""What is larger is written at once, behind what was gathered: copying it would cost more than a system call."""
READ_BYTES = 64 << 10
"""asyncio reads into a new buffer of 256 KiB each time, for which the system maps memory and takes it back: three more
system calls for each read.  A buffer of this size comes from the heap."""
_CONTROL = 8
"""The bit of the first byte of a WebSocket frame that says that it is a ping, a pong or a close."""


class GatheredTransport:
    """The part of a transport that a WebSocket writer uses; frames keep their order."""

    def __init__(
        self, transport: asyncio.Transport, call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._transport = transport
        self._call_soon = call_soon
        self._pieces: list[bytes | bytearray] = []
        self._size = 0

    def write(self, data: bytes | bytearray) -> None:
        """Write a frame at the end of this turn; at once if it is large or ends the connection."""
        pieces = self._pieces
        pieces.append(data)
        self._size += len(data)
        if self._size > GATHERED_BYTES_MAX or (data and data[0] & _CONTROL):
            self.flush()
        elif len(pieces) == 1:
            self._call_soon(self.flush)

    def flush(self) -> None:
        """Write what was gathered."""
        pieces = self._pieces
        if not pieces:
            return
        self._pieces, self._size = [], 0
        last = pieces.pop() if len(pieces[-1]) > GATHERED_BYTES_MAX else b""
        if pieces:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if last:
            self._transport.write(last)

    def is_closing(self) -> bool:
        """As of the transport."""
        return self._transport.is_closing()


class _NeverPaused:
    """What a WebSocket writer asks whether it has to wait until the socket takes what was written."""

    _paused = False


class GatheringSocket(aiohttp.ClientWebSocketResponse):
    """A WebSocket whose frames of one turn are written together."""

    def __init__(self, reader: Any, writer: Any, *args: Any, **named: Any) -> None:
        super().__init__(reader, writer, *args, **named)
        transport = writer.transport
        if getattr(transport, "max_size", 0) > READ_BYTES:
            transport.max_size = READ_BYTES
        writer.transport = GatheredTransport(transport, asyncio.get_running_loop().call_soon)
        writer.protocol = _NeverPaused()
        self._send_frame = writer.send_frame

    def write(self, frame: bytes) -> None:
        """
        Write a binary frame.

        It does not wait until the socket takes the frame: who sends a request waits for its answer.

        Raises:
            ClientConnectionResetError: the connection is closing.
        """
        sending = self._send_frame(frame, aiohttp.WSMsgType.BINARY)
        try:
            sending.send(None)
        except StopIteration:
            return
        raise AssertionError("a writer that is never paused has waited")


class GatheringResponse(web.WebSocketResponse):
    """The server's end of a WebSocket; as `GatheringSocket`, but for its waits until the socket takes large answers."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        """See aiohttp."""
        prepared = await super().prepare(request)
        writer: Any = self._writer
        if writer is not None and not isinstance(writer.transport, GatheredTransport):
            call_soon = asyncio.get_running_loop().call_soon
            writer.transport = GatheredTransport(writer.transport, call_soon)
        return prepared

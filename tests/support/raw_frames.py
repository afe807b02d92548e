"""A client of the data plane whose frames a test writes and reads itself."""

from __future__ import annotations

import asyncio
import ssl as tls

from keylane.protocol.endpoints import DATA_PATH
from keylane.protocol.frames import Answer, Hello, Welcome, decode_answer, encode_frame
from keylane.protocol.membership.versions import VERSION

UPGRADE = "Connection: Upgrade\r\nUpgrade: keylane/1\r\n"


def sized(body: bytes) -> bytes:
    """Bytes in a frame, whatever they are."""
    return len(body).to_bytes(4, "little") + body


class UpgradeRefusedError(Exception):
    """The server's answer, whole."""

    @property
    def status(self) -> int:
        return int(str(self).split()[1])


def upgrade_request(host: str, headers: str = UPGRADE) -> bytes:
    """The request that opens a connection, with these lines of headers."""
    return f"GET {DATA_PATH} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode()


class _Ending(asyncio.StreamReaderProtocol):
    """Ends its connection when the server does."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.Transport) -> None:
        self.reader = reader
        self.transport = transport

    async def send(self, data: bytes) -> None:
        """Send bytes, whatever they are, and wait until nearly all of them have left."""
        self.transport.write(data)
        while self.transport.get_write_buffer_size() > 64 << 10:
            await asyncio.sleep(0.001)

    async def receive(self, timeout: float = 20) -> bytes | None:
        """The next frame; None: the server has ended the connection."""
        async with asyncio.timeout(timeout):
            try:
                size = await self.reader.readexactly(4)
                return size + await self.reader.readexactly(int.from_bytes(size, "little"))
            except (asyncio.IncompleteReadError, ConnectionError):
                return None

    async def answer(self, timeout: float = 20) -> tuple[int, Answer, memoryview]:
        """The next frame, decoded."""
        data = await self.receive(timeout)
        assert data is not None, "the server has ended the connection"
        return decode_answer(data)

    async def greet(self) -> None:
        """Tell the version, and take the answer."""
        await self.send(encode_frame(1, Hello(VERSION)))
        _, answer, _ = await self.answer()
        assert isinstance(answer, Welcome)

    def abort(self) -> None:
        """Leave at once."""
        self.transport.abort()


async def connect(
    address: str,
    *,
    headers: str = "",
    ssl: tls.SSLContext | None = None,
    read_bytes_max: int = 1 << 24,
) -> RawClient:
    """
    A connection to the broker at `host:port`.

    Args:
        headers: more lines of the request.
        read_bytes_max: what is read before it is received.

    Raises:
        UpgradeRefusedError
    """
    host, _, port = address.rpartition(":")
    reader = asyncio.StreamReader(limit=read_bytes_max)
    transport, _ = await asyncio.get_running_loop().create_connection(
        lambda: _Ending(reader), host.strip("[]"), int(port), ssl=ssl
    )
    own_host = "" if "Host:" in headers else f"Host: {address}\r\n"
    request = f"GET {DATA_PATH} HTTP/1.1\r\n{own_host}{UPGRADE}{headers}\r\n"
    transport.write(request.encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 101"):
        transport.abort()
        raise UpgradeRefusedError(head.decode())
    return RawClient(reader, transport)

"""The opening handshake of a WebSocket at the client, over aiohttp, until the connection is a `DataSocket`'s.

Source: RFC 6455, 4.1.  The server's end is in `accepting`, because a client that imports aiohttp's server starts later.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import secrets
import socket as socket_module
import ssl
from socket import IPPROTO_TCP, SOL_SOCKET

import aiohttp

from .socket import DataSocket

KEEPALIVE = (
    (SOL_SOCKET, "SO_KEEPALIVE", 1),
    (IPPROTO_TCP, "TCP_KEEPIDLE", 4),
    (IPPROTO_TCP, "TCP_KEEPINTVL", 2),
    (IPPROTO_TCP, "TCP_KEEPCNT", 3),
)
"""A path that is gone is found within 10 s by the kernel, though nothing is sent: a pull may wait for longer."""
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
SOCKET_VERSION = "13"


def accept_text(key: bytes) -> str:
    """The server's answer to the client's key."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest()).decode()


async def open_socket(
    session: aiohttp.ClientSession,
    url: str,
    *,
    tls: ssl.SSLContext | bool = True,
    bytes_max: int,
    heartbeat_s: float,
) -> DataSocket:
    """
    Connect to a server.

    Args:
        tls: `ssl` as of a request of aiohttp.

    Raises:
        aiohttp.ClientError, OSError, ValueError: as of a request; or the server does not open a WebSocket.
    """
    key = base64.b64encode(secrets.token_bytes(16))
    response = await session.get(
        url,
        ssl=tls,
        headers={
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": SOCKET_VERSION,
            "Sec-WebSocket-Key": key.decode(),
        },
        allow_redirects=False,
        read_until_eof=False,
        timeout=aiohttp.ClientTimeout(total=None),
    )
    connection = response.connection
    opened = (
        response.status == 101
        and response.headers.get("Upgrade", "").lower() == "websocket"
        and response.headers.get("Sec-WebSocket-Accept") == accept_text(key)
    )
    if not opened or connection is None or connection.transport is None:
        response.close()
        raise aiohttp.WSServerHandshakeError(
            response.request_info,
            response.history,
            status=response.status,
            message="the server opens no WebSocket",
            headers=response.headers,
        )
    _keep_alive(connection.transport)
    socket = DataSocket(
        connection.transport, client=True, bytes_max=bytes_max, heartbeat_s=heartbeat_s
    )
    socket.when_lost(response.close)
    return socket


def _keep_alive(transport: asyncio.Transport) -> None:
    socket = transport.get_extra_info("socket")
    for level, name, value in KEEPALIVE:
        # Not every system names all of them, or can set those that it names.
        with contextlib.suppress(AttributeError, OSError):
            socket.setsockopt(level, getattr(socket_module, name), value)

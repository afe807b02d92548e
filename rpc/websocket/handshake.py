"""The opening handshake of a WebSocket at the client, over aiohttp, until the connection is a
`DataSocket`'s.

Source: RFC 6455, 4.1.  The server's end is in `accepting`, because a client that imports aiohttp's
server starts later.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import ssl

import aiohttp

from ..liveness.keepalive import keep_alive
from .socket import DataSocket

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
        aiohttp.ClientError, OSError, ValueError: as of a request; or the server does not open a
            WebSocket.
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
    if (kernel := connection.transport.get_extra_info("socket")) is not None:
        keep_alive(kernel)
    socket = DataSocket(
        connection.transport, client=True, bytes_max=bytes_max, heartbeat_s=heartbeat_s
    )
    socket.when_lost(response.close)
    return socket

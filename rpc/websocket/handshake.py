"""The opening handshake of a WebSocket over aiohttp, at both ends, until the connection is a `DataSocket`'s.

Source: RFC 6455, 4.1 and 4.2.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import secrets
import socket as socket_module
import ssl
from socket import IPPROTO_TCP, SOL_SOCKET

import aiohttp
from aiohttp import web

from .socket import DataSocket

KEEPALIVE = (
    (SOL_SOCKET, "SO_KEEPALIVE", 1),
    (IPPROTO_TCP, "TCP_KEEPIDLE", 4),
    (IPPROTO_TCP, "TCP_KEEPINTVL", 2),
    (IPPROTO_TCP, "TCP_KEEPCNT", 3),
)
"""A path that is gone is found within 10 s by the kernel, though nothing is sent: a pull may wait for longer."""
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_VERSION = "13"


def _accept(key: bytes) -> str:
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
            "Sec-WebSocket-Version": _VERSION,
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
        and response.headers.get("Sec-WebSocket-Accept") == _accept(key)
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


async def accept_socket(
    request: web.Request, *, bytes_max: int, heartbeat_s: float
) -> tuple[web.StreamResponse, DataSocket]:
    """
    Answer a client; the response is for aiohttp, to be returned when the socket is closed.

    Raises:
        web.HTTPBadRequest: this is no handshake.
        ConnectionResetError: the client has left.
    """
    key = request.headers.get("Sec-WebSocket-Key", "")
    try:
        known = len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        known = False
    if (
        request.headers.get("Upgrade", "").strip().lower() != "websocket"
        or "upgrade" not in request.headers.get("Connection", "").lower()
        or request.headers.get("Sec-WebSocket-Version") != _VERSION
        or not known
    ):
        raise web.HTTPBadRequest(text="no WebSocket handshake of version 13")
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has left")
    response = web.StreamResponse(
        status=101,
        headers={
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Accept": _accept(key.encode()),
        },
    )
    response.force_close()
    # Before the answer, so that the client's first frame is read here.
    socket = DataSocket(
        transport,
        client=False,
        bytes_max=bytes_max,
        heartbeat_s=heartbeat_s,
    )
    await response.prepare(request)
    return response, socket

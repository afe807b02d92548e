"""The opening handshake of a WebSocket at the server, over aiohttp, until the connection is a
`DataSocket`'s.

Source: RFC 6455, 4.2.
"""

from __future__ import annotations

import base64
import binascii

from aiohttp import web

from .handshake import SOCKET_VERSION, accept_text
from .incoming import IncomingRoom
from .socket import DataSocket


async def accept_socket(
    request: web.Request,
    *,
    bytes_max: int,
    heartbeat_s: float,
    room: IncomingRoom | None = None,
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
        or request.headers.get("Sec-WebSocket-Version") != SOCKET_VERSION
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
            "Sec-WebSocket-Accept": accept_text(key.encode()),
        },
    )
    response.force_close()
    # Before the answer, so that the client's first frame is read here.
    socket = DataSocket(
        transport,
        client=False,
        bytes_max=bytes_max,
        heartbeat_s=heartbeat_s,
        room=room,
    )
    await response.prepare(request)
    return response, socket

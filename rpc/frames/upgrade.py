"""The HTTP upgrade that opens a connection of the data plane, until a `FrameSocket` takes it over.

    GET /v1/data                        HTTP/1.1 101 Switching Protocols
    Connection: Upgrade          ─▶     Connection: Upgrade               ─▶  frames, both ways
    Upgrade: keylane/1                  Upgrade: keylane/1

The server part imports aiohttp's server only when needed, because a client with that import starts
more slowly.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import aiohttp

from ...protocol.errors import InvalidRequestError
from ..liveness.keepalive import keep_alive
from .frame_socket import FrameSocket
from .incoming import IncomingRoom

if TYPE_CHECKING:
    from aiohttp import web

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

"""The HTTP upgrade that opens a data-plane connection. Performs socket I/O.

    GET /v1/data                        HTTP/1.1 101 Switching Protocols
    Connection: Upgrade          ─▶     Connection: Upgrade               ─▶  frames, both ways
    Upgrade: keylane/1                  Upgrade: keylane/1

The server part imports aiohttp's server only when called, because the import would slow down the
start of clients.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import aiohttp

from ...protocol.errors import InvalidRequestError
from ..liveness.silence import keep_alive
from .frame_socket import FrameSocket
from .incoming import IncomingBudget

if TYPE_CHECKING:
    from aiohttp import web

UPGRADE = "keylane/1"
"""The name and version of the frame protocol."""
UPGRADE_HEADERS = {"Connection": "Upgrade", "Upgrade": UPGRADE}
_HINT = (
    "This path is for keylane clients only. A proxy in front of the server must forward the "
    "headers Connection and Upgrade, and the status 101."
)


async def open_socket(
    session: aiohttp.ClientSession,
    url: str,
    *,
    tls: ssl.SSLContext | bool = True,
    bytes_max: int,
) -> FrameSocket:
    """
    Connect to a server's data plane.

    Args:
        bytes_max: the largest frame that is accepted, in bytes.
        tls: the `ssl` argument of an aiohttp request.

    Raises:
        aiohttp.ClientError, OSError, ValueError: the request failed, or the server does not use
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
    is_upgraded = response.status == 101 and response.headers.get("Upgrade") == UPGRADE
    if not is_upgraded or connection is None or connection.transport is None:
        response.close()
        raise aiohttp.ClientResponseError(
            response.request_info,
            response.history,
            status=response.status,
            message=f"the server does not speak {UPGRADE}",
            headers=response.headers,
        )
    if (tcp_socket := connection.transport.get_extra_info("socket")) is not None:
        keep_alive(tcp_socket)
    socket = FrameSocket(connection.transport, bytes_max=bytes_max)
    socket.add_lost_callback(response.close)
    return socket


async def accept_socket(
    request: web.Request, *, bytes_max: int, budget: IncomingBudget
) -> tuple[web.StreamResponse, FrameSocket]:
    """
    Accept a client's upgrade request.

    Returns:
        The response, which the caller must return to aiohttp when the socket is closed, and the
        socket.

    Raises:
        InvalidRequestError: the client uses another protocol.
        ConnectionResetError: the client has disconnected.
    """
    from aiohttp import web

    protocol = request.headers.get("Upgrade", "")
    if protocol != UPGRADE or "upgrade" not in request.headers.get("Connection", "").lower():
        problem = f"not {protocol[:80]!r}" if protocol else "and has none"
        error = InvalidRequestError(
            f"{request.path} needs the header Upgrade: {UPGRADE}, {problem}"
        )
        error.hint = _HINT
        raise error
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has left")
    response = web.StreamResponse(status=101, headers=UPGRADE_HEADERS)
    response.force_close()
    # Created before the answer is sent, so that it can read the client's first frame.
    socket = FrameSocket(transport, bytes_max=bytes_max, budget=budget)
    await response.prepare(request)
    return response, socket

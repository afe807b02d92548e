"""The real network: aiohttp sessions for control calls and WebSockets.

An address is `host:port`.  Pools, redirects and proxies are aiohttp's; none of them is used on the data plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import aiohttp
import msgspec

from ..protocol.control import ErrorBody, encode_json
from ..protocol.endpoints import DATA_PATH
from ..protocol.errors import (
    ForeignServerError,
    MessageTooLargeError,
    NotSentError,
    OutcomeUnknownError,
)
from ..protocol.limits import CONTROL_BYTES_MAX, FRAME_BYTES_MAX
from .channel import WebSocketChannel
from .reasons import reason

T = TypeVar("T")
HEARTBEAT_SECONDS = 15.0
"""The interval of WebSocket pings, which find a peer that is gone without having closed."""
CONNECT_SECONDS = 3.0
"""A running machine accepts a connection within this time, even if the first packet is lost."""
_NO_CONNECTION = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.InvalidURL,
    UnicodeError,
)


class HttpNetwork:
    """See `network.Network` for the contract.  Make it inside a running event loop."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=False), trust_env=False
        )

    async def open_channel(self, address: str, *, timeout_ms: int) -> WebSocketChannel:
        """A channel to the broker at `address`.  Raises NotSentError."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                socket = await self._session.ws_connect(
                    f"http://{address}{DATA_PATH}",
                    max_msg_size=FRAME_BYTES_MAX,
                    compress=0,
                    heartbeat=HEARTBEAT_SECONDS,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise NotSentError(
                f"cannot reach the broker at {address}: {reason(error)}",
                address=address,
            ) from error
        return WebSocketChannel(socket, address)

    async def control(
        self,
        method: str,
        address: str,
        path: str,
        answer: type[T],
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        timeout_ms: int,
    ) -> T:
        """See `network.Network.control`; a body over the limit is a MessageTooLargeError."""
        packed = b"" if body is None else encode_json(body)
        if len(packed) > CONTROL_BYTES_MAX:
            raise MessageTooLargeError(
                f"{method} {path}: a body of {len(packed)} bytes, at most {CONTROL_BYTES_MAX}",
                size_bytes=len(packed),
                limit_bytes=CONTROL_BYTES_MAX,
            )
        try:
            async with self._session.request(
                method,
                f"http://{address}{path}",
                data=packed or None,
                params=query,
                headers={"content-type": "application/json"},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=timeout_ms / 1000, sock_connect=CONNECT_SECONDS
                ),
            ) as response:
                data = await response.read()
                status = response.status
        except _NO_CONNECTION as error:
            raise NotSentError(
                f"cannot reach {address}: {reason(error)}", address=address
            ) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise OutcomeUnknownError(
                f"no answer from {address} to {method} {path}: {reason(error)}"
            ) from error
        try:
            if status == 200:
                return msgspec.json.decode(data, type=answer)
            problem = msgspec.json.decode(data, type=ErrorBody)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ForeignServerError(
                f"{address} answered {method} {path} with status {status}, and not as a keylane server: {error}",
                address=address,
            ) from error
        raise problem.error()

    async def close(self) -> None:
        """Close the session, and with it every connection."""
        await self._session.close()

"""The real network: aiohttp sessions for control calls and WebSockets.

An address is `host:port`; with a certificate authority every connection uses TLS.  Pools, redirects and proxies are aiohttp's; none of them is used on the data plane.
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
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.limits import CONTROL_BYTES_MAX, FRAME_BYTES_MAX
from .channel import WebSocketChannel
from .reasons import reason
from .tls.contexts import client_context, use_as_client
from .tls.handshakes import tls_problem, why_ended
from .tls.settings import tls_of_environment

T = TypeVar("T")
HEARTBEAT_SECONDS = 15.0
"""The interval of WebSocket pings, which find a peer that is gone without having closed."""
CONNECT_SECONDS = 3.0
"""A running machine accepts a connection within this time, even if the first packet is lost."""
TLS_END_SECONDS = 0.02
"""TLS connections end some turns of the event loop after they are closed, which aiohttp does not wait for."""
_NO_CONNECTION = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.InvalidURL,
    UnicodeError,
)


class HttpNetwork:
    """
    See `network.Network` for the contract.  Make it inside a running event loop.

    Args:
        tls: None: without TLS.

    Raises:
        ConfigError: a file of `tls` cannot be used.
    """

    def __init__(self, tls: TlsSettings | None = None) -> None:
        self._scheme = "http" if tls is None else "https"
        self._context = None if tls is None else client_context(tls)
        connector = aiohttp.TCPConnector(
            limit=0, force_close=False, ssl=True if self._context is None else self._context
        )
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        self._answered: set[str] = set()
        """Addresses that have answered: TLS does not keep them from it."""

    async def open_channel(self, address: str, *, timeout_ms: int) -> WebSocketChannel:
        """A channel to the broker at `address`.  Raises NotSentError."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                socket = await self._session.ws_connect(
                    f"{self._scheme}://{address}{DATA_PATH}",
                    max_msg_size=FRAME_BYTES_MAX,
                    compress=0,
                    heartbeat=HEARTBEAT_SECONDS,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if (problem := await self._tls_problem(address, error)) is not None:
                raise problem from error
            raise NotSentError(
                f"cannot reach the broker at {address}: {reason(error)}",
                address=address,
            ) from error
        self._answered.add(address)
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
                f"{self._scheme}://{address}{path}",
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
                self._answered.add(address)
        except _NO_CONNECTION as error:
            raise tls_problem(address, error) or NotSentError(
                f"cannot reach {address}: {reason(error)}", address=address
            ) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if (problem := await self._tls_problem(address, error)) is not None:
                raise problem from error
            raise OutcomeUnknownError(
                f"no answer from {address} to {method} {path}: {reason(error)}"
            ) from error
        try:
            if status == 200:
                return msgspec.json.decode(data, type=answer)
            refusal = msgspec.json.decode(data, type=ErrorBody)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ForeignServerError(
                f"{address} answered {method} {path} with status {status}, and not as a keylane server: {error}",
                address=address,
            ) from error
        raise refusal.error()

    async def text(self, address: str, path: str, *, timeout_ms: int) -> tuple[str, str]:
        """
        GET a text that is no JSON, as the figures of a server.

        Returns:
            The text, and the answer's Date header: whole seconds of the server's clock.

        Raises:
            NotSentError, OutcomeUnknownError, ForeignServerError: as `control`; the status was not 200.
        """
        limits = aiohttp.ClientTimeout(total=timeout_ms / 1000, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.get(
                f"{self._scheme}://{address}{path}", allow_redirects=False, timeout=limits
            ) as response:
                text = await response.text()
                status, date = response.status, response.headers.get("Date", "")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            problem = await self._tls_problem(address, error)
            raise problem or NotSentError(
                f"cannot reach {address}: {reason(error)}", address=address
            ) from error
        if status != 200:
            raise ForeignServerError(
                f"{address} answered GET {path} with status {status}", address=address
            )
        self._answered.add(address)
        return text, date

    def renew(self, tls: TlsSettings) -> None:
        """Read the files again, for the connections from now on.  Raises ConfigError; the old ones stay in use then."""
        if self._context is not None:
            client_context(tls)  # what cannot be used must not be loaded half
            use_as_client(self._context, tls)

    async def _tls_problem(self, address: str, error: Exception) -> NotSentError | None:
        """What TLS has to do with a failed connection, None if nothing."""
        problem = tls_problem(address, error)
        if problem is None and address not in self._answered:
            problem = await why_ended(address, error, self._context)
        return problem

    async def close(self) -> None:
        """Close the session, and with it every connection."""
        await self._session.close()
        if self._context is not None:
            await asyncio.sleep(TLS_END_SECONDS)


def client_network(tls: TlsSettings | None = None) -> HttpNetwork:
    """
    The network of a client: with the TLS that is given, else with that of the environment, KEYLANE_TLS_CA.

    Raises:
        ConfigError: a file cannot be used.
    """
    return HttpNetwork(tls or tls_of_environment())

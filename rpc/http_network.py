"""The real network: aiohttp sessions for control calls and WebSockets.

An address is `host:port`.  A network with an identity shows it to servers (`access.wallet`).  Pools, redirects and proxies are aiohttp's; none of them is used on the data plane.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

import aiohttp
import msgspec

from ..protocol.control import ErrorBody, encode_json
from ..protocol.endpoints import DATA_PATH
from ..protocol.errors import (
    CapabilityEndedError,
    ForeignServerError,
    KeylaneError,
    MessageTooLargeError,
    NotSentError,
    OutcomeUnknownError,
)
from ..protocol.frames import Authenticate, Authenticated, Challenge, Challenged
from ..protocol.http.access import CAPABILITY, AskCapability, Capabilities
from ..protocol.limits import CONTROL_BYTES_MAX, FRAME_BYTES_MAX
from .access.credentials import Credentials, ShownCapability
from .access.token_file import TokenSource, token_source
from .channel import WebSocketChannel
from .reasons import reason

T = TypeVar("T")
HEARTBEAT_SECONDS = 15.0
"""The interval of WebSocket pings, which find a peer that is gone without having closed."""
CONNECT_SECONDS = 3.0
"""A running machine accepts a connection within this time, even if the first packet is lost."""
CAPABILITY_TIMEOUT_MS = 3_000
RENEW_AGAIN_S = 1.0
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
        token: of the client; None: the one that the environment names, if it does.
        identity: what a server shows in place of that.

    Raises:
        TokenInvalidError
    """

    def __init__(
        self, token: str | TokenSource | None = None, *, identity: Credentials | None = None
    ) -> None:
        source = token if callable(token) else token_source(token)
        if identity is None and source is not None:
            from .access.wallet import (
                Wallet,  # it loads a library that clients without a token need not have
            )

            identity = Wallet(source, self._ask_capabilities)
        self._identity = identity
        self._renewing: set[asyncio.Task[None]] = set()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=False), trust_env=False
        )

    def know_metaservers(self, addresses: Sequence[str]) -> None:
        """Have metaservers shown the token itself; see `network.KnowsMetaservers`."""
        if self._identity is not None:
            self._identity.know_metaservers(addresses)

    async def open_channel(self, address: str, *, timeout_ms: int) -> WebSocketChannel:
        """
        A channel to the broker at `address`, which knows who calls.

        Raises:
            NotSentError
            UnauthenticatedError, TokenInvalidError: the token is refused, or cannot be read.
        """
        if self._identity is None:
            return await self._connect(address, timeout_ms)
        held = await self._identity.held()
        channel = await self._connect(address, timeout_ms)
        if held is None:
            return channel
        try:
            await self._introduce(self._identity, channel, held, address, timeout_ms)
        except OutcomeUnknownError as error:
            await channel.close()
            raise NotSentError(error.message, address=address) from error
        except BaseException:
            await channel.close()
            raise
        return channel

    async def _introduce(
        self,
        identity: Credentials,
        channel: WebSocketChannel,
        held: ShownCapability,
        address: str,
        timeout_ms: int,
    ) -> None:
        """Say who calls, with a newer capability if the first is refused; and again before it ends."""
        challenged, _ = await channel.call(Challenge(), timeout_ms=timeout_ms)
        assert isinstance(challenged, Challenged)
        nonce = challenged.nonce
        if not nonce:
            return
        try:
            await _authenticate(channel, held, nonce, address, timeout_ms)
        except CapabilityEndedError:
            identity.refused(held.text)
            newer = await identity.held()
            if newer is None:
                raise
            held = newer
            await _authenticate(channel, held, nonce, address, timeout_ms)
        task = asyncio.create_task(_stay_known(identity, channel, held, nonce, address, timeout_ms))
        self._renewing.add(task)
        task.add_done_callback(self._renewing.discard)

    async def _ask_capabilities(self, address: str, token: str, holder: bytes) -> Capabilities:
        return await self._control(
            CAPABILITY.method, address, CAPABILITY.path, Capabilities,
            body=AskCapability(holder=holder), query=None, timeout_ms=CAPABILITY_TIMEOUT_MS,
            bearer=token,
        )  # fmt: skip

    async def _connect(self, address: str, timeout_ms: int) -> WebSocketChannel:
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
        identity = self._identity
        call = partial(
            self._control,
            method,
            address,
            path,
            answer,
            body=body,
            query=query,
            timeout_ms=timeout_ms,
        )
        if identity is None:
            return await call()
        bearer = await identity.bearer(address)
        try:
            return await call(bearer=bearer)
        except CapabilityEndedError:
            if bearer is None or not identity.refused(bearer):
                raise
            return await call(bearer=await identity.bearer(address))

    async def _control(
        self,
        method: str,
        address: str,
        path: str,
        answer: type[T],
        *,
        body: object,
        query: Mapping[str, str] | None,
        timeout_ms: int,
        bearer: str | None = None,
    ) -> T:
        headers = {"content-type": "application/json"}
        if bearer is not None:
            headers["authorization"] = f"Bearer {bearer}"
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
                headers=headers,
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
        for task in list(self._renewing):
            task.cancel()
        await asyncio.gather(*self._renewing, return_exceptions=True)
        if self._identity is not None:
            await self._identity.close()
        await self._session.close()


async def _authenticate(
    channel: WebSocketChannel, held: ShownCapability, nonce: bytes, address: str, timeout_ms: int
) -> None:
    asked = Authenticate(held.text, held.key.prove(nonce, address), address)
    answer, _ = await channel.call(asked, timeout_ms=timeout_ms)
    assert isinstance(answer, Authenticated)


async def _stay_known(
    identity: Credentials,
    channel: WebSocketChannel,
    held: ShownCapability,
    nonce: bytes,
    address: str,
    timeout_ms: int,
) -> None:
    """Show each new capability on a channel, until it is closed; a broker closes it when the last one has ended."""
    while not channel.closed:
        await asyncio.sleep(max(RENEW_AGAIN_S, held.renew_in_s))
        with contextlib.suppress(KeylaneError):
            newer = await identity.held()
            if newer is None or channel.closed:
                return
            if newer.text != held.text:
                await _authenticate(channel, newer, nonce, address, timeout_ms)
            held = newer

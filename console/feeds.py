"""A feed for each access token in use, with a client of its own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from ..admin import Admin
from ..protocol.clock import Clock
from ..protocol.http.tls_settings import TlsSettings
from ..rpc.environment import AMBIENT, Environment
from ..rpc.http_network import HttpNetwork
from .feed import Feed

FEEDS_MAX = 50
"""The maximum number of tokens in use; the one that was not used for the longest time is closed."""
CALL_TIMEOUT_MS = 15_000


class Feeds:
    """
    The feeds by token.

    Args:
        address: the metaserver's own address.
        tls: the TLS for calls to it.
    """

    def __init__(self, address: str, *, tls: TlsSettings | None, clock: Clock) -> None:
        self._address = address
        self._tls = tls
        self._clock = clock
        self._feeds: OrderedDict[str, tuple[Feed, Environment]] = OrderedDict()
        self._lock = asyncio.Lock()

    async def of(self, token: str) -> Feed:
        """Return the feed of a token; "" where there is no access control. Raises ConfigError."""
        return (await self._entry(token))[0]

    async def environment(self, token: str) -> Environment:
        """Return the environment of a token's other clients."""
        return (await self._entry(token))[1]

    @property
    def address(self) -> str:
        """The metaserver's own address."""
        return self._address

    async def _entry(self, token: str) -> tuple[Feed, Environment]:
        async with self._lock:
            if token not in self._feeds:
                if len(self._feeds) >= FEEDS_MAX:
                    await _close(*self._feeds.popitem(last=False)[1])
                self._feeds[token] = await self._open(token)
            self._feeds.move_to_end(token)
            return self._feeds[token]

    async def _open(self, token: str) -> tuple[Feed, Environment]:
        environment = Environment(network=HttpNetwork(self._tls, token=token or None))
        admin = Admin(self._address, call_timeout_ms=CALL_TIMEOUT_MS)
        before = AMBIENT.set(environment)  # the client uses the network of its surroundings
        try:
            await admin.__aenter__()
        finally:
            AMBIENT.reset(before)
        return Feed(admin, self._clock), environment

    async def close(self) -> None:
        """Close all clients."""
        while self._feeds:
            await _close(*self._feeds.popitem()[1])


async def _close(feed: Feed, environment: Environment) -> None:
    await feed.close()
    assert isinstance(environment.network, HttpNetwork)
    await environment.network.close()

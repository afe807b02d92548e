"""A feed for each access token in use, with a client of its own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ..admin import Admin
from ..protocol.clock import Clock
from ..protocol.errors import OverloadedError
from ..protocol.http.tls_settings import TlsSettings
from ..rpc.environment import AMBIENT, Environment
from ..rpc.http_network import HttpNetwork
from .feed import Feed

FEEDS_MAX = 50
"""The maximum number of tokens in use. For a further one, the feed is closed that was not used for
the longest time, unless a stream is open or a request is being answered.
"""
CALL_TIMEOUT_MS = 15_000


@dataclass(slots=True)
class _Entry:
    feed: Feed
    environment: Environment
    users: int = 0
    """The number of open streams, and of requests that are being answered."""

    async def close(self) -> None:
        await self.feed.close()
        assert isinstance(self.environment.network, HttpNetwork)
        await self.environment.network.close()


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
        self._feeds: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def use(self, token: str) -> AsyncIterator[tuple[Feed, Environment]]:
        """
        Keep the feed of a token open, and the environment of its other clients.

        Args:
            token: "" where there is no access control.

        Raises:
            ConfigError
            OverloadedError: so many other feeds are in use.
        """
        async with self._lock:
            if token not in self._feeds:
                await self._make_room()
                self._feeds[token] = await self._open(token)
            self._feeds.move_to_end(token)
            entry = self._feeds[token]
            entry.users += 1
        try:
            yield entry.feed, entry.environment
        finally:
            entry.users -= 1

    async def _make_room(self) -> None:
        if len(self._feeds) < FEEDS_MAX:
            return
        token = next((token for token, each in self._feeds.items() if not each.users), None)
        if token is None:
            raise OverloadedError(
                f"pages of the console are open under {FEEDS_MAX} other tokens", limit=FEEDS_MAX
            )
        await self._feeds.pop(token).close()

    async def _open(self, token: str) -> _Entry:
        environment = Environment(network=HttpNetwork(self._tls, token=token or None))
        admin = Admin(self._address, call_timeout_ms=CALL_TIMEOUT_MS)
        before = AMBIENT.set(environment)  # the client uses the network of its surroundings
        try:
            await admin.__aenter__()
        finally:
            AMBIENT.reset(before)
        return _Entry(Feed(admin, self._clock), environment)

    async def close(self) -> None:
        """Close all clients."""
        while self._feeds:
            await self._feeds.popitem()[1].close()

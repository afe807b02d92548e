"""The open connections of a client: its network, and a `BrokerClient` for each broker that it called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ..protocol.errors import ConfigError
from ..protocol.settings import CALL_TIMEOUT_MS, is_within
from .client import BrokerClient
from .home import Home
from .http_network import HttpNetwork
from .network import Network


class Connections:
    """
    The network and the broker clients of one client, opened inside a running event loop, and closed again.

    Args:
        network: None: each opening makes a real one, and closes it.
        timeout_ms: of a call to a broker.
        what: the kind of client, as errors name it.
    """

    def __init__(self, network: Network | None, *, timeout_ms: int, what: str = "client") -> None:
        """Raises ConfigError: `timeout_ms` is not in CALL_TIMEOUT_MS."""
        low, high = CALL_TIMEOUT_MS
        if not is_within(timeout_ms, low, high):
            raise ConfigError(
                f"call_timeout_ms must be a whole number from {low} to {high}, not {timeout_ms!r:.40}"
            )
        self._given = network
        self._own: HttpNetwork | None = None
        self._timeout_ms = timeout_ms
        self._brokers: dict[str, BrokerClient] = {}
        self.home = Home(what)
        self.network: Network | None = None
        """None while it is not open."""

    def open(self, on_fork: Callable[[], None] = lambda: None) -> Network:
        """
        Open the client in the running event loop; `on_fork` is called in the child when this process forks.

        Raises:
            AlreadyOpenError, ForkedError
        """
        self.home.enter(self, on_fork)
        self._brokers = {}
        self.network = self._given
        if self.network is None:
            self.network = self._own = HttpNetwork()
        return self.network

    def broker_at(self, address: str) -> BrokerClient:
        """The client of the broker at `host:port`; the same object each time."""
        broker = self._brokers.get(address)
        if broker is None:
            assert self.network is not None
            broker = BrokerClient(self.network, address, timeout_ms=self._timeout_ms)
            self._brokers[address] = broker
        return broker

    async def close(self) -> None:
        """
        Close every connection; a network that was passed in stays open.  Does nothing where the client is not open.

        Raises:
            OtherLoopError: it was opened in another event loop.
        """
        if not self.home.here:
            return
        self.home.check()
        for broker in self._brokers.values():
            await broker.close()
        self._brokers.clear()
        if self._own is not None:
            await self._own.close()
        self.network = self._own = None
        self.home.leave()


async def clean_up(work: Coroutine[Any, Any, None]) -> None:
    """
    Finish `work` even if the caller is cancelled meanwhile; for short work only.

    Otherwise a client whose opening failed, and which was cancelled while it cleaned up, could never be opened again.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()

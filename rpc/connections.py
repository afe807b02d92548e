"""The open connections of a client: its network, and a `BrokerClient` for each broker that it called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ..protocol.access.tokens import check_token
from ..protocol.errors import ConfigError
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.settings import CALL_TIMEOUT_MS, is_within
from .access.token_file import token_source
from .client import BrokerClient, MetaClient
from .environment import environment_of
from .home import Home
from .http_network import HttpNetwork, client_network
from .network import Network

WAIT_S_MAX = 86_400


class Connections:
    """
    The network and the broker clients of one client, opened inside a running event loop, and closed again.

    Args:
        network: None: each opening takes that of its environment, or makes a real one and closes it.
        timeout_ms: of a call to a broker.
        what: the kind of client, as errors name it.
        token: what a real network shows to metaservers; None: the one that the environment names, if it does.
        wait_s: seconds for which `wait_for` waits.
        tls: of a network of its own; None: that of the process's environment.
    """

    def __init__(
        self,
        network: Network | None,
        *,
        timeout_ms: int,
        what: str = "client",
        wait_s: float = 0,
        tls: TlsSettings | None = None,
        token: str | None = None,
    ) -> None:
        """
        Raises:
            TokenInvalidError
            ConfigError: `tls` is no TlsSettings, `timeout_ms` is not in CALL_TIMEOUT_MS, or `wait_s` not in [0, WAIT_S_MAX].
        """
        low, high = CALL_TIMEOUT_MS
        if not is_within(timeout_ms, low, high):
            raise ConfigError(
                f"call_timeout_ms must be a whole number from {low} to {high}, not {timeout_ms!r:.40}"
            )
        number = isinstance(wait_s, int | float) and not isinstance(wait_s, bool)
        if not number or not 0 <= wait_s <= WAIT_S_MAX:
            raise ConfigError(f"wait_s must be seconds from 0 to {WAIT_S_MAX}, not {wait_s!r:.40}")
        if tls is not None and not isinstance(tls, TlsSettings):
            raise ConfigError(f"tls must be a TlsSettings, not {tls!r:.40}")
        self.wait_s = wait_s
        self.token = None if token is None else check_token(token, "token=")
        self._given = network
        self.tls = tls
        self._own: HttpNetwork | None = None
        self._timeout_ms = timeout_ms
        self._brokers: dict[str, BrokerClient] = {}
        self.home = Home(what)
        self.network: Network | None = None
        """None while it is not open."""
        self._throttled_ms = 0
        """Of networks that are closed."""

    def open(self, on_fork: Callable[[], None] = lambda: None) -> Network:
        """
        Open the client in the running event loop; `on_fork` is called in the child when this process forks.

        Raises:
            AlreadyOpenError, ForkedError
            ConfigError: a file of the TLS cannot be used.
            TokenInvalidError: of the environment.
        """
        network = self._given or environment_of(None).network
        source = token_source(self.token) if network is None else None
        self.home.enter(self, on_fork)
        self._brokers = {}
        if network is None:
            try:
                network = self._own = client_network(self.tls, source)
            except ConfigError:
                self.home.leave()
                raise
        self.network = network
        return network

    @property
    def throttled_ms(self) -> int:
        """For how long servers have let calls wait for a quota."""
        own = self._own
        return self._throttled_ms + (0 if own is None else own.throttling.waited_ms)

    async def wait_for(self, meta: MetaClient) -> None:
        """
        Wait for metaservers that are still starting, at most `wait_s`; with 0 they are not asked.

        Raises:
            KeylaneError: as of `MetaClient.wait_until_ready`; every connection is closed.
        """
        if not self.wait_s:
            return
        try:
            await meta.wait_until_ready(self.wait_s)
        except BaseException:
            await clean_up(self.close())
            raise

    def broker_at(self, address: str) -> BrokerClient:
        """The client of the broker at `host:port`, the same object each time.  Raises ClosedError."""
        broker = self._brokers.get(address)
        if broker is None:
            if self.network is None:  # it was closed while a caller waited
                self.home.check()
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
            self._throttled_ms += self._own.throttling.waited_ms
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

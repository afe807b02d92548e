"""The open connections of a client: its network, and a `BrokerClient` for each broker that it has
called.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ..protocol.access.tokens import check_token
from ..protocol.errors import (
    ClosedError,
    ConfigError,
    KeylaneError,
    OutcomeUnknownError,
    RetryRule,
    UnreachableError,
)
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.settings import CALL_TIMEOUT_MS, is_within
from .client import BrokerClient, MetaClient
from .environment import environment_of
from .home import Home
from .http_network import HttpNetwork, client_network
from .network import Network
from .race import Race, start_ending, start_task

WAIT_S_MAX = 86_400
READY_POLL_S = 0.1
AT_ONCE_MAX = 64
"""Most HTTP calls of one `in_turns` at a time, each of which uses a connection: a server has 1,000
for all clients.
"""
KEPT_MIN = 16
"""Number of broker clients below which none is checked for removal."""
A = TypeVar("A")
R = TypeVar("R")


async def _nothing() -> None:
    """Begin nothing, and return at once."""


class BrokerClients:
    """
    The clients of brokers by address.

    Brokers may return at other addresses, for example in containers. So a client that is not in
    use and has no open connection is dropped after many others were added.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, BrokerClient] = WeakValueDictionary()
        self._kept: dict[str, BrokerClient] = {}
        """Clients that have a connection, or had one recently."""
        self._look_at = KEPT_MIN

    def at(self, network: Network, address: str, *, timeout_ms: int) -> BrokerClient:
        """Return the client of the broker at `address`, the same object for as long as it is in
        use.
        """
        client = self._known.get(address)
        if client is None:
            if len(self._kept) >= self._look_at:
                self._let_go()
            client = BrokerClient(network, address, timeout_ms=timeout_ms, on_opening=self._keep)
            self._known[address] = client
            self._keep(client)
        return client

    def values(self) -> list[BrokerClient]:
        """Return all clients."""
        return list(self._known.values())

    def _keep(self, client: BrokerClient) -> None:
        self._kept[client.address] = client

    def _let_go(self) -> None:
        self._kept = {
            address: client for address, client in self._kept.items() if not client.is_idle
        }
        self._look_at = max(KEPT_MIN, 2 * len(self._kept))


class Connections:
    """
    The network and the broker clients of one client, opened in a running event loop, and closed
    again.

    Args:
        network: None: each opening uses that of its environment, or makes a real one and closes it.
        timeout_ms: timeout of a call to a broker.
        what: kind of the client in errors.
        token: token that a real network shows to metaservers; None: the one that the environment
            names, if any.
        wait_s: seconds for which `wait_for` waits.
        tls: settings for a network of its own; None: those of the process's environment.
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
            ConfigError
            ConfigError: `tls` is not a TlsSettings, `timeout_ms` is not in CALL_TIMEOUT_MS, or
                `wait_s` is not in [0, WAIT_S_MAX].
        """
        low, high = CALL_TIMEOUT_MS
        if not is_within(timeout_ms, low, high):
            raise ConfigError(
                f"call_timeout_ms must be a whole number from {low} to {high}, not "
                f"{timeout_ms!r:.40}"
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
        self._brokers = BrokerClients()
        self._what = what
        self.home = Home(what)
        self.network: Network | None = None
        """The network; None while the client is not open."""
        self._unwanted = asyncio.Event()
        """Set when the client is closed while it is being opened."""
        self._throttled_ms = 0
        """Milliseconds that calls were throttled on networks that are closed."""

    def open(self, on_fork: Callable[[], None] = lambda: None) -> Network:
        """
        Open the client in the running event loop; `on_fork` is called in the child when this
        process forks.

        Raises:
            UsageError
            ConfigError: a TLS file cannot be used.
            ConfigError: the environment's token cannot be used.
        """
        network = self._given or environment_of(None).network
        self.home.enter(self, on_fork)
        self._brokers = BrokerClients()
        self._unwanted = asyncio.Event()
        if network is None:
            try:
                network = self._own = client_network(self.tls, self.token)
            except ConfigError:
                self.home.leave()
                raise
        self.network = network
        return network

    @property
    def throttled_ms(self) -> int:
        """Milliseconds that servers have let calls wait for a quota."""
        own = self._own
        return self._throttled_ms + (0 if own is None else own.throttling.waited_ms)

    async def wait_for(
        self, meta: MetaClient, begin: Callable[[], Awaitable[object]] = _nothing
    ) -> None:
        """
        Wait up to `wait_s` for metaservers that are still starting, and await the result of
        `begin`.

        With a `wait_s` of 0 they are not asked, and `begin` is called once. Otherwise it is called
        again until `wait_s` is over if its server did not answer, for example because that
        metaserver has just ended.

        Raises:
            ClosedError: `wait_no_more` was called in the meantime; every connection is closed.
            KeylaneError: `wait_until_ready` raised it, and every connection is closed; or `begin`
                raised it.
        """
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + self.wait_s
        while True:
            if self.wait_s:
                await self._wait_until_ready(meta, max(0, until_s - now_s()))
            try:
                await begin()
                return
            except UnreachableError as error:
                if error.retry is RetryRule.NEVER or now_s() + READY_POLL_S >= until_s:
                    raise
                await asyncio.sleep(READY_POLL_S)

    async def _wait_until_ready(self, meta: MetaClient, wait_s: float) -> None:
        try:
            async with Race() as race:
                ready = race.start(wait_until_ready(meta, wait_s), name="wait for a metaserver")
                race.start(self._unwanted.wait(), name="wait for close")
                await race.first()
                if not ready.done():
                    raise ClosedError("it was closed while it waited for a metaserver")
                ready.result()
        except BaseException:
            await clean_up(self.close)
            raise

    @property
    def wanted(self) -> bool:
        """False once `wait_no_more` was called, until the client is opened again."""
        return not self._unwanted.is_set()

    def wait_no_more(self) -> None:
        """End `wait_for`, because the client is being closed; `check` refuses from now on."""
        self._unwanted.set()

    def check(self) -> None:
        """
        Check that the client is open and not being closed, and that the caller is where it was
        opened.

        Raises:
            ClosedError, UsageError
        """
        self.home.check()
        if not self.wanted:
            raise ClosedError(f"the {self._what} is being closed")

    def broker_at(self, address: str) -> BrokerClient:
        """Return the client of the broker at `host:port`, the same object for as long as it is
        used. Raises ClosedError.
        """
        if self.network is None:  # it was closed while a caller waited
            self.home.check()
        assert self.network is not None
        return self._brokers.at(self.network, address, timeout_ms=self._timeout_ms)

    async def close(self) -> None:
        """
        Close every connection; a network that was passed in stays open. Do nothing if the client
        is not open.

        Raises:
            UsageError: it was opened in another event loop.
        """
        if not self.home.here:
            return
        self.home.check()
        for broker in self._brokers.values():
            await broker.close()
        self._brokers = BrokerClients()
        if self._own is not None:
            self._throttled_ms += self._own.throttling.waited_ms
            await self._own.close()
        self.network = self._own = None
        self.home.leave()


async def wait_until_ready(meta: MetaClient, wait_s: float) -> None:
    """
    Wait up to `wait_s` seconds until a metaserver is ready; after that, one that answers but is not
    ready is enough.

    Raises:
        NotSentError, OutcomeUnknownError: no metaserver answers within this time.
        KeylaneError: raised at once for an answer that does not change by waiting, such as that of
            another program.
    """
    failure: KeylaneError | None = OutcomeUnknownError.of_read(
        f"no metaserver answered within {wait_s:g} s"
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                try:
                    if (await meta.health()).ready:
                        return
                    failure = None
                except KeylaneError as error:
                    if error.retry is RetryRule.NEVER:
                        raise
                    failure = error
                await asyncio.sleep(READY_POLL_S)
    if failure is not None:
        raise failure


async def in_turns(call: Callable[[A], Awaitable[R]], arguments: Iterable[A]) -> list[R]:
    """Return the results of an HTTP call with each argument, AT_ONCE_MAX at a time; raise the first
    error, after ending the other calls.
    """
    slots = asyncio.Semaphore(AT_ONCE_MAX)

    async def one(argument: A) -> R:
        async with slots:
            return await call(argument)

    calls = [start_task(one(argument)) for argument in arguments]
    try:
        return await asyncio.gather(*calls)
    except BaseException:
        for each in calls:
            each.cancel()
        await asyncio.wait(calls)  # a repeat begins no calls beside these
        raise


async def clean_up(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """
    Finish `work` even if the caller is cancelled in the meantime, or the event loop ends; for short
    work only.

    Otherwise a client whose opening failed, and which was cancelled while it cleaned up, could
    never be opened again.

    Args:
        work: function that may be called again; see `to_the_end`.
    """
    task = start_ending(to_the_end(work))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


async def to_the_end(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """
    Await the result of `work`, and once more if the task is cancelled meanwhile; the cancellation
    is dropped.

    This is for tasks that only the end of the event loop cancels: `asyncio.run` cancels all
    remaining tasks once, and waits for their ends.

    Args:
        work: function that may be called again where an earlier call stopped.
    """
    try:
        await work()
    except asyncio.CancelledError:
        await work()

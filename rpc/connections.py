"""The connections of a client: its network, and a `BrokerClient` for each broker that it has
called.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ..protocol.access.tokens import check_token
from ..protocol.errors import (
    ClosedError,
    ConfigError,
    ConnectionQuotaError,
    KeylaneError,
    OutcomeUnknownError,
    RetryRule,
    UnreachableError,
)
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.settings import CALL_TIMEOUT_MS, is_within
from .client import BrokerClient, MetaClient
from .environment import environment_of
from .http_network import HttpNetwork, client_network
from .loop_binding import LoopBinding
from .network import Network
from .race import Race, start_closing_task, start_task
from .unclosed import creation_place

log = logging.getLogger("keylane")
WAIT_S_MAX = 86_400
WAIT_HINT = "wait_s=60 (keylane --wait-s 60) waits for a metaserver that is still starting."
READY_POLL_S = 0.1
AT_ONCE_MAX = 64
"""The maximum number of concurrent HTTP calls in one `gather_limited`. Each uses a connection, and
a server accepts 1,000 from all clients together.
"""
NO_CONNECTION = (UnreachableError, ConnectionQuotaError)
"""The errors that mean there is no connection. With ConnectionQuotaError, the broker closed this
connection in favour of another principal's, until a connection slot is free.
"""
PRUNE_MIN = 16
"""Idle broker clients are only dropped if there are more clients than this."""
A = TypeVar("A")
R = TypeVar("R")


async def _no_op() -> None:
    """Do nothing."""


class BrokerClients:
    """
    The broker clients by address.

    Brokers may come back at other addresses, for example in containers, so idle clients are dropped
    from time to time when new ones are added.
    """

    def __init__(self) -> None:
        self._clients: WeakValueDictionary[str, BrokerClient] = WeakValueDictionary()
        self._active: dict[str, BrokerClient] = {}
        """Strong references to the clients that have or recently had a connection."""
        self._prune_at = PRUNE_MIN

    def at(self, network: Network, address: str, *, timeout_ms: int) -> BrokerClient:
        """Return the client for the broker at `address`; it stays the same object while anyone uses
        it.
        """
        client = self._clients.get(address)
        if client is None:
            if len(self._active) >= self._prune_at:
                self._prune()
            client = BrokerClient(
                network, address, timeout_ms=timeout_ms, on_opening=self._mark_active
            )
            self._clients[address] = client
            self._mark_active(client)
        return client

    def values(self) -> list[BrokerClient]:
        """Return all clients."""
        return list(self._clients.values())

    def _mark_active(self, client: BrokerClient) -> None:
        self._active[client.address] = client

    def _prune(self) -> None:
        self._active = {
            address: client for address, client in self._active.items() if not client.is_idle
        }
        self._prune_at = max(PRUNE_MIN, 2 * len(self._active))


class Connections:
    """
    The network and the broker clients of one client, which are opened in a running event loop.

    Args:
        network: the network to use. If None, each opening uses the network of its environment, or
            creates a real one and closes it later.
        timeout_ms: the timeout of a call to a broker.
        what: the kind of client, for error messages.
        token: the token to send to metaservers on a real network; None uses that of the
            environment, if any.
        wait_s: how many seconds `wait_for` waits.
        tls: TLS settings for a real network; None uses those of the process's environment.
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
            ConfigError: `tls` is not a TlsSettings, `timeout_ms` is not in CALL_TIMEOUT_MS,
                `wait_s` is not in [0, WAIT_S_MAX], or `token` is malformed.
        """
        low, high = CALL_TIMEOUT_MS
        if not is_within(timeout_ms, low, high):
            raise ConfigError(
                f"call_timeout_ms must be a whole number from {low} to {high}, not "
                f"{timeout_ms!r:.40}"
            )
        is_number = isinstance(wait_s, int | float) and not isinstance(wait_s, bool)
        if not is_number or not 0 <= wait_s <= WAIT_S_MAX:
            raise ConfigError(f"wait_s must be seconds from 0 to {WAIT_S_MAX}, not {wait_s!r:.40}")
        if tls is not None and not isinstance(tls, TlsSettings):
            raise ConfigError(f"tls must be a TlsSettings, not {tls!r:.40}")
        self.wait_s = wait_s
        self.token = None if token is None else check_token(token, "token=")
        self._given_network = network
        self.tls = tls
        self._own_network: HttpNetwork | None = None
        self._timeout_ms = timeout_ms
        self._brokers = BrokerClients()
        self._client_kind = what
        self._created_at = creation_place()
        self.loop_binding = LoopBinding(what)
        self.network: Network | None = None
        """The network in use; None while the client is not open."""
        self._close_requested = asyncio.Event()
        """Set when the client should be closed, possibly while it is still being opened."""
        self._is_wait_logged = False
        self._throttled_ms = 0
        """The time in milliseconds that calls were throttled on earlier networks, which are
        closed.
        """

    def open(self, on_fork: Callable[[], None] = lambda: None) -> Network:
        """
        Open the client in the running event loop. `on_fork` is called in the child if this process
        forks.

        Raises:
            UsageError: the client is open already, or no event loop is running.
            ConfigError: a TLS file or the environment's token cannot be used.
        """
        network = self._given_network or environment_of(None).network
        self.loop_binding.enter(self, on_fork)
        self._brokers = BrokerClients()
        self._close_requested = asyncio.Event()
        if network is None:
            try:
                network = self._own_network = client_network(
                    self.tls,
                    self.token,
                    owner=f"the {self._client_kind} that was created at {self._created_at}",
                )
            except ConfigError:
                self.loop_binding.leave()
                raise
        self.network = network
        return network

    @property
    def throttled_ms(self) -> int:
        """The total time in milliseconds that servers have throttled calls because of quotas."""
        network = self._own_network
        return self._throttled_ms + (0 if network is None else network.throttling.waited_ms)

    async def wait_for(
        self, meta: MetaClient, open_client: Callable[[], Awaitable[object]] = _no_op
    ) -> None:
        """
        Wait up to `wait_s` for metaservers that are still starting, and await `open_client()`.

        If `wait_s` is 0, it does not wait, and calls `open_client` once. Otherwise it calls
        `open_client` again until `wait_s` has passed if the server did not answer, for example
        because that metaserver has just stopped.

        Raises:
            ClosedError: `request_close` was called meanwhile; every connection is closed.
            KeylaneError: no metaserver became ready, and every connection is closed; or
                `open_client` raised it.
        """
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + self.wait_s
        self._is_wait_logged = False
        while True:
            if self.wait_s:
                await self._wait_until_ready(meta, max(0, deadline_s - now_s()))
            try:
                await open_client()
                return
            except UnreachableError as error:
                is_final = error.retry is RetryRule.NEVER
                if not (self.wait_s or is_final):
                    error.hint = f"{error.hint} {WAIT_HINT}"
                if is_final or now_s() + READY_POLL_S >= deadline_s:
                    # Its text says all that its cause and the calls in this package would.
                    raise error.with_traceback(None) from None
                await asyncio.sleep(READY_POLL_S)

    def _log_wait(self, cause: str) -> None:
        """Log, once for each opening, that no metaserver is ready yet."""
        if not self._is_wait_logged:
            self._is_wait_logged = True
            log.info(
                "the %s waits up to %g s for a metaserver: %s",
                self._client_kind,
                self.wait_s,
                cause,
            )

    async def _wait_until_ready(self, meta: MetaClient, wait_s: float) -> None:
        waiting = wait_until_ready(meta, wait_s, self._log_wait)
        try:
            async with Race() as race:
                ready = race.start(waiting, name="wait for a metaserver")
                race.start(self._close_requested.wait(), name="wait for close")
                await race.first()
                if not ready.done():
                    raise ClosedError("it was closed while it waited for a metaserver")
                ready.result()
        except BaseException:
            await clean_up(self.close)
            raise

    @property
    def wanted(self) -> bool:
        """False after `request_close` is called, until the client is opened again."""
        return not self._close_requested.is_set()

    def request_close(self) -> None:
        """Cancel `wait_for` because the client is about to be closed; from now on, `check` raises
        an error.
        """
        self._close_requested.set()

    def check(self) -> None:
        """
        Check that the client is open and not being closed, and that the caller runs in the client's
        event loop.

        Raises:
            ClosedError: the client is not open, or is being closed.
            UsageError: the caller does not run in the client's event loop.
        """
        self.loop_binding.check()
        if not self.wanted:
            raise ClosedError(f"the {self._client_kind} is being closed")

    def broker_at(self, address: str) -> BrokerClient:
        """Return the client for the broker at `host:port`; it stays the same object while anyone
        uses it. Raises ClosedError.
        """
        if self.network is None:  # closed while the caller waited
            self.loop_binding.check()
        assert self.network is not None
        return self._brokers.at(self.network, address, timeout_ms=self._timeout_ms)

    async def close(self) -> None:
        """
        Close every connection, except a network that was passed in. Do nothing if the client is not
        open.

        Raises:
            UsageError: the client was opened in another event loop.
        """
        if not self.loop_binding.is_open_here:
            return
        self.loop_binding.check()
        for broker in self._brokers.values():
            await broker.close()
        self._brokers = BrokerClients()
        if self._own_network is not None:
            self._throttled_ms += self._own_network.throttling.waited_ms
            await self._own_network.close()
        self.network = self._own_network = None
        self.loop_binding.leave()


async def wait_until_ready(meta: MetaClient, wait_s: float, on_wait: Callable[[str], None]) -> None:
    """
    Wait up to `wait_s` seconds for a metaserver to become ready. After that, any metaserver that
    answers is enough. `on_wait` is called with the reason for each wait.

    Raises:
        NotSentError, OutcomeUnknownError: no metaserver answered in this time.
        KeylaneError: an error that waiting cannot resolve, such as another program at the address;
            raised immediately.
    """
    last_error: KeylaneError | None = OutcomeUnknownError.of_read(
        f"no metaserver answered within {wait_s:g} s"
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                try:
                    health = await meta.health()
                    if health.ready:
                        return
                    last_error = None
                    on_wait(f"it is not ready{health.reason and f': {health.reason}'}")
                except KeylaneError as error:
                    if error.retry is RetryRule.NEVER:
                        raise
                    last_error = error
                    on_wait(error.message)
                await asyncio.sleep(READY_POLL_S)
    if last_error is not None:
        raise last_error


async def gather_limited(call: Callable[[A], Awaitable[R]], arguments: Iterable[A]) -> list[R]:
    """Return the results of an HTTP call for each argument, with at most AT_ONCE_MAX calls at a
    time. After the first error, cancel the other calls and raise the error.
    """
    semaphore = asyncio.Semaphore(AT_ONCE_MAX)

    async def call_limited(argument: A) -> R:
        async with semaphore:
            return await call(argument)

    tasks = [start_task(call_limited(argument)) for argument in arguments]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # a retry must not run beside these calls
        raise


async def clean_up(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """
    Finish some short `work` even if the caller is cancelled or the event loop shuts down meanwhile.

    Otherwise, a client that failed to open and was cancelled during the cleanup could never be
    opened again.

    Args:
        work: a function that may be called repeatedly; see `finish_despite_cancel`.
    """
    task = start_closing_task(finish_despite_cancel(work))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


async def finish_despite_cancel(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """
    Await `work()`, and await it again if the task is cancelled meanwhile. The cancellation is
    swallowed.

    This is for tasks that are only cancelled when the event loop shuts down: `asyncio.run` cancels
    all remaining tasks once, and waits for them.

    Args:
        work: a function that continues where an earlier call was cancelled.
    """
    try:
        await work()
    except asyncio.CancelledError:
        await work()

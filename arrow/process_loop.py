"""The event loop that all readers of a process share. It runs in its own thread, with one
connection to each broker.

    reader's thread ── submit ──▶ loop: one connection to each broker, opened by the first call,
                                        and again after it was lost

A reader's thread may pause for as long as it likes, because the loop keeps its connections alive.

Invariants
    A forked child never uses its parent's loop or connections: it creates its own.
    The connections are closed when the process exits.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from ..rpc.client import BrokerClient
from ..rpc.http_network import HttpNetwork
from ..rpc.loop_binding import LoopBinding
from ..rpc.network import Network
from .connection_security import ConnectionSecurity
from .opening import EffectiveSecurity, effective_security, open_network

T = TypeVar("T")
CLOSE_S = 3.0
"""The maximum time in seconds that a process waits at exit for its connections to close."""


class ProcessLoop:
    """The event loop of this process's readers; get it with `ProcessLoop.current()`."""

    _current: ClassVar[ProcessLoop | None] = None
    _start_lock = threading.Lock()

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._networks: dict[EffectiveSecurity, HttpNetwork] = {}
        self._brokers: dict[tuple[EffectiveSecurity, str], BrokerClient] = {}
        self._loop_binding = LoopBinding("reader")
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="keylane reader", daemon=True
        )
        self._thread.start()
        self.run(self._open())

    @classmethod
    def current(cls) -> ProcessLoop:
        """Return this process's loop; the first call starts it."""
        with cls._start_lock:
            if cls._current is None:
                cls._current = cls()
                atexit.register(cls._current.close)
            return cls._current

    @classmethod
    def _after_fork(cls) -> None:
        """Forget the parent's loop, and replace the lock, which the fork may have copied while it
        was held.
        """
        cls._current = None
        cls._start_lock = threading.Lock()

    async def _open(self) -> None:
        self._loop_binding.enter(
            (self._networks, self._brokers, self._loop), ProcessLoop._after_fork
        )

    def network(self, security: ConnectionSecurity) -> Network:
        """
        Return the network that readers with these TLS settings and this token share. Call this in
        the loop.

        Raises:
            ConfigError: a file cannot be used.
        """
        effective = effective_security(security)
        network = self._networks.get(effective)
        if network is None:
            network = self._networks[effective] = open_network(security)
        return network

    def broker(self, security: ConnectionSecurity, address: str) -> BrokerClient:
        """
        Return the client for the broker at `address`. Call this in the loop.

        Raises:
            ConfigError: a file cannot be used.
        """
        key = effective_security(security), address
        client = self._brokers.get(key)
        if client is None:
            client = self._brokers[key] = BrokerClient(self.network(security), address)
        return client

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a coroutine in the loop, and return its task."""

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(work)

        return self.run(begin())

    def call_soon(self, callback: Any, *arguments: object) -> None:
        """Call a function in the loop, from any thread; do nothing if the loop is closed."""
        if self._loop_binding.is_open_here and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    def close(self) -> None:
        """Close the connections and stop the loop; do nothing in a forked child."""
        if not self._loop_binding.is_open_here:
            return
        if ProcessLoop._current is self:
            ProcessLoop._current = None
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            closing.result(CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _close(self) -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for client in self._brokers.values():
            await client.close()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for network in self._networks.values():
            await network.close()
        self._loop_binding.leave()

"""The event loop of all readers of a process, in a thread of its own, with one connection to each
broker.

    reader's thread ── submit ──▶ loop: one connection to each broker, opened by its first call
                                        and opened again after it broke

A reader's thread may pause as long as it likes, because the loop answers the pings of brokers.

Invariants
    A forked child never uses its parent's loop or connections: it creates its own.
    The connections are closed at the exit of the process.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from ..rpc.client import BrokerClient
from ..rpc.home import Home
from ..rpc.http_network import HttpNetwork
from ..rpc.network import Network
from .opening import InForce, in_force, open_network
from .secured import Secured

T = TypeVar("T")
CLOSE_S = 3.0
"""Seconds that the exit of a process waits until its connections are closed."""


class ProcessLoop:
    """The event loop of this process's readers; `ProcessLoop.current()` starts it."""

    _current: ClassVar[ProcessLoop | None] = None
    _starting = threading.Lock()

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._networks: dict[InForce, HttpNetwork] = {}
        self._brokers: dict[tuple[InForce, str], BrokerClient] = {}
        self._home = Home("reader")
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="keylane reader", daemon=True
        )
        self._thread.start()
        self.run(self._open())

    @classmethod
    def current(cls) -> ProcessLoop:
        """Return the loop of this process; the first call starts it."""
        with cls._starting:
            if cls._current is None:
                cls._current = cls()
                atexit.register(cls._current.close)
            return cls._current

    @classmethod
    def _in_child(cls) -> None:
        """Forget the parent's loop; the lock may have been held at the fork."""
        cls._current = None
        cls._starting = threading.Lock()

    async def _open(self) -> None:
        self._home.enter((self._networks, self._brokers, self._loop), ProcessLoop._in_child)

    def network(self, secured: Secured) -> Network:
        """
        Return the network that readers with this TLS and token share; call it in the loop.

        Raises:
            ConfigError: a file cannot be used.
        """
        now = in_force(secured)
        network = self._networks.get(now)
        if network is None:
            network = self._networks[now] = open_network(secured)
        return network

    def broker(self, secured: Secured, address: str) -> BrokerClient:
        """
        Return the client of a broker; call it in the loop.

        Raises:
            ConfigError: a file cannot be used.
        """
        place = in_force(secured), address
        client = self._brokers.get(place)
        if client is None:
            client = self._brokers[place] = BrokerClient(self.network(secured), address)
        return client

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a coroutine in the loop."""

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(work)

        return self.run(begin())

    def soon(self, call: Any, *arguments: object) -> None:
        """Call a function in the loop soon; do nothing after the loop has ended."""
        if self._home.here and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def close(self) -> None:
        """Close the connections and end the loop; do nothing in a forked child."""
        if not self._home.here:
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
        self._home.leave()

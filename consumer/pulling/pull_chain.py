"""Pulls a partition repeatedly, and sends each pull as the answer of the previous one arrives,
without a task.

    task ─▶ PULL ─▶ answer: plain? ─ yes ─▶ handed out ─▶ another arrives, else PULL ─▶ …
      ▲                        │               │ held, full, moved
      ╰──── no, or an error ───┴───────────────╯

A broker gives several answers to one pull while they are small. The first answer that is not
handed out here ends the chain: later ones are dropped, and pulled again.

The task of the partition waits meanwhile: it handles every answer that needs a wait, and every
error. So a message is with a worker one turn of the event loop after its bytes, and the next pull
travels while its handler runs.
"""

from __future__ import annotations

import asyncio
from typing import Protocol
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from ...protocol.frames import Answer, Pull
from ...rpc.client import BrokerClient
from ...rpc.network import Calling, Channel

CHAINS_MAX = 1_024
"""The largest number of chains on one channel. Other pulls take turns at the `BrokerClient`; both
together stay below a broker's limit.
"""
_chains: WeakKeyDictionary[Channel, int] = WeakKeyDictionary()


class ChainedClient(Protocol):
    """A pull client, as seen by a chain."""

    @property
    def broker(self) -> BrokerClient:
        """Return the client of the partition's broker."""
        ...

    def pull_request(self) -> Pull:
        """Return the next pull."""
        ...

    def take_at_once(self, answer: Answer, payload: memoryview) -> bool:
        """Hand out the pulled messages; return False, with nothing done, if this needs a wait."""
        ...

    def may_pull(self) -> bool:
        """Return True if nothing must be waited for before the next pull."""
        ...


class PullChain:
    """
    The pulls of one partition.

    Args:
        timeout_ms: the time for an answer, beyond the wait of the pull.
    """

    __slots__ = ("_broker", "_calling", "_channel", "_client", "_timeout_ms", "_waiter")

    def __init__(self, client: ChainedClient, *, timeout_ms: int) -> None:
        self._client = client
        self._timeout_ms = timeout_ms
        self._waiter: asyncio.Future[tuple[Answer, memoryview] | None] | None = None
        """The future for which the task waits while a chain runs."""
        self._broker: BrokerClient | None = None
        self._channel: Channel | None = None
        self._calling: Calling | None = None

    @property
    def is_under_way(self) -> bool:
        """Return True while the broker has a pull to answer."""
        return self._calling is not None and not self._calling.done()

    async def run(self) -> tuple[Answer, memoryview] | None:
        """
        Pull until something must be waited for.

        Returns:
            An answer that was not taken; None if every answer was taken and something must be
            waited for before the next pull.

        Raises:
            KeylaneError: a call to the broker failed, or a batch cannot be opened.
        """
        broker, request = self._client.broker, self._client.pull_request()
        channel = await broker.channel()
        if _chains.get(channel, 0) >= CHAINS_MAX:
            request = replace(request, answers_max=1)  # a call is over with its first answer
            return await broker.call(request, wait_ms=request.wait_ms)
        _chains[channel] = _chains.get(channel, 0) + 1
        self._broker = broker
        self._channel = channel
        waiter: asyncio.Future[tuple[Answer, memoryview] | None]
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            self._send(channel, request)
            return await waiter
        finally:
            _chains[channel] -= 1
            calling = self._calling
            self._calling = None
            self._waiter = self._broker = self._channel = None
            if calling is not None:
                calling.cancel()

    def end(self) -> None:
        """End the pull that is under way: `run` returns None, and the messages that it would have
        brought are pulled again.
        """
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _send(self, channel: Channel, request: Pull) -> None:
        timeout_ms = self._timeout_ms + request.wait_ms
        self._calling = channel.begin(
            request, timeout_ms=timeout_ms, on_answer=self._answered, on_part=self._came
        )

    def _came(self, answer: Answer, payload: memoryview) -> None:
        """Take an answer that is followed by another."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            client = self._client
            if not client.take_at_once(answer, payload):
                waiter.set_result((answer, payload))
            elif client.broker is not self._broker or not client.may_pull():
                waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 - the task decides
            _fail(waiter, error)

    def _answered(self, calling: Calling) -> None:
        waiter, channel = self._waiter, self._channel
        if waiter is None or channel is None or waiter.done():
            return
        try:
            answer, payload = calling.result()
            client = self._client
            if not client.take_at_once(answer, payload):
                waiter.set_result((answer, payload))
            elif client.broker is self._broker and client.may_pull() and not channel.closed:
                self._send(channel, client.pull_request())
            else:
                waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 - the task decides
            _fail(waiter, error)


def _fail(waiter: asyncio.Future[tuple[Answer, memoryview] | None], error: Exception) -> None:
    waiter.set_exception(error)
    waiter.exception()  # marks it as retrieved: the task may have been cancelled

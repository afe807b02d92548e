"""Pulls a partition repeatedly: a callback handles each answer, and sends the next pull.

    task ─▶ PULL ─▶ answer: simple? ─ yes ─▶ handed out ─▶ next answer, or PULL ─▶ …
      ▲                        │               │ paused, full, moved
      ╰──── no, or an error ───┴───────────────╯

A broker sends several answers to one pull as long as they are small. The first one that the
callback cannot hand out ends the chain; later answers are dropped, and pulled again.

Meanwhile, the partition's task waits; it handles errors and the answers for which something must be
awaited. A message therefore reaches a worker one event-loop iteration after its bytes arrive, and
the next pull is in flight while its handler runs.
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
"""The maximum number of chains on one channel. Further pulls queue at the `BrokerClient`. Together
they stay below a broker's limit.
"""
_chains: WeakKeyDictionary[Channel, int] = WeakKeyDictionary()


class ChainedClient(Protocol):
    """The interface of a pull client to its pull chain."""

    @property
    def broker(self) -> BrokerClient:
        """The client of the partition's broker."""
        ...

    def pull_request(self) -> Pull:
        """Return the next pull request."""
        ...

    def try_hand_out(self, answer: Answer, payload: memoryview) -> bool:
        """Hand out the messages of an answer. If something must be awaited first, return False and
        do nothing.
        """
        ...

    def may_pull(self) -> bool:
        """Return True if the next pull can be sent without waiting."""
        ...


class PullChain:
    """
    Sends the pulls of one partition.

    Args:
        timeout_ms: the timeout of a call, in addition to the time that the broker may wait.
    """

    __slots__ = ("_broker", "_call", "_channel", "_client", "_timeout_ms", "_waiter")

    def __init__(self, client: ChainedClient, *, timeout_ms: int) -> None:
        self._client = client
        self._timeout_ms = timeout_ms
        self._waiter: asyncio.Future[tuple[Answer, memoryview] | None] | None = None
        """The future that the task waits for while a chain runs."""
        self._broker: BrokerClient | None = None
        self._channel: Channel | None = None
        self._call: Calling | None = None

    @property
    def is_in_flight(self) -> bool:
        """True while a pull is in flight."""
        return self._call is not None and not self._call.done()

    async def run(self) -> tuple[Answer, memoryview] | None:
        """
        Pull until the task is needed.

        Returns:
            An answer for the task to handle; None if all were handled and the next pull must wait.

        Raises:
            KeylaneError: a call to the broker failed, or a batch cannot be decoded.
        """
        broker, request = self._client.broker, self._client.pull_request()
        channel = await broker.channel()
        if _chains.get(channel, 0) >= CHAINS_MAX:
            request = replace(request, answers_max=1)  # a plain call has one answer
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
            call = self._call
            self._call = None
            self._waiter = self._broker = self._channel = None
            if call is not None:
                call.cancel()

    def interrupt(self) -> None:
        """Cancel the pull in flight: `run` returns None, and the messages are pulled again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _send(self, channel: Channel, request: Pull) -> None:
        timeout_ms = self._timeout_ms + request.wait_ms
        self._call = channel.begin(
            request, timeout_ms=timeout_ms, on_answer=self._on_answer, on_part=self._on_part
        )

    def _on_part(self, answer: Answer, payload: memoryview) -> None:
        """Handle an answer that is followed by another."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            client = self._client
            if not client.try_hand_out(answer, payload):
                waiter.set_result((answer, payload))
            elif client.broker is not self._broker or not client.may_pull():
                waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 - the task decides
            _fail(waiter, error)

    def _on_answer(self, call: Calling) -> None:
        waiter, channel = self._waiter, self._channel
        if waiter is None or channel is None or waiter.done():
            return
        try:
            answer, payload = call.result()
            client = self._client
            if not client.try_hand_out(answer, payload):
                waiter.set_result((answer, payload))
            elif client.broker is self._broker and client.may_pull() and not channel.closed:
                self._send(channel, client.pull_request())
            else:
                waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 - the task decides
            _fail(waiter, error)


def _fail(waiter: asyncio.Future[tuple[Answer, memoryview] | None], error: Exception) -> None:
    waiter.set_exception(error)
    waiter.exception()  # mark it as retrieved, because the task may be cancelled

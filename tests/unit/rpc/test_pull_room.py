"""Pulls that wait take no capacity from acks, acquires and releases; too many pulls take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict

import pytest

from keylane.protocol.errors import OverloadedError
from keylane.protocol.frames import Ack, Acked, Batches, Pull, PullShared
from keylane.protocol.limits import IN_FLIGHT_PER_CONNECTION_MAX
from keylane.rpc import client as client_module
from keylane.rpc.client import BrokerClient
from keylane.rpc.plane import data_plane
from keylane.rpc.server import Server

SESSION = "a" * 16
WHO = ("g", SESSION, 1)


class IdleBroker:
    """Has no messages: a pull waits for its whole time, or until it is let go; an ack is answered
    at once.
    """

    def __init__(self) -> None:
        self.let_go: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        """By partition."""
        self.waiting = 0
        self.waiting_max = 0
        self.pulled: set[int] = set()
        self.waits_ms: list[int] = []

    async def __call__(self, request, _payload):
        if isinstance(request, Ack):
            return Acked(0), b""
        self.pulled.add(request.partition_id)
        self.waits_ms.append(request.wait_ms)
        self.waiting += 1
        self.waiting_max = max(self.waiting_max, self.waiting)
        try:
            async with asyncio.timeout(request.wait_ms / 1000):
                await self.let_go[request.partition_id].wait()
        except TimeoutError:
            pass
        finally:
            self.waiting -= 1
        return Batches(0, 0, 0, False), b""


@pytest.fixture
async def broker():
    return IdleBroker()


@pytest.fixture
async def server(broker):
    server = Server([], data_handler=broker)
    await server.start("127.0.0.1", 0)
    yield server
    await server.stop()


@pytest.fixture
async def channel(network, server):
    channel = await network.open_channel(server.address, timeout_ms=5_000)
    yield channel
    await channel.close()


@contextlib.contextmanager
def started(*calls):
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def pull(channel, partition_id: int, *, shared: bool = False, wait_ms: int = 30_000):
    request = Pull(partition_id, *WHO, 0, 1, wait_ms)
    if shared:
        request = PullShared(partition_id, *WHO, 1, 1, wait_ms, 1_000)
    return channel.call(request, timeout_ms=60_000)


def ack(channel):
    return channel.call(Ack(1, *WHO, ()), timeout_ms=2_000)


@pytest.mark.parametrize("shared", [False, True])
async def test_ack_is_answered_however_many_pulls_wait(channel, broker, shared):
    """Even if more pulls wait than a connection may have other calls."""
    count = IN_FLIGHT_PER_CONNECTION_MAX + 100
    with started(*(pull(channel, number, shared=shared) for number in range(count))):
        await until(lambda: broker.waiting == count)
        for _ in range(IN_FLIGHT_PER_CONNECTION_MAX + 1):
            answer, _ = await ack(channel)
            assert isinstance(answer, Acked)


async def test_pulls_beyond_their_limit_are_refused(channel, broker, monkeypatch):
    """The refusal is typed and costs other pulls nothing; another pull is accepted when one
    ends.
    """
    monkeypatch.setattr(data_plane, "PULLS_PER_CONNECTION_MAX", 3)
    with started(*(pull(channel, number) for number in (1, 2, 3))) as pulls:
        await until(lambda: broker.waiting == 3)
        for _ in range(IN_FLIGHT_PER_CONNECTION_MAX + 1):
            with pytest.raises(OverloadedError, match="at most 3 pulls"):
                await pull(channel, 4)
        await ack(channel)
        broker.let_go[1].set()
        await pulls[0]
        with started(pull(channel, 5)):
            await until(lambda: 5 in broker.pulled)


async def test_clients_pulls_take_turns(network, server, broker, monkeypatch):
    """Of many partitions some wait at the broker, each for a short time, and every one comes in
    soon.
    """
    monkeypatch.setattr(client_module, "PULLS_AT_ONCE_MAX", 4)
    monkeypatch.setattr(client_module, "PULL_TURN_MS", 50)
    client = BrokerClient(network, server.address)

    async def pull_on(partition_id: int) -> None:
        while True:
            request = Pull(partition_id, *WHO, 0, 1, 30_000)
            await client.call(request, wait_ms=30_000)

    with started(*(pull_on(number) for number in range(3))) as few:
        await until(lambda: broker.waiting == 3)
        assert set(broker.waits_ms) == {30_000}, (
            "while there is room they wait for as long as they want"
        )
        with started(*(pull_on(number) for number in range(3, 20))):
            await until(lambda: len(broker.pulled) == 20)
            await client.call(Ack(1, *WHO, ()))
            assert broker.waiting_max == 4
        assert not any(task.done() for task in few)
    await client.close()

"""A client's connections are opened once, closed completely, and can be opened again."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from keylane.protocol.errors import ClosedError, NotSentError, UnreachableError
from keylane.protocol.frames import Append
from keylane.rpc.connections import AT_ONCE_MAX, PRUNE_MIN, Connections, clean_up, gather_limited
from keylane.rpc.http_network import HttpNetwork


async def appended(connections: Connections, address: str) -> None:
    await connections.broker_at(address).call(Append(1))


async def test_broker_has_one_client(server, serve):
    """However often it is requested; another address has another client."""
    connections = Connections(None, timeout_ms=5_000)
    connections.open()
    other = await serve()
    for broker in (server, server, other):
        await appended(connections, broker.address)
    assert (server.connections, other.connections) == (1, 1)
    await connections.close()
    assert connections.network is None


async def test_connections_use_a_new_network_when_opened_again(server):
    """Nothing of the closed network is reused."""
    connections = Connections(None, timeout_ms=5_000)
    for _ in range(2):
        connections.open()
        await appended(connections, server.address)
        await connections.close()
    await connections.close()


async def test_given_network_stays_open_when_connections_are_closed(server, network):
    """Its owner closes it; only the channels made here are closed."""
    connections = Connections(network, timeout_ms=5_000)
    assert connections.open() is network
    await appended(connections, server.address)
    await connections.close()
    channel = await network.open_channel(server.address, timeout_ms=5_000)
    await channel.call(Append(1), timeout_ms=5_000)
    await channel.close()


async def test_clean_up_is_finished_when_its_waiter_is_cancelled():
    """The cancellation is raised after the work is done; a second one changes nothing."""
    steps = []

    async def work() -> None:
        for step in range(3):
            await asyncio.sleep(0.02)
            steps.append(step)

    waiter = asyncio.ensure_future(clean_up(work))
    for _ in range(2):
        await asyncio.sleep(0.01)
        waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert steps == [0, 1, 2]


@pytest.mark.parametrize("turns", range(4))
def test_clean_up_is_finished_when_the_event_loop_ends_meanwhile(turns: int):
    """`asyncio.run` cancels all remaining tasks, even those that clean up or are about to."""
    steps = []

    async def work() -> None:
        await asyncio.sleep(0.02)
        steps.append("done")

    async def program() -> None:
        waiting = asyncio.create_task(clean_up(work))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not waiting.done()

    asyncio.run(program())
    assert steps == ["done"]


async def test_clean_up_passes_on_what_its_work_raised():
    async def work() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await clean_up(work)


async def test_broker_of_closed_connections_is_a_typed_error():
    """As for a caller that waited for an address while its client was closed."""
    connections = Connections(None, timeout_ms=5_000, what="producer")
    connections.open()
    await connections.close()
    with pytest.raises(ClosedError, match="the producer is not open") as refused:
        connections.broker_at("127.0.0.1:1")
    assert refused.value.message == "the producer is not open"
    assert "`async with` block" in refused.value.hint


async def test_broker_clients_are_closed_when_a_caller_makes_another_one_meanwhile():
    """A task of the client may continue while another one closes it."""
    connections = Connections(None, timeout_ms=5_000, what="reader")
    connections.open()
    for port in (1, 2):
        connections.broker_at(f"127.0.0.1:{port}")
    asyncio.get_running_loop().call_soon(connections.broker_at, "127.0.0.1:3")
    await connections.close()
    assert connections.network is None


async def test_check_refuses_when_the_client_is_about_to_be_closed():
    connections = Connections(None, timeout_ms=5_000, what="reader")
    connections.open()
    connections.check()
    connections.request_close()
    with pytest.raises(ClosedError, match="the reader is being closed"):
        connections.check()
    await connections.close()


async def test_calls_of_a_closed_network_are_typed_errors():
    """aiohttp raises RuntimeError; a task of the client may continue while another one closes
    it.
    """
    network = HttpNetwork()
    await network.close()
    with pytest.raises(ClosedError):
        await network.control("GET", "127.0.0.1:1", "/v1/health", dict, timeout_ms=1_000)
    with pytest.raises(ClosedError):
        await network.open_channel("127.0.0.1:1", timeout_ms=1_000)


async def test_calls_in_turns_are_not_all_under_way_at_once():
    """A server accepts 1,000 connections; a reader of as many partitions was refused."""
    under_way: list[int] = []
    seen = 0

    async def call(number: int) -> int:
        nonlocal seen
        under_way.append(number)
        seen = max(seen, len(under_way))
        await asyncio.sleep(0)
        under_way.remove(number)
        return -number

    assert await gather_limited(call, range(1_000)) == [-number for number in range(1_000)]
    assert seen == AT_ONCE_MAX


async def test_calls_in_turns_have_ended_when_the_first_error_is_raised():
    """A retry has no earlier calls beside the new ones."""
    under_way: set[int] = set()

    async def call(number: int) -> None:
        under_way.add(number)
        try:
            await asyncio.sleep(0 if number == 3 else 3_600)
            raise NotSentError(f"call {number}")
        finally:
            under_way.remove(number)

    with pytest.raises(NotSentError, match="call 3"):
        await gather_limited(call, range(1_000))
    assert not under_way


async def test_brokers_that_are_gone_have_no_clients_for_good(serve):
    """Brokers return at other addresses: a client that ran for months kept something of each."""
    connections = Connections(None, timeout_ms=5_000)
    connections.open()
    stays, leaves = await serve(), await serve()
    held = connections.broker_at(leaves.address)
    for broker in (stays, leaves):
        await appended(connections, broker.address)
    channel = weakref.ref(held.live_channel)
    await leaves.stop()
    for number in range(10 * PRUNE_MIN):
        with pytest.raises(UnreachableError):
            await appended(connections, f"127.0.1.{1 + number}:1")
    with pytest.raises(UnreachableError):
        await held.call(Append(1))
    gc.collect()
    assert channel() is None, "a connection that has ended keeps its buffers"
    assert len(connections._brokers.values()) <= PRUNE_MIN + 2
    assert connections.broker_at(leaves.address) is held
    await appended(connections, stays.address)
    assert stays.connections == 1, "its connection was kept"
    await connections.close()


async def test_connection_is_closed_when_its_client_had_none_for_long(serve):
    """A holder of the client used it again after it was dropped."""
    connections = Connections(None, timeout_ms=5_000)
    connections.open()
    broker = await serve()
    held = connections.broker_at(broker.address)
    for number in range(2 * PRUNE_MIN):
        connections.broker_at(f"127.0.1.{1 + number}:1")
    await held.call(Append(1))
    channel = held.live_channel
    del held
    await appended(connections, broker.address)
    assert broker.connections == 1
    await connections.close()
    assert channel.closed

"""What a client has open is opened once, closed whole, and can be opened again."""

from __future__ import annotations

import asyncio

import pytest

from keylane.protocol.errors import ClosedError
from keylane.protocol.frames import Append
from keylane.rpc.connections import Connections, clean_up


async def appended(connections: Connections, address: str) -> None:
    await connections.broker_at(address).call(Append(1))


async def test_broker_has_one_client(server, serve):
    """However often it is asked for; another address has another."""
    connections = Connections(None, timeout_ms=5_000)
    connections.open()
    other = await serve()
    for broker in (server, server, other):
        await appended(connections, broker.address)
    assert (server.connections, other.connections) == (1, 1)
    await connections.close()
    assert connections.network is None


async def test_connections_use_a_new_network_when_opened_again(server):
    """Nothing of the closed network is used again."""
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
    """The cancellation is passed on, after the work; a second one changes nothing."""
    steps = []

    async def work() -> None:
        for step in range(3):
            await asyncio.sleep(0.02)
            steps.append(step)

    waiter = asyncio.ensure_future(clean_up(work()))
    for _ in range(2):
        await asyncio.sleep(0.01)
        waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert steps == [0, 1, 2]


async def test_clean_up_passes_on_what_its_work_raised():
    async def work() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await clean_up(work())


async def test_broker_of_closed_connections_is_a_typed_error():
    """As for a caller that waited for an address while its client was closed."""
    connections = Connections(None, timeout_ms=5_000, what="producer")
    connections.open()
    await connections.close()
    with pytest.raises(ClosedError, match="the producer is not open") as refused:
        connections.broker_at("127.0.0.1:1")
    assert refused.value.message == "the producer is not open"
    assert "`async with` block" in refused.value.hint

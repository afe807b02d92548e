"""Several metaservers on one database: a change at one reaches the clients of the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Grants, Heartbeat, Join, Leave, ReleaseGrant
from keylane.protocol.errors import NotSentError
from keylane.protocol.routing import route_table
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.hosting_broker import HostingBroker, hosting_broker

A, B = "a" * 16, "b" * 16
SOON_S = 8.0
"""Before a heartbeat has waited for a third of its ttl, on a busy machine too."""


class Pair(NamedTuple):
    first: MetaClient
    second: MetaClient
    broker: HostingBroker


@pytest.fixture
async def pair(tmp_path: Path, database: dict[str, str]) -> AsyncIterator[Pair]:
    network = HttpNetwork()
    settings = MetaserverSettings(data=tmp_path, port=0, poll_ms=100, repair_ms=100, **database)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(network.close)
        running = [await stack.enter_async_context(running_metaserver(settings)) for _ in range(2)]
        first, second = (MetaClient(network, [each.address], timeout_ms=60_000) for each in running)
        broker = await stack.enter_async_context(hosting_broker(first, "left"))
        yield Pair(first, second, broker)


def held(grants: Grants) -> dict[int, int]:
    return {grant.partition.partition_id: grant.token for grant in grants.grants}


async def test_release_at_one_metaserver_answers_a_heartbeat_at_the_other(pair: Pair) -> None:
    """The long poll ends within the other metaserver's poll interval."""
    await pair.first.create_subject(CreateSubject(subject="s", partitions=2))
    await pair.first.call(endpoints.JOIN, Join(subject="s", group="g", session=A))
    first = await pair.first.call(endpoints.HEARTBEAT, Heartbeat(session=A))
    polling = asyncio.create_task(
        pair.first.call(
            endpoints.HEARTBEAT, Heartbeat(session=A, known_version=first.version, wait_ms=30_000)
        )
    )
    await asyncio.sleep(0.05)
    start = time.monotonic()
    await pair.second.call(endpoints.JOIN, Join(subject="s", group="g", session=B))
    kept = await polling
    assert time.monotonic() - start < SOON_S
    assert len(kept.grants) == 1
    (gone,) = held(first).keys() - held(kept).keys()

    empty = await pair.second.call(endpoints.HEARTBEAT, Heartbeat(session=B))
    waiting = asyncio.create_task(
        pair.second.call(
            endpoints.HEARTBEAT, Heartbeat(session=B, known_version=empty.version, wait_ms=30_000)
        )
    )
    await asyncio.sleep(0.05)
    start = time.monotonic()
    ask = ReleaseGrant(session=A, partition_id=gone, token=held(first)[gone])
    await pair.first.call(endpoints.RELEASE, ask)
    taken = await waiting
    assert time.monotonic() - start < SOON_S
    assert held(taken).keys() == {gone}
    assert held(taken)[gone] > max(held(first).values())
    await pair.first.call(endpoints.LEAVE, Leave(session=B))
    assert len((await pair.second.call(endpoints.HEARTBEAT, Heartbeat(session=A))).grants) == 2


async def test_new_address_at_one_metaserver_answers_a_route_at_the_other(pair: Pair) -> None:
    """A broker's new address ends the wait for a route at the other metaserver."""
    await pair.first.create_subject(CreateSubject(subject="s"))
    waiting = asyncio.create_task(pair.second.route("s", known_version=1, wait_ms=30_000))
    await asyncio.sleep(0.15)
    start = time.monotonic()
    async with hosting_broker(pair.first, "left", pair.broker.broker_id) as moved:
        route = await waiting
    assert time.monotonic() - start < SOON_S
    assert {partition.address for partition in route.partitions} == {moved.address}


async def test_concurrent_creations_make_one_subject(pair: Pair) -> None:
    """The same subject created at both metaservers, many times at once, is one subject with one
    route.
    """
    ask = CreateSubject(subject="s", partitions=16)
    made = await asyncio.gather(
        *(meta.create_subject(ask) for meta in (pair.first, pair.second) for _ in range(4))
    )
    assert all(route == made[0] for route in made)
    assert len(route_table(made[0].route)) == 1024
    assert len(made[0].route.partitions) == len(pair.broker.hosted) == 16


async def test_clients_continue_when_one_metaserver_ends(tmp_path: Path) -> None:
    """They find sessions, tokens and expiry at the other metaserver."""
    network = HttpNetwork()
    settings = MetaserverSettings(data=tmp_path, port=0, poll_ms=100)
    async with running_metaserver(settings) as staying:
        async with running_metaserver(settings) as ending:
            meta = MetaClient(network, [ending.address, staying.address])
            async with hosting_broker(meta, "left"):
                await meta.create_subject(CreateSubject(subject="s", partitions=2))
                await meta.call(
                    endpoints.JOIN, Join(subject="s", group="g", session=A, ttl_ms=1_000)
                )
                first = await meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
        with pytest.raises(
            NotSentError
        ):  # a heartbeat asks one address; the next one goes to the other
            await meta.call(endpoints.HEARTBEAT, Heartbeat(session=A))
        assert await meta.call(endpoints.HEARTBEAT, Heartbeat(session=A)) == first
        await meta.call(endpoints.JOIN, Join(subject="s", group="g", session=B))
        start = time.monotonic()
        known, taken = -1, {}
        while len(taken) < 2 and time.monotonic() - start < 60:
            grants = await meta.call(
                endpoints.HEARTBEAT, Heartbeat(session=B, known_version=known, wait_ms=20_000)
            )
            known, taken = grants.version, held(grants)
        assert len(taken) == 2
        assert time.monotonic() - start < SOON_S
    await network.close()

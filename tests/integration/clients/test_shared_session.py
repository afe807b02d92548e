"""Clients of one event loop speak to metaservers on kept connections that they share."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keylane import Consumer
from keylane.rpc import shared_session as module
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.shared_session import shared_session
from support.cluster import Cluster


@asynccontextmanager
async def networks(count: int) -> AsyncIterator[list[HttpNetwork]]:
    made = [HttpNetwork() for _ in range(count)]
    try:
        yield made
    finally:
        for network in made:
            await network.close()


def kept(network: HttpNetwork) -> int:
    """Connections that wait for a call."""
    connector = network._session.connector
    return 0 if connector is None else sum(map(len, connector._conns.values()))


async def test_clients_take_turns_on_one_connection(shared_cluster: Cluster):
    async with networks(3) as made:
        before = kept(made[0])
        for network in made:
            assert (await MetaClient(network, [shared_cluster.meta]).health()).ready
        assert kept(made[0]) <= before + 1
        assert len({id(network._session) for network in made}) == 1


async def test_client_that_closes_leaves_the_others_connected(shared_cluster: Cluster):
    async with networks(2) as (first, second):
        await MetaClient(first, [shared_cluster.meta]).health()
        await first.close()
        await first.close()
        assert (await MetaClient(second, [shared_cluster.meta]).health()).ready


async def test_consumer_goes_on_when_another_one_closes(shared_cluster: Cluster):
    """Its heartbeat waits on a connection of the session that the other one leaves."""
    await shared_cluster.create("session-shared", partitions=1)

    async def handle(_message: object) -> None: ...

    def consumer(group: str) -> Consumer:
        return Consumer(
            shared_cluster.meta, subject="session-shared", group=group, handler=handle, ttl_ms=2_000
        )

    async with consumer("stays") as stays:
        for _ in range(3):
            async with consumer("leaves"):
                await asyncio.sleep(0.5)
        await asyncio.sleep(1.5)
        assert stays.assignment


def test_client_after_the_last_one_has_a_session_of_its_own():
    async def run() -> None:
        async with networks(1) as (before,):
            pass
        assert before._session.closed
        async with networks(1) as (after,):
            assert not after._session.closed

    asyncio.run(run())


def test_child_process_does_not_speak_on_connections_of_its_parent(monkeypatch):
    """They would read each other's answers."""

    async def run() -> None:
        parents = shared_session("parent")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        childs = shared_session("child")
        assert childs is not parents
        await childs.leave("child")
        await parents.leave("parent")

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning")
@pytest.mark.parametrize("closes", [True, False])
def test_event_loop_is_not_kept_by_its_session(closes):
    """Also if its clients were never closed."""

    async def run() -> int:
        shared = shared_session("user")
        if closes:
            await shared.leave("user")
        return id(asyncio.get_running_loop())

    gc.collect()
    keys = {asyncio.run(run()) for _ in range(3)}
    gc.collect()
    assert keys.isdisjoint(module._sessions)

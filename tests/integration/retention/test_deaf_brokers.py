"""Brokers that refuse to be told of groups do not delay the others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from keylane.metaserver.cluster import announcements
from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Join
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.hosting_broker import HostingBroker

PARTITIONS = 2


async def moved(meta: MetaClient, subject: str, to: str) -> None:
    """A new subject's partitions are continued elsewhere."""
    view = await meta.create_subject(CreateSubject(subject=subject, partitions=2 * PARTITIONS))
    ids = tuple(partition.partition_id for partition in view.route.partitions)
    await meta.call(
        endpoints.RESHAPE, Reshape(kind=OperationKind.MOVE, partition_ids=ids, broker_group=to)
    )
    while (await meta.call(endpoints.OPERATIONS, subject=subject)).operations[
        0
    ].state is not OperationState.DONE:
        await asyncio.sleep(0.02)


async def test_broker_that_refuses_a_group_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more refusals than a round asks for, partitions behind them are known to their broker in
    one look.
    """
    monkeypatch.setattr(announcements, "PARTITIONS_MAX", PARTITIONS)
    settings = MetaserverSettings(
        data=tmp_path, port=0, poll_ms=50, expire_ms=200, broker_ttl_ms=600_000
    )
    source, deaf, hearing = (HostingBroker(name) for name in ("a", "b", "c"))
    deaf.deaf = True
    async with AsyncExitStack() as stack:
        network = HttpNetwork()
        stack.push_async_callback(network.close)
        running = await stack.enter_async_context(running_metaserver(settings))
        meta = MetaClient(network, [running.address])
        for broker in (source, deaf, hearing):
            await broker.start()
            stack.push_async_callback(broker.stop)
        await source.report(meta)
        async with asyncio.timeout(60):
            for subject in ("first", "second"):  # "a" alone is there to be created on
                await meta.create_subject(CreateSubject(subject=subject, partitions=2 * PARTITIONS))
            for broker in (deaf, hearing):
                await broker.report(meta)
            await moved(meta, "first", "b")
            await moved(meta, "second", "c")
            assert max(deaf.hosted) < min(hearing.hosted)
            for subject, letter in (("first", "b"), ("second", "c")):
                await meta.call(
                    endpoints.JOIN, Join(subject=subject, group="g", session=letter * 16)
                )
            while hearing.known != {partition_id: {"g"} for partition_id in hearing.hosted}:
                await asyncio.sleep(0.05)
            assert deaf.known == {}
            deaf.deaf = False
            while deaf.known != {partition_id: {"g"} for partition_id in deaf.hosted}:
                await asyncio.sleep(0.05)


async def test_broker_that_asks_for_the_groups_of_a_partition_is_told(tmp_path: Path) -> None:
    """Also without a group on the subject, and although SQL notes that it has heard."""
    settings = MetaserverSettings(
        data=tmp_path, port=0, poll_ms=50, expire_ms=200, broker_ttl_ms=600_000
    )
    broker = HostingBroker("a")
    async with AsyncExitStack() as stack:
        network = HttpNetwork()
        stack.push_async_callback(network.close)
        running = await stack.enter_async_context(running_metaserver(settings))
        meta = MetaClient(network, [running.address])
        await broker.start()
        stack.push_async_callback(broker.stop)
        await broker.report(meta)
        async with asyncio.timeout(60):
            for subject in ("empty", "read"):
                await meta.create_subject(CreateSubject(subject=subject, partitions=2))
            await meta.call(endpoints.JOIN, Join(subject="read", group="g", session="d" * 16))
            assert broker.known == {3: {"g"}, 4: {"g"}}
            broker.known.clear()
            broker.untold = {1, 2, 3, 99}
            await broker.report(meta)
            while broker.untold != {99}:
                await asyncio.sleep(0.02)
            assert broker.known == {1: set(), 2: set(), 3: {"g"}}

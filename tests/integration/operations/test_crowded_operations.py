"""As many operations wait as are driven at once; an operation behind them is still driven."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from keylane.metaserver.operations import driver as operations_driver
from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject
from keylane.protocol.operations import OperationKind, OperationState, OperationView, Reshape
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.hosting_broker import HostingBroker

ROOM = 4
LEASE_MS = 200
REFUSED = [f"refused{number}" for number in range(ROOM)]


@asynccontextmanager
async def metaserver(folder: Path) -> AsyncIterator[MetaClient]:
    """A metaserver with brokers that report themselves once, and with short leases."""
    settings = MetaserverSettings(
        data=folder, port=0, poll_ms=50, operation_lease_ms=LEASE_MS, broker_ttl_ms=600_000
    )
    network = HttpNetwork()
    try:
        async with running_metaserver(settings) as running:
            yield MetaClient(network, [running.address])
    finally:
        await network.close()


async def latest(meta: MetaClient, subject: str) -> OperationView:
    return (await meta.call(endpoints.OPERATIONS, subject=subject)).operations[0]


async def moved(meta: MetaClient, subject: str, to: str) -> None:
    """Begin to move a new subject's only partition, and wait until its broker has refused."""
    view = await meta.create_subject(CreateSubject(subject=subject, partitions=1))
    ids = (view.route.partitions[0].partition_id,)
    await meta.call(
        endpoints.RESHAPE, Reshape(kind=OperationKind.MOVE, partition_ids=ids, broker_group=to)
    )
    while not (await latest(meta, subject)).problem:
        await asyncio.sleep(0.02)


async def done(meta: MetaClient, subject: str) -> None:
    async with asyncio.timeout(60):
        while (await latest(meta, subject)).state is not OperationState.DONE:
            await asyncio.sleep(0.05)


async def test_refused_operations_keep_no_other_from_being_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A younger operation is done all the same. The waiting ones name their reason, and are done when
    their broker answers.
    """
    monkeypatch.setattr(operations_driver, "CONCURRENT_OPERATIONS_MAX", ROOM)
    source, busy, well = (HostingBroker(name) for name in ("source", "busy", "well"))
    async with AsyncExitStack() as stack:
        for broker in (source, busy, well):
            await broker.start()
            stack.push_async_callback(broker.stop)
        async with metaserver(tmp_path) as meta, asyncio.timeout(60):
            await source.report(meta)
            for subject in (*REFUSED, "free"):  # "source" alone is there to be created on
                await meta.create_subject(CreateSubject(subject=subject, partitions=1))
            busy.refuse_after = well.refuse_after = 0
            for broker in (busy, well):
                await broker.report(meta)
            for subject in REFUSED:
                await moved(meta, subject, "busy")
            await moved(meta, "free", "well")
        well.refuse_after = None
        # Otherwise the operation "free" might have no driver a moment earlier.
        await asyncio.sleep(2 * LEASE_MS / 1000)
        async with metaserver(tmp_path) as meta:  # which only resumes
            await done(meta, "free")
            for subject in REFUSED:
                view = await latest(meta, subject)
                assert view.state is OperationState.PLAN
                assert busy.refusal.message in view.problem
            busy.refuse_after = None
            for subject in REFUSED:
                await done(meta, subject)

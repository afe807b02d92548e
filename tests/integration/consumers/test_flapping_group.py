"""Groups whose consumers join and leave by the hundred cost other groups no session."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Heartbeat, Join, Leave
from keylane.protocol.errors import KeylaneError
from keylane.protocol.operations import OperationKind, Reshape
from support.brokers.hosting_broker import MetaAndBroker, running_house
from support.cluster import done_operation

QUIET = "a" * 32
TTL_MS = 30_000
"""Long, so that no session ends on a slow machine: how long renewals take is compared with how long
joins take.
"""
BEAT_SECONDS = 0.5
FLAPPING = 300
FLAPPING_GROUPS = 50
"""Each is settled by itself, so that the database has seconds of work waiting."""
SECONDS = 4.0


@pytest.fixture
async def house(tmp_path: Path, database: dict[str, str]) -> AsyncIterator[MetaAndBroker]:
    quick = {"broker_heartbeat_ms": 250, "broker_ttl_ms": TTL_MS}
    async with running_house(tmp_path, **quick, **database) as running:
        yield running


async def test_other_groups_and_brokers_keep_their_sessions(
    house: MetaAndBroker,
) -> None:
    """Renewals of a session, which reports drained partitions, and of a broker do not wait behind
    the joins of others, and joins are answered meanwhile.
    """
    meta, _, broker = house
    await meta.create_subject(CreateSubject(subject="s", partitions=64))
    parents = [partition.partition_id for partition in (await meta.route("s")).open_partitions()]
    resize = Reshape(kind=OperationKind.RESIZE, subject="s", partitions=128)
    (view,) = (await meta.call(endpoints.RESHAPE, resize)).operations
    sealing = asyncio.create_task(done_operation(meta, view))
    while not sealing.done():
        await broker.report(meta)
        await asyncio.wait([sealing], timeout=BEAT_SECONDS)
    await sealing
    await meta.call(
        endpoints.JOIN, Join(subject="s", group="quiet", session=QUIET, client="c", ttl_ms=TTL_MS)
    )
    undrained = iter(parents)
    until = time.monotonic() + SECONDS
    numbers = itertools.count()
    first_joins_s: list[float] = []
    """Of each consumer: they wait while groups are made."""

    async def timed(call: Awaitable[object], took_s: list[float]) -> None:
        began = time.monotonic()
        await call
        took_s.append(time.monotonic() - began)

    async def flap(begin_s: float) -> None:
        await asyncio.sleep(begin_s)
        joins_s = first_joins_s
        while time.monotonic() < until:
            number = next(numbers)
            session, group = f"{number:032x}", f"flapping{number % FLAPPING_GROUPS}"
            join = Join(subject="s", group=group, session=session, client="c", ttl_ms=TTL_MS)
            await timed(meta.call(endpoints.JOIN, join), joins_s)
            await meta.call(endpoints.LEAVE, Leave(session=session))
            joins_s = []

    renewals_s: list[float] = []
    # Not in one turn of the event loop, which is that of the clients and of the metaserver.
    begins_s = (BEAT_SECONDS * number / FLAPPING for number in range(FLAPPING))
    flapping = [asyncio.create_task(flap(begin_s)) for begin_s in begins_s]
    while time.monotonic() < until:
        drained = (next(undrained),)
        await timed(
            meta.call(endpoints.HEARTBEAT, Heartbeat(session=QUIET, drained=drained)), renewals_s
        )
        await timed(broker.report(meta), renewals_s)
        await asyncio.sleep(BEAT_SECONDS)
    granted = {
        grant.partition.partition_id
        for grant in (await meta.call(endpoints.HEARTBEAT, Heartbeat(session=QUIET))).grants
    }
    assert granted.isdisjoint(drained), "its report counted"
    ends = await asyncio.gather(*flapping, return_exceptions=True)
    assert [end for end in ends if end is not None and not isinstance(end, KeylaneError)] == []
    assert first_joins_s
    assert max(renewals_s) < statistics.median(first_joins_s) / 2

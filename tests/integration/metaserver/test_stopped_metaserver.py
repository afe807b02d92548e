"""All metaservers but one stop (SIGSTOP): they accept connections and answer nothing. No client
waits for them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane import Admin, Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.consumer.group.membership import LEAVE_TIMEOUT_MS
from support.cluster import Cluster, eventually, pause, resume
from support.postgres import Postgres

TTL_MS = 6_000
SHORT_TTL_MS = 4_000
CALL_TIMEOUT_MS = 3_000


def sharing_cluster(folder: Path, postgres: Postgres, metas: int) -> Cluster:
    """A broker and several metaservers on one PostgreSQL."""
    settings = f"database_url = {json.dumps(postgres.url())}\n"
    return Cluster(folder, 1, meta_settings=settings, metas=metas)


@pytest.fixture
def two_metas(tmp_path: Path, postgres: Postgres) -> Iterator[Cluster]:
    with sharing_cluster(tmp_path, postgres, 2) as cluster:
        yield cluster


@pytest.fixture
def three_metas(tmp_path: Path, postgres: Postgres) -> Iterator[Cluster]:
    with sharing_cluster(tmp_path, postgres, 3) as cluster:
        yield cluster


@pytest.mark.crash
async def test_stopped_metaserver_costs_no_lease(two_metas: Cluster) -> None:
    """All clients change to the other one in time: leases hold, new clients open, partitions change
    hands.
    """
    await two_metas.create("s", partitions=2)
    handled: list[Message] = []

    def consumer() -> Consumer:
        settings = ConsumerSettings(ttl_ms=TTL_MS)
        return Consumer(
            two_metas.addresses, subject="s", group="g", handler=handled.append, settings=settings
        )

    async with Producer(two_metas.addresses) as producer, consumer():
        await producer.send("s", b"0", key=b"k")
        await eventually(lambda: handled)
        await asyncio.sleep(1)  # one that stops in a transaction holds its rows for five seconds
        pause(two_metas.metas[0].process.pid)
        sent = 1
        until = asyncio.get_running_loop().time() + 1.5 * TTL_MS / 1000
        while asyncio.get_running_loop().time() < until:
            await producer.send("s", b"%d" % sent, key=b"k")
            sent += 1
            await asyncio.sleep(0.1)
        await eventually(lambda: len(handled) == sent)
        assert len({message.fencing_token for message in handled}) == 1, "it kept its lease"
        async with Producer(two_metas.addresses) as another, consumer():
            await another.send("s", b"%d" % sent, key=b"k")
            await eventually(lambda: len(handled) == sent + 1)
    assert [message.value for message in handled] == [b"%d" % number for number in range(sent + 1)]


@pytest.mark.crash
async def test_two_of_three_stopped_metaservers_cost_no_lease(three_metas: Cluster) -> None:
    """A consumer with a short ttl and something to report asks the third before its lease ends."""
    await three_metas.create("s", partitions=2)
    handled: list[Message] = []
    settings = ConsumerSettings(ttl_ms=SHORT_TTL_MS)
    consumer = Consumer(
        three_metas.addresses, subject="s", group="g", handler=handled.append, settings=settings
    )
    async with Producer(three_metas.addresses) as producer, consumer:
        await producer.send("s", b"0", key=b"k")
        await eventually(lambda: handled)
        await asyncio.sleep(SHORT_TTL_MS / 1000)
        for meta in three_metas.metas[:2]:
            pause(meta.process.pid)
        sent = 1
        began = asyncio.get_running_loop().time()
        nudged = False
        while (passed := asyncio.get_running_loop().time() - began) < 2 * SHORT_TTL_MS / 1000:
            if not nudged and passed > SHORT_TTL_MS / 5000:
                nudged = True
                consumer._last_opening.membership.nudge()
            await producer.send("s", b"%d" % sent, key=b"k")
            sent += 1
            await asyncio.sleep(0.05)
        await eventually(lambda: len(handled) == sent)
    assert len({message.fencing_token for message in handled}) == 1, "it kept its lease"
    assert [message.value for message in handled] == [b"%d" % number for number in range(sent)]


@pytest.mark.crash
async def test_close_waits_once_for_a_stopped_metaserver(tmp_path: Path) -> None:
    """However many parts the farewell has: one whole time-out, then LEAVE_TIMEOUT_MS for each that
    is left; acks are kept.
    """
    handled: list[Message] = []
    settings = ConsumerSettings(ttl_ms=TTL_MS, call_timeout_ms=CALL_TIMEOUT_MS)
    with Cluster(tmp_path, 1) as cluster:
        await cluster.create("s", partitions=4)
        async with Producer(cluster.meta) as producer:
            for number in range(20):
                await producer.send("s", b"%d" % number, key=b"%d" % number)
        consumer = Consumer(
            cluster.meta, subject="s", group="g", handler=handled.append, settings=settings
        )
        async with consumer:
            await eventually(lambda: len(handled) == 20)
            pause(cluster.metas[0].process.pid)
            began = time.monotonic()
            await consumer.close()
            took_ms = (time.monotonic() - began) * 1_000
        resume(cluster.metas[0].process.pid)
        assert took_ms < CALL_TIMEOUT_MS + 2 * LEAVE_TIMEOUT_MS + 1_500, "it was 3 time-outs before"
        async with Admin(cluster.meta) as admin:
            group = await admin.describe_group("s", "g")
        assert [partition.lag for partition in group.partitions] == [0, 0, 0, 0]

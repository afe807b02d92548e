"""One of two metaservers stops (SIGSTOP): it still takes connections and answers nothing.  Nobody waits for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster, eventually, pause
from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from postgres import Postgres

TTL_MS = 6_000


@pytest.fixture
def cluster(tmp_path: Path, postgres: Postgres) -> Iterator[Cluster]:
    """A broker and two metaservers on one PostgreSQL."""
    settings = f"database_url = {json.dumps(postgres.url())}\n"
    cluster = Cluster(tmp_path, 1, meta_settings=settings, metas=2)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.crash
async def test_a_stopped_metaserver_costs_no_lease(cluster: Cluster) -> None:
    """Everybody goes over to the other one in time: leases hold, new clients open, partitions can be changed hands."""
    await cluster.create("s", partitions=2)
    handled: list[Message] = []

    def consumer() -> Consumer:
        settings = ConsumerSettings(ttl_ms=TTL_MS)
        return Consumer(
            cluster.addresses, subject="s", group="g", handler=handled.append, settings=settings
        )

    async with Producer(cluster.addresses) as producer, consumer():
        await producer.send("s", b"0", key=b"k")
        await eventually(lambda: handled)
        pause(cluster.metas[0].process.pid)
        sent = 1
        until = asyncio.get_running_loop().time() + 1.5 * TTL_MS / 1000
        while asyncio.get_running_loop().time() < until:
            await producer.send("s", b"%d" % sent, key=b"k")
            sent += 1
            await asyncio.sleep(0.1)
        await eventually(lambda: len(handled) == sent)
        assert len({one.fencing_token for one in handled}) == 1, "it kept its lease"
        async with Producer(cluster.addresses) as another, consumer():
            await another.send("s", b"%d" % sent, key=b"k")
            await eventually(lambda: len(handled) == sent + 1)
    assert [one.value for one in handled] == [b"%d" % number for number in range(sent + 1)]

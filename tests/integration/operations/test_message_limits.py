"""The limit of one message of a subject in a real cluster: every way in refuses, and a change harms
nothing else.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import pyarrow as pa
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from keylane import Admin, Producer
from keylane.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    Reason,
)
from keylane.outbox import Outbox, RowChange, create_tables, outbox_status, redrive_failed
from support.cluster import Cluster
from support.outbox.rows import SETTINGS
from support.raising import raises
from support.server_process import run_keylane

META = "broker_heartbeat_ms = 200\nbroker_ttl_ms = 1500\n"
pytestmark = pytest.mark.cluster(meta_settings=META)
LIMIT = 4_096
LARGE = bytes(LIMIT)
"""With a key it is over the limit."""


async def set_limit(cluster: Cluster, subject: str, limit: int) -> None:
    async with Admin(cluster.meta) as admin:
        change = await admin.set_subject(subject, message_bytes_max=limit)
        await admin.wait(change.operation)


async def test_every_way_in_refuses_a_message_over_the_limit(cluster: Cluster):
    await cluster.create("unlimited", partitions=1)  # the brokers have reported themselves
    async with asyncio.timeout(60), Admin(cluster.meta) as admin:
        with pytest.raises(InvalidRequestError, match="1024"):
            await admin.create_subject("s", message_bytes_max=1_023)
        await admin.create_subject("s", partitions=2, message_bytes_max=LIMIT)
        with raises(Reason.SUBJECT_EXISTS, match="message_bytes_max 4096, not 1048576"):
            await admin.create_subject("s", partitions=2)
        assert (await admin.describe_subject("s")).message_bytes_max == LIMIT
        async with Producer(cluster.meta) as producer:
            early = producer.send("s", LARGE, key=b"k")
            behind = producer.send("s", b"1", key=b"k")
            with pytest.raises(MessageTooLargeError):
                await early
            await behind
            with pytest.raises(MessageTooLargeError):
                producer.send("s", LARGE, key=b"k")
            table = pa.table({"value": [LARGE + b"x", b"fits"]})
            with raises(Reason.ROWS_REFUSED, match="row 0: 4097 bytes, over 4096"):
                await producer.send_arrow("s", table, value="value")
            receipt = await producer.send_arrow("s", table, value="value", partial=True)
            assert (receipt.stored, list(receipt.refused)) == (1, [0])
            at_ms = time.time_ns() // 1_000_000 + 60_000
            with pytest.raises(MessageTooLargeError):
                await producer.send("s", LARGE + b"x", deliver_at=at_ms)
        url = f"http://{cluster.brokers[0].address}/v1/subjects/s"
        async with aiohttp.ClientSession() as session:
            for call in ("messages?key=k", f"scheduled?deliver_at={at_ms}"):
                async with session.post(f"{url}/{call}", data=LARGE + b"x") as answer:
                    told = await answer.json()
                    assert (answer.status, told["name"]) == (413, "MessageTooLargeError"), told
                    assert told["details"]["limit_bytes"] == LIMIT
        assert (await admin.verify()).ok


async def test_limit_changes_under_a_producer_and_harms_nothing_else(cluster: Cluster):
    """What was acked is stored; a message over the limit is given up alone; each key keeps its
    order.
    """
    await cluster.create("s", partitions=2)
    sent: dict[bytes, list[bytes]] = {b"%d" % key: [] for key in range(8)}
    refused = 0
    done = asyncio.Event()

    async def work(producer: Producer, key: bytes) -> None:
        nonlocal refused
        number = 0
        while not (done.is_set() and number % 10 == 0):
            number += 1
            value = b"%d" % number + (LARGE if number % 3 == 0 else b"")
            try:
                await producer.send("s", value, key=key)
            except MessageTooLargeError:
                refused += 1
                continue
            sent[key].append(value)

    async with asyncio.timeout(90), Producer(cluster.meta) as producer:
        working = [asyncio.create_task(work(producer, key)) for key in sent]
        await set_limit(cluster, "s", LIMIT)
        while not refused:
            await asyncio.sleep(0.01)
        with pytest.raises(MessageTooLargeError):
            await producer.send("s", LARGE, key=b"0")
        await set_limit(cluster, "s", 1 << 20)
        done.set()
        await asyncio.gather(*working)
        sent[b"0"].append(LARGE)
        await producer.send("s", LARGE, key=b"0")
    await cluster.check_history("s", sent)


async def test_outbox_refuses_a_row_and_sends_newer_ones_of_its_key(
    cluster: Cluster, tmp_path: Path
):
    """The limit was lowered when the outbox had a route; redriven under a higher limit the row is
    stored.
    """
    await cluster.create("s", partitions=1)
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'user.db'}")
    await create_tables(engine)
    async with asyncio.timeout(60), Outbox(cluster.meta, engine, settings=SETTINGS) as outbox:
        await outbox.send("s", LARGE, key=b"k")
        await set_limit(cluster, "s", LIMIT)
        for _ in range(2):
            with pytest.raises(MessageTooLargeError, match="4097 bytes"):
                await outbox.send("s", LARGE, key=b"k")
            await outbox.send("s", b"newer", key=b"k")
        status = await outbox_status(engine)
        assert (status.refused, status.failed, status.rows) == (2, 0, 2)
        assert [each.key for each in status.refused_rows] == [b"k", b"k"]
        assert "4097 bytes" in status.refused_rows[0].refusal
        assert not status.failed_rows
        await set_limit(cluster, "s", 1 << 20)
        await outbox.send("s", LARGE, key=b"k")
        assert await redrive_failed(engine) == RowChange(refused=2)
        while (await outbox_status(engine)).rows:
            await asyncio.sleep(0.05)
    await engine.dispose()
    values = [LARGE, b"newer", b"newer", LARGE, LARGE, LARGE]
    await cluster.check_history("s", {b"k": values})


async def test_command_sets_and_shows_the_limit(cluster: Cluster):
    await cluster.create("unlimited", partitions=1)

    async def keylane(*words: str) -> str:
        done = await asyncio.to_thread(run_keylane, "subject", *words, "--meta", cluster.meta)
        return done.stdout + done.stderr

    created = await keylane("create", "s", "--message-bytes-max", "2048")
    assert "s: strict, messages of at most 2048 bytes, route version 1" in created
    shown = await keylane("set", "s", "--message-bytes-max", "1048576")
    assert "s: message_bytes_max 2048 -> 1048576" in shown
    assert "at most" not in await keylane("describe", "s")
    assert "1024" in await keylane("set", "s", "--message-bytes-max", "1")

"""Rows of a subject that is deleted: those that may be stored fail, the others wait for a later
subject of the name.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from keylane import Admin
from keylane.outbox import Outbox, OutboxSettings, purge_failed
from keylane.protocol.errors import Reason
from support.cluster import Cluster, alert_cluster, delete_subject, pause
from support.outbox.rows import SETTINGS, drained, rows_left
from support.raising import raises

KEYS = [b"%d" % number for number in range(8)]


async def add(engine, outbox: Outbox, subject: str, value: bytes, key: bytes) -> None:
    async with engine.begin() as connection:
        await outbox.add(connection, subject, value, key=key)


async def begun(meta: str, subject: str) -> None:
    """Wait until a subject is being deleted: its broker, once it is back, stores nothing for it."""
    async with asyncio.timeout(20), Admin(meta) as admin:
        while not any(
            each.subject == subject and each.problem for each in await admin.list_subjects()
        ):
            await asyncio.sleep(0.02)


async def told(outbox: Outbox, subject: str, text: str) -> None:
    """Wait until the outbox says so of rows that wait."""
    async with asyncio.timeout(20):
        while text not in outbox.waiting.get(subject, ""):
            await asyncio.sleep(0.02)


async def test_rows_follow_to_the_next_subject_of_the_name_when_theirs_is_deleted(
    shared_cluster: Cluster, sqlite
):
    """They are not stored: they wait, in their order; the outbox says why, and rows of another
    subject go on.
    """
    subject = "outbox-deleted"
    await shared_cluster.create(subject, partitions=2)
    await shared_cluster.create("outbox-beside", partitions=2)
    sent: dict[bytes, list[bytes]] = {key: [] for key in KEYS}
    async with Outbox(shared_cluster.meta, sqlite, settings=SETTINGS) as outbox:
        for key in KEYS:
            await outbox.send(subject, b"of the old one", key=key)
        await delete_subject(shared_cluster.meta, subject)
        for number in range(5):
            for key in KEYS:
                for name in (subject, "outbox-beside"):
                    await add(sqlite, outbox, name, b"%d" % number, key)
                sent[key].append(b"%d" % number)
        await told(outbox, subject, "until an operator creates one of this name")
        async with asyncio.timeout(20):
            while await rows_left(sqlite) > len(KEYS) * 5:
                await asyncio.sleep(0.02)
        await shared_cluster.check_history("outbox-beside", sent)
        await shared_cluster.create(subject, partitions=3)
        await drained(sqlite)
        assert not outbox.waiting
    await shared_cluster.check_history(subject, sent)


@pytest.mark.parametrize("restarted", [False, True])
async def test_rows_that_may_be_stored_fail_when_their_subject_is_deleted(
    tmp_path: Path, sqlite, restarted: bool
):
    """No broker can tell any more; also by a process that takes the lease after the deletion.
    Other keys go on.
    """
    settings = OutboxSettings(rescan_ms=100, lease_ms=1_000, call_timeout_ms=500, batch_count=1)
    with alert_cluster(tmp_path, brokers=1) as cluster:
        (broker,) = cluster.brokers
        await cluster.create("s", partitions=1)
        outbox = Outbox(cluster.meta, sqlite, settings=settings)
        async with outbox:
            await outbox.send("s", b"before", key=b"k")
            pause(broker.process.pid)
            doubtful = asyncio.create_task(outbox.send("s", b"doubtful", key=b"k"))
            await told(outbox, "s", "500 ms")
            broker.kill()
            if not restarted:
                deleting = asyncio.create_task(delete_subject(cluster.meta, "s"))
                with raises(Reason.OUTBOX_ROW, match="subject was deleted") as failed:
                    await doubtful
                assert "redrive" in str(failed.value)
        if restarted:
            deleting = asyncio.create_task(delete_subject(cluster.meta, "s"))
            await asyncio.gather(doubtful, return_exceptions=True)
            await begun(cluster.meta, "s")
        broker.restart()
        await deleting
        async with outbox:  # no later subject of the name exists
            async with asyncio.timeout(20):
                while not (await outbox.status()).failed:
                    await asyncio.sleep(0.05)
            await cluster.create("s", partitions=1)
            await outbox.send("s", b"other", key=b"other")
            await add(sqlite, outbox, "s", b"newer", b"k")
            async with asyncio.timeout(20):
                while not (await outbox.status()).subjects[0].halted:
                    await asyncio.sleep(0.05)
            (row,) = (await outbox.status()).failed_rows
            assert (row.key, row.failure[:23]) == (b"k", "the subject was deleted")
            assert (await purge_failed(sqlite)).failed == 1
            await drained(sqlite)
        await cluster.check_history("s", {b"other": [b"other"], b"k": [b"newer"]})

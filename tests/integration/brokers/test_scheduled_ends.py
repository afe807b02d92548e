"""Scheduled messages that are listed, canceled by command, or dropped because their subject never
takes them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

from keylane import Admin, InvalidRequestError, Producer, ScheduledReceipt
from keylane.admin import CancelOutcome
from keylane.errors import Reason
from keylane.protocol import endpoints
from support.cluster import Cluster
from support.raising import raises
from support.server_process import run_keylane

SOON_MS = 1_500
LATER_MS = 4_000
"""Time enough for a change of the settings before."""
META = "broker_heartbeat_ms = 200\nbroker_ttl_ms = 1500\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Each test has a subject of its own."""
    with Cluster(tmp_path_factory.mktemp("cluster"), brokers=2, meta_settings=META) as cluster:
        yield cluster


async def keep(producer: Producer, subject: str, value: bytes, after_ms: int) -> ScheduledReceipt:
    at_ms = time.time_ns() // 1_000_000 + after_ms
    return await producer.send(subject, value, deliver_at=at_ms)


async def cancel_when_due(producer: Producer, receipt: ScheduledReceipt) -> CancelOutcome:
    """The outcome of a cancel once the broker has dealt with the message."""
    await asyncio.sleep(max(0.0, receipt.deliver_at_ms / 1000 - time.time()) + 0.5)
    return await producer.cancel(receipt)


async def delete(admin: Admin, subject: str) -> None:
    deletion = await admin.delete_subject(subject)
    while deletion.left:
        await asyncio.sleep(0.05)
        deletion = await admin.delete_subject(subject, subject_id=deletion.subject_id)


async def values_of(cluster: Cluster, subject: str) -> list[bytes]:
    async with Admin(cluster.meta) as admin:
        route = (await admin._metaserver_client.call(endpoints.SUBJECT, subject=subject)).route
    return [each.value for part in (await cluster.log(route)).values() for each in part]


async def test_message_of_a_deleted_subject_is_dropped_and_a_namesake_does_not_get_it(
    cluster: Cluster,
):
    await cluster.create("gone", partitions=2)
    async with (
        asyncio.timeout(60),
        Producer(cluster.meta) as producer,
        Admin(cluster.meta) as admin,
    ):
        receipts = [await keep(producer, "gone", b"old", SOON_MS) for _ in range(4)]
        await delete(admin, "gone")
        await cluster.create("gone", partitions=2)
        new = await keep_anew(cluster, "gone")
        for receipt in receipts:
            assert await cancel_when_due(producer, receipt) is CancelOutcome.DROPPED
        assert await cancel_when_due(producer, new) is CancelOutcome.DELIVERED
        told = [await admin.broker_health(each.address) for each in cluster.brokers]
        assert sum(health.details["scheduled"]["dropped"] for health in told) == 4
    assert await values_of(cluster, "gone") == [b"new"]


async def keep_anew(cluster: Cluster, subject: str) -> ScheduledReceipt:
    """By a producer that knows no earlier subject of the name."""
    async with Producer(cluster.meta) as producer:
        return await keep(producer, subject, b"new", SOON_MS)


async def test_message_over_a_limit_that_was_lowered_is_dropped_alone(cluster: Cluster):
    await cluster.create("lowered", partitions=1)
    async with (
        asyncio.timeout(60),
        Producer(cluster.meta) as producer,
        Admin(cluster.meta) as admin,
    ):
        large = await keep(producer, "lowered", bytes(5_000), LATER_MS)
        small = await keep(producer, "lowered", b"small", LATER_MS)
        change = await admin.set_subject("lowered", message_bytes_max=4_096)
        await admin.wait(change.operation)
        assert await cancel_when_due(producer, large) is CancelOutcome.DROPPED
        assert await producer.cancel(small) is CancelOutcome.DELIVERED
    assert await values_of(cluster, "lowered") == [b"small"]


async def test_list_says_which_messages_will_be_dropped(cluster: Cluster):
    """Their subject was deleted, or takes no message of their size any more; a broker's earlier
    route says neither.
    """
    for subject in ("doomed", "shrunk"):
        await cluster.create(subject, partitions=1)
    async with (
        asyncio.timeout(60),
        Producer(cluster.meta) as producer,
        Admin(cluster.meta) as admin,
    ):
        for subject in ("doomed", "shrunk"):
            await keep(producer, subject, bytes(5_000), 600_000)
        await keep(producer, "shrunk", b"small", 600_001)
        for subject in ("doomed", "shrunk"):
            listed = await admin.list_scheduled(subject=subject)
            assert not any(each.drop for each in listed.messages)
        await delete(admin, "doomed")
        change = await admin.set_subject("shrunk", message_bytes_max=4_096)
        await admin.wait(change.operation)
        (doomed,) = (await admin.list_scheduled(subject="doomed")).messages
        assert doomed.drop == "its subject is deleted"
        large, small = (await admin.list_scheduled(subject="shrunk")).messages
        assert ("5000 bytes" in large.drop, small.drop) == (True, "")
    words = ("scheduled", "list", "--subject", "doomed", "--meta", cluster.meta)
    shown = await asyncio.to_thread(run_keylane, *words)
    assert "will be dropped: its subject is deleted" in shown.stdout


async def test_waiting_messages_are_listed_by_subject_and_canceled_by_id(cluster: Cluster):
    await cluster.create("listed", partitions=2)
    async with (
        asyncio.timeout(60),
        Producer(cluster.meta) as producer,
        Admin(cluster.meta) as admin,
    ):
        receipts = [
            await keep(producer, "listed", b"%d" % each, 600_000 - each) for each in range(32)
        ]
        listed = await admin.list_scheduled(subject="listed", limit=3)
        assert (listed.count, listed.problems) == (32, {})
        assert [each.scheduled_id for each in listed.messages] == [
            each.scheduled_id for each in sorted(receipts, key=lambda each: each.deliver_at_ms)[:3]
        ]
        assert {each.broker_group for each in receipts} == {"g1", "g2"}
        alone = await admin.list_scheduled(subject="listed", broker=cluster.brokers[0].address)
        assert {each.broker_group for each in alone.messages} == {"g1"}
        assert 0 < alone.count < 32
        assert (await admin.list_scheduled(subject="nothing")).count == 0
        first = receipts[0].scheduled_id
        for _ in range(2):
            assert await admin.cancel_scheduled(first) is CancelOutcome.CANCELED
        with raises(Reason.SCHEDULED_UNKNOWN):
            await admin.cancel_scheduled("00" * 16)
        for wrong in ("", "xyz", "00" * 17, "-" * 32):
            with pytest.raises(InvalidRequestError):
                await admin.cancel_scheduled(wrong)
        with pytest.raises(InvalidRequestError):
            await admin.list_scheduled(limit=0)
        assert (await admin.list_scheduled(subject="listed")).count == 31

    async def keylane(*words: str) -> str:
        done = await asyncio.to_thread(run_keylane, "scheduled", *words)
        return done.stdout + done.stderr

    shown = await keylane("list", "--subject", "listed", "--meta", cluster.meta, "-o", "json")
    assert json.loads(shown)["count"] == 31
    table = await keylane("list", "--limit", "1", "--broker", cluster.brokers[0].address)
    assert "scheduled messages, the first 1" in table
    second = receipts[1].scheduled_id
    assert f"{second}: canceled" in await keylane("cancel", second, "--meta", cluster.meta)
    unknown = await keylane("cancel", "00" * 16, "--meta", cluster.meta)
    assert "SCHEDULED_UNKNOWN" in unknown
    silent = await asyncio.to_thread(run_keylane, "scheduled", "list", "--broker", "127.0.0.1:1")
    assert (silent.returncode, "is not listed" in silent.stdout) == (1, True)


def test_dump_shows_the_journal_of_scheduled_messages(tmp_path):
    with Cluster(tmp_path, brokers=1) as cluster:

        async def work() -> ScheduledReceipt:
            await cluster.create("dumped")
            async with Producer(cluster.meta) as producer:
                await keep(producer, "dumped", b"shown", 600_000)
                canceled = await keep(producer, "dumped", b"canceled", 600_000)
                await producer.cancel(canceled)
            return canceled

        canceled = asyncio.run(work())
    dump = ("broker", "dump", str(tmp_path / "broker-1"))
    lines = run_keylane(*dump, "--scheduled", "--messages", "-o", "json").stdout.splitlines()
    records = [json.loads(line) for line in lines]
    assert [each["kind"] for each in records] == ["WAITS", "WAITS", "CANCELED"]
    assert (records[0]["subject"], records[0]["value"]) == ("dumped", "shown")
    assert records[2]["scheduled_ids"] == [canceled.scheduled_id]
    table = run_keylane(*dump, "--scheduled", "--limit", "1").stdout
    assert "WAITS" in table
    assert "value_bytes=5" in table
    assert len(table.splitlines()) == 1
    refused = run_keylane(*dump, "--scheduled", "--partition", "1")
    assert "excludes" in refused.stdout + refused.stderr

"""A subject's rows take the place of its messages, and its groups go on where they were; as an operator types it."""

from __future__ import annotations

import asyncio

import pyarrow as pa

from keylane import Admin, Consumer, Message, Producer
from keylane.spark.options import parse_options
from keylane.spark.reprocess import run as runs
from keylane.spark.reprocess.folder import OutputFolder
from keylane.spark.reprocess.job import Job
from keylane.spark.reprocess.target import JobTarget
from keylane.spark.writing.job import WriteOptions
from support.cluster import Cluster, eventually
from support.server_process import run_keylane
from support.tasks_here import TasksHere

KEYS = 10


async def send(cluster: Cluster, numbers: range) -> None:
    async with Producer(cluster.meta) as producer:
        for number in numbers:
            await producer.send("orders", b"%d" % number, key=b"k%d" % (number % KEYS))


async def handled(cluster: Cluster, group: str, count: int) -> list[Message]:
    """What a consumer of the group handles until it has `count` messages."""
    got: list[Message] = []
    full = asyncio.Event()

    async def handle(message: Message) -> None:
        if len(got) == count:
            await full.wait()  # handed back when the consumer leaves
        got.append(message)

    async with Consumer(
        cluster.meta, subject="orders", group=group, handler=handle, concurrency=1, ttl_ms=3_000
    ):
        await eventually(lambda: len(got) >= count, what="the messages of the group")
    return got[:count]


def doubled(rows: pa.Table) -> pa.Table:
    """Each message twice, as an order that is split in two: several rows are made of one message."""
    return rows.take(pa.array([at for at in range(rows.num_rows) for _ in range(2)], pa.int64()))


def backfill(cluster: Cluster, folder: str, hidden: str) -> None:
    given = {"meta": cluster.meta, "subject": "orders"}
    given["columns"] = "partition,offset,key,value,timestamp,properties"
    target = JobTarget(
        options=WriteOptions(
            meta=(cluster.meta,), subject="orders", hidden=hidden, publish=False, timeout_ms=20_000
        )
    )
    job = Job("doubled", doubled, "jobs:doubled@1")
    runs.run_job(
        TasksHere(),  # type: ignore[arg-type]
        job,
        parse_options(given, now_ms=0),
        OutputFolder(folder),
        to=target,
    )


async def test_groups_go_on_in_the_rows_where_they_were_in_the_messages(
    file_cluster: Cluster, tmp_path
):
    """One group has handled a part, one all, one nothing; messages behind the backfill refuse it."""
    await file_cluster.create("orders", partitions=2)
    await send(file_cluster, range(100))
    async with Admin(file_cluster.meta) as admin:
        await admin.create_group("orders", "none")
    done = await handled(file_cluster, "some", 37)
    await handled(file_cluster, "every", 100)

    def publish(number: int):
        words = ("publish", f"orders.new-{number}", "orders", "--replace", "--yes")
        folder = str(tmp_path / str(number))
        more = ("--groups-from", folder, "--meta", file_cluster.meta)
        return asyncio.to_thread(run_keylane, "subject", *words, *more)

    await asyncio.to_thread(backfill, file_cluster, str(tmp_path / "1"), "orders.new-1")
    await send(file_cluster, range(100, 101))
    refused = await publish(1)
    assert refused.returncode == 1
    assert "1323" in refused.stderr
    assert "1 messages from offset" in refused.stderr
    await asyncio.to_thread(backfill, file_cluster, str(tmp_path / "2"), "orders.new-2")
    for _ in range(2):
        published = await publish(2)
        assert "orders.new-2 is published in orders" in published.stdout, published.stderr
    first = {message.value for message in done}
    late = await handled(file_cluster, "every", 2)
    assert {message.value for message in late} >= {b"100"}
    whole = [message.value for message in await handled(file_cluster, "none", 202)]
    assert sorted(whole) == sorted(b"%d" % number for number in range(101) for _ in range(2))
    left = sorted({b"%d" % number for number in range(101)} - first)
    rest = await handled(file_cluster, "some", 2 * len(left))
    assert {message.value for message in rest} >= set(left)

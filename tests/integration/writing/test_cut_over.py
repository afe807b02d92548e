"""A subject's rows take the place of its messages, and its groups go on where they were; as an
operator types it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable

import pyarrow as pa
import pytest

import keylane.arrow
from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.cli.commands.subject.cut_over import cut_over, plan_cut_over
from keylane.protocol.errors import Reason
from keylane.protocol.ids import Subject
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.spark.options import parse_options
from keylane.spark.reprocess import carrying
from keylane.spark.reprocess import run as runs
from keylane.spark.reprocess.folder import OutputFolder
from keylane.spark.reprocess.job import Job
from keylane.spark.reprocess.target import JobTarget
from keylane.spark.schema import spark_schema
from keylane.spark.source import KeylaneSource
from keylane.spark.writing.job import WriteOptions
from support.cluster import Cluster, eventually
from support.raising import raises
from support.server_process import run_keylane
from support.spark.query import Query
from support.tasks_here import TasksHere

KEYS = 10


async def send(cluster: Cluster, numbers: range, subject: str = "orders") -> None:
    async with Producer(cluster.meta) as producer:
        for number in numbers:
            await producer.send(subject, b"%d" % number, key=b"k%d" % (number % KEYS))


async def handled(
    cluster: Cluster, group: str, count: int, subject: str = "orders"
) -> list[Message]:
    """What a consumer of the group handles until it has `count` messages."""
    got: list[Message] = []
    full = asyncio.Event()

    async def handle(message: Message) -> None:
        if len(got) == count:
            await full.wait()  # handed back when the consumer leaves
        got.append(message)

    async with Consumer(
        cluster.meta,
        subject=subject,
        group=group,
        handler=handle,
        settings=ConsumerSettings(concurrency=1, ttl_ms=3_000),
    ):
        await eventually(lambda: len(got) >= count, what="the messages of the group")
    return got[:count]


def doubled(rows: pa.Table) -> pa.Table:
    """Each message twice, as an order that is split in two: several rows are made of one
    message.
    """
    return rows.take(pa.array([at for at in range(rows.num_rows) for _ in range(2)], pa.int64()))


def same(rows: pa.Table) -> pa.Table:
    return rows


def check_order(pairs: Iterable[tuple[bytes | None, bytes]]) -> None:
    """Each value once, and those of a key rise."""
    last: dict[bytes | None, int] = {}
    for key, value in pairs:
        assert last.get(key, -1) < int(value)
        last[key] = int(value)


def backfill(
    cluster: Cluster,
    folder: str,
    hidden: str,
    function: Callable[[pa.Table], pa.Table] = doubled,
    subject: str = "orders",
    **more: str,
) -> None:
    given = {"meta": cluster.meta, "subject": subject, **more}
    given["columns"] = "partition,offset,key,value,timestamp,properties"
    target = JobTarget(
        options=WriteOptions(
            meta=(cluster.meta,),
            subject=Subject(subject),
            hidden=hidden,
            publish=False,
            timeout_ms=20_000,
        )
    )
    job = Job(function.__name__, function, f"jobs:{function.__name__}@1")
    runs.run_job(
        TasksHere(),  # type: ignore[arg-type]
        job,
        parse_options(given, now_ms=0),
        OutputFolder(folder),
        to=target,
    )


def publish(cluster: Cluster, hidden: str, folder: str, target: str = "orders"):
    words = ("publish", hidden, target, "--replace", "--yes")
    more = ("--groups-from", folder, "--meta", cluster.meta)
    return asyncio.to_thread(run_keylane, "subject", *words, *more)


async def test_groups_go_on_in_the_rows_where_they_were_in_the_messages(
    file_cluster: Cluster, tmp_path
):
    """One group has handled a part, one all, one nothing; what is sent behind the job lies behind
    its rows.
    """
    await file_cluster.create("orders", partitions=2)
    await send(file_cluster, range(100))
    async with Admin(file_cluster.meta) as admin:
        await admin.create_group("orders", "none")
    done = await handled(file_cluster, "some", 37)
    await handled(file_cluster, "every", 100)
    folder = str(tmp_path / "1")
    await asyncio.to_thread(backfill, file_cluster, folder, "orders.new-1")
    await send(file_cluster, range(100, 101))
    await asyncio.to_thread(backfill, file_cluster, folder, "orders.new-1")
    for _ in range(2):
        published = await publish(file_cluster, "orders.new-1", folder)
        assert "orders.new-1 is published in orders" in published.stdout, published.stderr
    first = {message.value for message in done}
    late = await handled(file_cluster, "every", 1)
    assert {message.value for message in late} == {b"100"}
    whole = [message.value for message in await handled(file_cluster, "none", 201)]
    assert sorted(whole) == sorted([b"%d" % number for number in range(100)] * 2 + [b"100"])
    left = sorted({b"%d" % number for number in range(101)} - first)
    rest = await handled(file_cluster, "some", 2 * len(left) - 1)
    assert {message.value for message in rest} >= set(left)


async def test_group_that_is_reset_while_rows_are_read_goes_on_where_it_was_set(
    file_cluster: Cluster, tmp_path, monkeypatch
):
    """Each message that the group is to handle again is handled again, as its row."""
    await file_cluster.create("back", partitions=2)
    await send(file_cluster, range(20), "back")
    await handled(file_cluster, "again", 20, "back")
    folder = str(tmp_path / "1")
    await asyncio.to_thread(backfill, file_cluster, folder, "back.new", same, "back")
    find, resets = carrying.positions, [lambda: asyncio.run(reset())]

    async def reset() -> None:
        async with Admin(file_cluster.meta) as admin:
            await admin.reset_group("back", "again", "earliest")

    def resets_first(*given):
        rows = find(*given)
        while resets:
            resets.pop()()
        return rows

    monkeypatch.setattr(carrying, "positions", resets_first)
    async with Admin(file_cluster.meta) as admin:
        planned = await plan_cut_over(admin, file_cluster.meta, "back.new", "back", folder)
        await admin.publish_subject(
            "back.new", "back", replace=True, starts=planned.starts, ends=planned.ends
        )
    assert not resets
    values = [message.value for message in await handled(file_cluster, "again", 20, "back")]
    assert sorted(values) == sorted(b"%d" % number for number in range(20))


async def test_group_that_is_reset_after_the_last_look_goes_on_where_it_was_set(
    file_cluster: Cluster, tmp_path
):
    """Until now the publication placed it where it had been: behind messages that it is to handle
    again.
    """
    await file_cluster.create("late", partitions=2)
    await send(file_cluster, range(20), "late")
    await handled(file_cluster, "again", 20, "late")
    folder = str(tmp_path / "1")
    await asyncio.to_thread(backfill, file_cluster, folder, "late.new", same, "late")
    tries = []
    async with Admin(file_cluster.meta) as admin:
        publish_now = admin.publish_subject

        async def reset_first(*given, **more):
            tries.append(more["starts"])
            if len(tries) == 1:
                await admin.reset_group("late", "again", "earliest")
            return await publish_now(*given, **more)

        admin.publish_subject = reset_first  # type: ignore[method-assign]
        _, done = await cut_over(admin, file_cluster.meta, "late.new", "late", folder, wait=True)
    assert (done.state, len(tries)) == (OperationState.DONE, 2)
    values = [message.value for message in await handled(file_cluster, "again", 20, "late")]
    assert sorted(values) == sorted(b"%d" % number for number in range(20))


async def test_cut_over_loses_nothing_while_a_producer_sends(file_cluster: Cluster, tmp_path):
    """Each acked message is in the subject once, in the order of its key; a group handles each
    once; no send fails.
    """
    await file_cluster.create("live", partitions=2)
    acked: dict[int, object] = {}
    until = asyncio.Event()

    async def produce() -> None:
        number = 0
        async with Producer(file_cluster.meta) as producer:
            while not until.is_set():
                receipts = await asyncio.gather(
                    *(
                        producer.send("live", b"%d" % each, key=b"k%d" % (each % KEYS))
                        for each in range(number, number + KEYS)
                    )
                )
                acked.update(zip(range(number, number + KEYS), receipts, strict=True))
                number += KEYS
                await asyncio.sleep(0.005)

    sending = asyncio.create_task(produce())
    await eventually(lambda: len(acked) >= 200, what="messages before the job")
    before = await handled(file_cluster, "some", 53, "live")
    folder = str(tmp_path / "f")
    await asyncio.to_thread(backfill, file_cluster, folder, "live.new", same, "live")
    between = len(acked)
    await eventually(lambda: len(acked) >= between + 100, what="messages behind the job")
    await file_cluster.reshape(Reshape(kind=OperationKind.RESIZE, subject="live", partitions=3))
    published = await publish(file_cluster, "live.new", folder, "live")
    assert "live.new is published in live" in published.stdout, published.stderr
    since = len(acked)
    await eventually(lambda: len(acked) >= since + 100, what="messages behind the publication")
    until.set()
    await sending
    table = await asyncio.to_thread(
        lambda: keylane.arrow.read(
            file_cluster.meta, "live", columns=("epoch", "partition", "offset", "key", "value")
        ).read_all()
    )
    rows = sorted(
        table.to_pylist(), key=lambda row: (row["epoch"], row["partition"], row["offset"])
    )
    assert sorted(int(row["value"]) for row in rows) == sorted(acked)
    check_order((row["key"], row["value"]) for row in rows)
    left = len(acked) - len(before)
    rest = await handled(file_cluster, "some", left, "live")
    got = [*before, *rest]
    assert {int(message.value) for message in got} == set(acked)
    check_order((message.key, message.value) for message in got)
    async with Admin(file_cluster.meta) as admin:
        assert (await admin.verify()).ok


async def test_cut_over_is_refused_when_the_job_ended_before_the_latest_message(
    file_cluster: Cluster, tmp_path
):
    """Also where a caller gives ends that he looked up before; the subject stays as it is."""
    view = await file_cluster.create("short", partitions=1)
    first = int(view.partitions[0].partition_id)
    await send(file_cluster, range(30), "short")
    folder = str(tmp_path / "f")
    await asyncio.to_thread(
        backfill, file_cluster, folder, "short.new", same, "short", end=json.dumps({first: 20})
    )
    await send(file_cluster, range(30, 40), "short")
    refused = await publish(file_cluster, "short.new", folder, "short")
    assert refused.returncode == 1
    assert "1323" in refused.stderr
    assert "10 messages from offset 20" in refused.stderr
    async with Admin(file_cluster.meta) as admin:
        with raises(Reason.PUBLISH_BEHIND, match="10 messages of partition") as told:
            await admin.publish_subject("short.new", "short", replace=True, ends={first: 20})
        assert (told.value.partition_id, told.value.from_offset, told.value.messages) == (
            first,
            20,
            10,
        )
        with raises(Reason.PUBLISH_TARGET, match="--replace"):
            await admin.publish_subject("short.new", "short")
    values = [message.value for message in await handled(file_cluster, "all", 40, "short")]
    assert sorted(map(int, values)) == list(range(40))


async def test_cut_over_is_refused_when_the_hidden_subject_lacks_the_rows_of_the_job(
    file_cluster: Cluster, tmp_path
):
    """It was deleted, and made anew under its name by a job that has not written yet; the messages
    stay.
    """
    subject, hidden = "lacking", "lacking.new"
    await file_cluster.create(subject, partitions=2)
    await send(file_cluster, range(30), subject)
    folder = str(tmp_path / "f")
    await asyncio.to_thread(backfill, file_cluster, folder, hidden, same, subject)
    async with Admin(file_cluster.meta) as admin:
        await admin.delete_subject(hidden)

    def dies(_rows: pa.Table) -> pa.Table:
        raise RuntimeError("the test kills it")

    with raises(Reason.JOB_FAILED, match="the test kills it"):
        await asyncio.to_thread(
            backfill, file_cluster, str(tmp_path / "other"), hidden, dies, subject
        )
    refused = await publish(file_cluster, hidden, folder, subject)
    assert refused.returncode == 1
    assert "has other rows than the job" in refused.stderr
    values = await asyncio.to_thread(rows_of, file_cluster, subject)
    assert sorted(map(int, values)) == list(range(30))


def plan_batch(
    cluster: Cluster, subject: str, start: dict | None, **options: str
) -> tuple[dict, int]:
    """The end of the next batch of a stream, and its number of rows."""
    source = KeylaneSource({"meta": cluster.meta, "subject": subject, **options})
    reader = source.streamReader(spark_schema())
    try:
        begin = reader.initialOffset() if start is None else start
        end = reader.latestOffset(begin, reader.getDefaultReadLimit())
        planned = reader.partitions(begin, end)
    finally:
        reader.stop()
    return end, sum(each.end - each.start for task in planned for each in task.ranges)


async def test_stream_passes_over_the_rows_of_messages_that_it_had(file_cluster: Cluster, tmp_path):
    """Nothing lies behind the rows yet; one that was in the middle of a partition ends with the
    loss.
    """
    subject, folder = "streamed", str(tmp_path / "f")
    await file_cluster.create(subject, partitions=1)
    await send(file_cluster, range(30), subject)

    def tasks(start: dict | None, **options: str) -> tuple[dict, int]:
        return plan_batch(file_cluster, subject, start, **options)

    whole, count = await asyncio.to_thread(tasks, None)
    part, some = await asyncio.to_thread(tasks, None, maxRowsPerTrigger="10")
    assert (count, some) == (30, 10)
    await asyncio.to_thread(backfill, file_cluster, folder, "streamed.new", same, subject)
    published = await publish(file_cluster, "streamed.new", folder, subject)
    assert published.returncode == 0, published.stderr
    assert (await asyncio.to_thread(tasks, whole))[1] == 0
    with pytest.raises(Exception, match="20 messages"):
        await asyncio.to_thread(tasks, part)
    assert (await asyncio.to_thread(tasks, part, failOnDataLoss="false"))[1] == 30
    await send(file_cluster, range(30, 35), subject)
    assert (await asyncio.to_thread(tasks, whole))[1] == 5
    assert (await asyncio.to_thread(tasks, None))[1] == 30


async def test_stream_gets_the_rows_of_messages_without_a_key_that_it_had_not(
    file_cluster: Cluster, tmp_path
):
    """It had all of the other partitions. A row without a key lies behind the partition of its
    message, as the rows of keys do.
    """
    subject, folder = "keyless", str(tmp_path / "f")
    await file_cluster.create(subject, partitions=4)
    counts: Counter[int] = Counter()
    async with Producer(file_cluster.meta) as producer:
        while len(counts) < 4:
            counts[(await producer.send(subject, b"v")).partition_id] += 1
    whole, count = await asyncio.to_thread(plan_batch, file_cluster, subject, None)
    assert count == counts.total()
    await asyncio.to_thread(backfill, file_cluster, folder, "keyless.new", doubled, subject)
    published = await publish(file_cluster, "keyless.new", folder, subject)
    assert published.returncode == 0, published.stderr
    assert (await asyncio.to_thread(plan_batch, file_cluster, subject, whole))[1] == 0
    for partition_id, unread in counts.items():
        start = {**whole, "offsets": {**whole["offsets"], str(partition_id): 0}}
        _, rows = await asyncio.to_thread(
            plan_batch, file_cluster, subject, start, failOnDataLoss="false"
        )
        assert rows == 2 * unread


def to_files(cluster: Cluster, folder: str, subject: str) -> str:
    """Backfill a subject to files, as a data engineer does long before a cut-over."""
    columns = "partition,offset,key,value,timestamp,properties"
    options = parse_options(
        {"meta": cluster.meta, "subject": subject, "columns": columns}, now_ms=0
    )
    job = Job("same", same, "jobs:same@1")
    runs.run_job(TasksHere(), job, options, OutputFolder(folder))  # type: ignore[arg-type]
    return f"manifest:{folder}"


def streamed(cluster: Cluster, subject: str, start: str) -> list[int]:
    source = KeylaneSource({"meta": cluster.meta, "subject": subject, "start": start})
    query = Query(source.streamReader(spark_schema()))
    try:
        query.all()
    finally:
        query.reader.stop()
    return sorted(row[3] for row in query.rows)


def create_behind(cluster: Cluster, subject: str, group: str, start: str):
    words = ("create", subject, group, "--start", start, "--meta", cluster.meta)
    return asyncio.to_thread(run_keylane, "group", *words)


async def test_start_behind_a_backfill_gives_nothing_twice_when_rows_replaced_its_messages(
    file_cluster: Cluster, tmp_path
):
    """Of an earlier backfill and of the job whose rows these are; a group, a consumer and a stream
    get what is new.
    """
    subject, folder = "again", str(tmp_path / "rows")
    await file_cluster.create(subject, partitions=2)
    await send(file_cluster, range(30), subject)
    early = await asyncio.to_thread(to_files, file_cluster, str(tmp_path / "files"), subject)
    await asyncio.to_thread(backfill, file_cluster, folder, "again.new", doubled, subject)
    await send(file_cluster, range(30, 33), subject)
    await create_behind(file_cluster, subject, "between", early)
    published = await publish(file_cluster, "again.new", folder, subject)
    assert published.returncode == 0, published.stderr
    for number, start in enumerate((early, f"manifest:{folder}")):
        group = f"live-{number}"
        made = await create_behind(file_cluster, subject, group, start)
        assert made.returncode == 0, made.stderr
        for each in (group, "between") if number else (group,):
            values = [
                int(message.value) for message in await handled(file_cluster, each, 3, subject)
            ]
            assert sorted(values) == [30, 31, 32]
        assert await asyncio.to_thread(streamed, file_cluster, subject, start) == [30, 31, 32]
    async with Consumer(
        file_cluster.meta, subject=subject, group="made", start=early, handler=print
    ) as consumer:
        del consumer
        async with Admin(file_cluster.meta) as admin:
            described = await admin.describe_group(subject, "made")
    assert sum(each.lag or 0 for each in described.partitions) <= 3


async def test_start_behind_a_backfill_is_refused_when_rows_replaced_messages_on_both_sides(
    file_cluster: Cluster, tmp_path
):
    """No offset parts the rows of messages that the backfill has from the others: they would come
    twice, or never.
    """
    subject, folder = "both", str(tmp_path / "rows")
    await file_cluster.create(subject, partitions=1)
    await send(file_cluster, range(30), subject)
    start = await asyncio.to_thread(to_files, file_cluster, str(tmp_path / "files"), subject)
    await send(file_cluster, range(30, 33), subject)
    await asyncio.to_thread(backfill, file_cluster, folder, "both.new", same, subject)
    published = await publish(file_cluster, "both.new", folder, subject)
    assert published.returncode == 0, published.stderr
    refused = await create_behind(file_cluster, subject, "live", start)
    assert refused.returncode == 1
    assert "messages [30, 33) of partition" in refused.stderr
    assert "keylane spark reprocess` again into another folder" in refused.stderr
    async with Admin(file_cluster.meta) as admin:
        assert await admin.list_groups(subject) == []
    with raises(Reason.MANIFEST, match=r"messages \[30, 33\) of partition"):
        await asyncio.to_thread(streamed, file_cluster, subject, start)
    newer = await asyncio.to_thread(to_files, file_cluster, str(tmp_path / "newer"), subject)
    assert (await create_behind(file_cluster, subject, "live", newer)).returncode == 0
    assert await asyncio.to_thread(streamed, file_cluster, subject, newer) == []


def rows_of(cluster: Cluster, subject: str) -> list[bytes]:
    columns = ("epoch", "partition", "offset", "value")
    rows = keylane.arrow.read(cluster.meta, subject, columns=columns).read_all().to_pylist()
    return [
        row["value"]
        for row in sorted(rows, key=lambda row: (row["epoch"], row["partition"], row["offset"]))
    ]


@pytest.mark.crash
@pytest.mark.parametrize("step", ["cut", "hosted", "sealing", "opened"])
async def test_cut_is_finished_when_the_metaserver_dies_after_a_step(
    file_cluster: Cluster, tmp_path, step
):
    """The job asks again; messages that are sent then lie behind its rows, and the publication
    finds them all.
    """
    subject = f"cut-{step}"
    await file_cluster.create(subject, partitions=2)
    await send(file_cluster, range(20), subject)
    program = file_cluster.meta_program
    program.restart_to_die_after(step)
    folder = str(tmp_path / "f")
    job = asyncio.create_task(
        asyncio.to_thread(backfill, file_cluster, folder, f"{subject}.new", same, subject)
    )
    await program.died()
    program.restart()
    await job
    await send(file_cluster, range(20, 30), subject)
    published = await publish(file_cluster, f"{subject}.new", folder, subject)
    assert published.returncode == 0, published.stderr
    values = await asyncio.to_thread(rows_of, file_cluster, subject)
    assert sorted(map(int, values)) == list(range(30))


@pytest.mark.crash
@pytest.mark.parametrize("step", ["published", "sealing", "opened"])
async def test_publication_is_finished_when_the_metaserver_dies_after_a_step(
    file_cluster: Cluster, tmp_path, step
):
    """A repeat of the command changes nothing more."""
    subject = f"shown-{step}"
    await file_cluster.create(subject, partitions=2)
    await send(file_cluster, range(20), subject)
    folder = str(tmp_path / "f")
    await asyncio.to_thread(backfill, file_cluster, folder, f"{subject}.new", same, subject)
    await send(file_cluster, range(20, 30), subject)
    program = file_cluster.meta_program
    program.restart_to_die_after(step)
    first = asyncio.create_task(publish(file_cluster, f"{subject}.new", folder, subject))
    await program.died()
    program.restart()
    await first
    async with Admin(file_cluster.meta, wait_s=30) as admin:
        await admin.list_subjects()
    published = await publish(file_cluster, f"{subject}.new", folder, subject)
    assert published.returncode == 0, published.stderr
    values = await asyncio.to_thread(rows_of, file_cluster, subject)
    assert sorted(map(int, values)) == list(range(30))

"""Tasks of a write against real brokers and a real metaserver: repeated, twice at once, through
kills and a resize.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pyarrow as pa
import pytest

from keylane import Admin
from keylane.protocol.errors import (
    Reason,
    SubjectDeletedError,
    SubjectUnknownError,
)
from keylane.protocol.message import Message
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from keylane.spark.writing.job import check_job
from support.cluster import Cluster
from support.raising import raises
from support.spark.written_job import WrittenJob

KEYS = 37


def rows(task: int, count: int, *, chunk: int = 700, start: int = 0) -> Iterator[pa.RecordBatch]:
    """Rows `start` to `count` of a task, in record batches of `chunk` rows; every tenth has no
    key.
    """
    for first in range(start, count, chunk):
        numbers = range(first, min(first + chunk, count))
        keys = [b"" if n % 10 == 0 else b"%d/%d" % (task, n % KEYS) for n in numbers]
        values = [b"%d:%d:" % (task, n) + b"v" * (n % 300) for n in numbers]
        yield pa.record_batch({"key": keys, "value": values})


def cut_off(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The first seven record batches, and an error."""
    yield from islice(batches, 7)
    raise RuntimeError("the task fails")


async def messages(cluster: Cluster, subject: str) -> list[Message]:
    """All messages, those of a partition in its order, parents before children."""
    async with Admin(cluster.meta) as admin:
        route = (await admin.describe_subject(subject)).partitions
    log = await cluster.log(await _route(cluster, subject))
    order = sorted(log, key=lambda partition: partition)
    assert set(order) <= {part.partition_id for part in route}
    return [message for partition_id in order for message in log[partition_id]]


async def _route(cluster: Cluster, subject: str):
    network = HttpNetwork()
    try:
        return await MetaClient(network, [cluster.meta]).route(subject)
    finally:
        await network.close()


def assert_each_once_in_order(stored: list[Message], tasks: int, count: int) -> None:
    """Every row of every task once, and the rows of a key in the order of their task."""
    seen = Counter(message.value.partition(b"v")[0] for message in stored)
    assert seen == Counter(b"%d:%d:" % (task, n) for task in range(tasks) for n in range(count))
    last: dict[bytes, int] = {}
    for message in stored:
        number = int(message.value.split(b":")[1])
        if message.key:
            assert last.get(message.key, -1) < number
            last[message.key] = number


async def test_job_is_published_at_once_and_each_row_once(file_cluster):
    """To a subject that does not exist, then behind what it has; a repeated commit changes
    nothing.
    """
    for job in ("a", "b"):
        work = WrittenJob(file_cluster.meta, "jobs", job, partitions=3)
        await work.subject.create()
        reports = await asyncio.gather(
            *(work.attempt(task, rows(task, 3_000)) for task in range(3))
        )
        assert check_job(reports, await work.subject.count_messages()) == 9_000
        if job == "a":
            with pytest.raises(SubjectUnknownError):
                await _route(file_cluster, "jobs")
        await work.subject.publish()
        await work.subject.publish()
        await work.subject.delete()
        await work.network.close()
    stored = await messages(file_cluster, "jobs")
    assert_each_once_in_order(stored[:9_000], 3, 3_000)
    assert_each_once_in_order(stored[9_000:], 3, 3_000)


async def test_attempts_of_a_task_store_its_rows_once(file_cluster):
    """Two at once, one that is cancelled half way, one that gets its rows in other record batches,
    one after the end.
    """
    work = WrittenJob(file_cluster.meta, "attempts", "a", partitions=2)
    await work.subject.create()
    cut = asyncio.create_task(work.attempt(0, rows(0, 40_000)))
    await asyncio.sleep(0.2)
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    reports = await asyncio.gather(
        work.attempt(0, rows(0, 40_000)), work.attempt(0, rows(0, 40_000, chunk=1_237))
    )
    assert reports[0] == reports[1]
    assert await work.attempt(0, rows(0, 40_000, chunk=10_000)) == reports[0]
    assert check_job(reports[:1], await work.subject.count_messages()) == 40_000
    await work.subject.publish()
    assert_each_once_in_order(await messages(file_cluster, "attempts"), 1, 40_000)
    await work.network.close()


async def test_attempt_with_other_rows_fails_and_the_job_is_not_published(file_cluster):
    """The rows of the first attempt cannot be told from those of the second one: neither is
    published.
    """
    work = WrittenJob(file_cluster.meta, "differs", "a", partitions=1)
    await work.subject.create()
    first = await work.attempt(0, rows(0, 2_000))
    with raises(Reason.ROWS_DIFFER):
        await work.attempt(0, rows(0, 2_000, start=1))
    more = await work.attempt(1, rows(1, 100))
    with raises(Reason.ROWS_DIFFER, match="2100 messages"):
        check_job([first], await work.subject.count_messages())
    assert check_job([first, more], await work.subject.count_messages()) == 2_100
    await work.subject.delete()
    await work.subject.delete()
    with pytest.raises((SubjectUnknownError, SubjectDeletedError)):
        await work.subject.publish()
    async with Admin(file_cluster.meta) as admin:
        names = {each.subject for each in await admin.list_subjects(hidden=True)}
        assert work.hidden not in names, "its broker has not dropped it"
    await work.network.close()


async def test_rows_that_cannot_be_sent_are_named(file_cluster):
    """The column, the row and the task."""
    work = WrittenJob(file_cluster.meta, "wrong", "a", partitions=1)
    await work.subject.create()
    large = pa.record_batch({"value": [b"fits", b"x" * (2 << 20)]})
    with raises(Reason.ROWS_INVALID, match="row 1 of task 4, column value") as caught:
        await work.attempt(4, iter([large]))
    assert caught.value.row == 1
    with raises(Reason.ROWS_INVALID, match="null"):
        await work.attempt(5, iter([pa.record_batch({"value": pa.array([b"a", None])})]))
    keys = pa.record_batch({"key": [b"k" * 2_000], "value": [b""]})
    with raises(Reason.ROWS_INVALID, match="column key"):
        await work.attempt(6, iter([keys]))
    assert sum((await work.subject.count_messages()).values()) == 0
    await work.network.close()


async def test_hidden_subject_has_no_consumers_and_is_listed_only_when_asked_for(file_cluster):
    """No consumer subscribes to unfinished rows by accident."""
    work = WrittenJob(file_cluster.meta, "seen", "a", partitions=1)
    await work.subject.create()
    async with Admin(file_cluster.meta) as admin:
        names = {each.subject for each in await admin.list_subjects()}
        assert work.hidden not in names
        names = {each.subject for each in await admin.list_subjects(hidden=True)}
        assert work.hidden in names
        with raises(Reason.SUBJECT_HIDDEN):
            await admin.create_group(work.hidden, "g")
        await admin.publish_subject(work.hidden, "seen")
        await admin.create_group("seen", "g")
        report = await admin.verify()
        assert report.ok, [check for check in report.checks if check.violations]
    await work.network.close()


async def test_replayed_rows_are_stored_once_through_a_resize(file_cluster):
    """A stream's batch was stored in part, its partitions were resized, and the batch is replayed
    from its first row.
    """
    await file_cluster.create("live", partitions=2)
    async with Admin(file_cluster.meta) as admin:
        work = WrittenJob(file_cluster.meta, "live", "stream")
        with pytest.raises(RuntimeError):
            await work.attempt(0, cut_off(rows(0, 8_000)), to="live")
        for partitions in (3, 2):
            await admin.wait(await admin.resize("live", partitions))
            reports = await asyncio.gather(
                *(work.attempt(0, rows(0, 8_000), to="live") for _ in range(2))
            )
            assert reports[0] == reports[1]
            assert sum(reports[0].rows.values()) == 8_000
    assert_each_once_in_order(await messages(file_cluster, "live"), 1, 8_000)
    await work.network.close()


@pytest.mark.cluster(brokers=1)
async def test_job_outlives_kills_of_the_broker_and_the_metaserver(cluster):
    """A task waits for a killed broker; the publication goes on after the metaserver died at each
    of its steps.
    """
    work = WrittenJob(cluster.meta, "killed", "a", partitions=2)
    await work.subject.create()
    task = asyncio.create_task(work.attempt(0, rows(0, 60_000)))
    await asyncio.sleep(0.3)
    cluster.brokers[0].kill()
    cluster.brokers[0].restart()
    assert check_job([await task], await work.subject.count_messages()) == 60_000
    await work.subject.publish()
    for step in ("published", "sealing", "opened"):
        again = WrittenJob(cluster.meta, "killed", step)
        await again.subject.create()
        await again.attempt(0, rows(0, 500))
        cluster.meta_program.restart_to_die_after(step)
        publishing = asyncio.create_task(again.subject.publish())
        await cluster.meta_program.died()
        cluster.meta_program.restart()
        await publishing
        await again.network.close()
    stored = await messages(cluster, "killed")
    assert len(stored) == 61_500
    assert_each_once_in_order(stored[:60_000], 1, 60_000)
    async with Admin(cluster.meta) as admin:
        report = await admin.verify()
        assert report.ok, [check for check in report.checks if check.violations]
    await work.network.close()

"""A subject deleted while messages for it are sent: each sender is told, and messages of other
subjects keep their order.

The producer's `send` is in tests/integration/metaserver/test_deletions.py, outboxes are in
tests/integration/outbox/test_deleted_subjects.py.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator

import aiohttp
import pyarrow as pa
import pytest

import keylane.sync
from keylane import Producer, SubjectUnknownError
from keylane.errors import KeylaneError, Reason, SubjectDeletedError
from support.cluster import Cluster, delete_subject
from support.raising import raises

GONE = (SubjectDeletedError, SubjectUnknownError)
SENDS_FIRST = 3
Send = Callable[[str, bytes], Awaitable[None]]
"""Of a subject and a value."""


async def delete_while_sending(cluster: Cluster, subject: str, send: Send) -> KeylaneError:
    """
    Send to the subject and to another one, in turn, until the first is deleted and the call fails.

    Everything of the other subject is stored in order, also what is sent afterwards.
    """
    beside = f"{subject}-beside"
    for name in (subject, beside):
        await cluster.create(name, partitions=2)
    sent: list[bytes] = []
    told: KeylaneError | None = None
    deleting: asyncio.Task[None] | None = None

    async with asyncio.timeout(60):
        for number in itertools.count():
            value = b"%d" % number
            await send(beside, value)
            sent.append(value)
            if told is not None:
                break
            if number == SENDS_FIRST:
                deleting = asyncio.create_task(delete_subject(cluster.meta, subject))
            try:
                await send(subject, value)
            except KeylaneError as error:
                told = error
        assert deleting is not None
        await deleting
        await cluster.create(subject, partitions=2)
        await send(subject, b"for the next one")
    await cluster.check_history(beside, {b"k": sent})
    await cluster.check_history(subject, {b"k": [b"for the next one"]})
    return told


def check(error: BaseException | None) -> None:
    """The error is typed, and has advice."""
    assert isinstance(error, GONE)
    assert error.hint


async def test_table_is_given_up_when_its_subject_is_deleted(shared_cluster: Cluster):
    async with Producer(shared_cluster.meta) as producer:

        async def send(subject: str, value: bytes) -> None:
            table = pa.table({"k": [b"k"], "v": [value]})
            await producer.send_arrow(subject, table, key="k", value="v")

        error = await delete_while_sending(shared_cluster, "deleted-table", send)
    if error.reason is Reason.ROWS_GIVEN_UP:  # its row was queued when the subject went
        assert (error.rows, error.messages) == ([0], 1)
    check(error.__cause__ if error.reason is Reason.ROWS_GIVEN_UP else error)


async def test_later_rows_of_a_table_are_given_up_when_its_subject_is_deleted(
    shared_cluster: Cluster,
):
    """The error says how many are stored, and a later subject of the name gets none of the
    others.
    """
    meta, subject = shared_cluster.meta, "deleted-stream"
    await shared_cluster.create(subject)
    loop = asyncio.get_running_loop()
    schema = pa.schema([("k", pa.binary()), ("v", pa.binary())])

    def batches() -> Iterator[pa.RecordBatch]:
        """Read in a thread; between its two batches the subject is deleted and created anew."""
        yield pa.record_batch({"k": [b"k"] * 3, "v": [b"before"] * 3}, schema=schema)
        while producer.stats.acked < 4:
            time.sleep(0.005)
        deleted = delete_subject(meta, subject)
        asyncio.run_coroutine_threadsafe(deleted, loop).result(60)
        asyncio.run_coroutine_threadsafe(shared_cluster.create(subject), loop).result(60)
        yield pa.record_batch({"k": [b"k"] * 2, "v": [b"after"] * 2}, schema=schema)

    async with Producer(meta) as producer:
        await producer.send(subject, b"first", key=b"k")
        with raises(Reason.ROWS_GIVEN_UP) as raised:
            await producer.send_arrow(
                subject, pa.RecordBatchReader.from_batches(schema, batches()), key="k", value="v"
            )
        assert (raised.value.stored, raised.value.rows) == (3, [3, 4])
        assert isinstance(raised.value.__cause__, GONE)
        await producer.send(subject, b"next", key=b"k")
    await shared_cluster.check_history(subject, {b"k": [b"next"]})


async def test_script_is_told_when_its_subject_is_deleted(shared_cluster: Cluster):
    with keylane.sync.Producer(shared_cluster.meta) as producer:

        async def send(subject: str, value: bytes) -> None:
            await asyncio.to_thread(lambda: producer.send(subject, value, key=b"k").result())

        check(await delete_while_sending(shared_cluster, "deleted-script", send))


@pytest.mark.parametrize("broker", [0, 1])
async def test_posted_message_is_refused_when_its_subject_is_deleted(
    shared_cluster: Cluster, broker: int
):
    """By the broker that has its partition, and by one that forwards it."""
    address = shared_cluster.brokers[broker].address
    async with aiohttp.ClientSession() as session:

        async def send(subject: str, value: bytes) -> None:
            url = f"http://{address}/v1/subjects/{subject}/messages?key=k"
            async with session.post(url, data=value) as got:
                answer = await got.json()
                if got.status == 200:
                    return
                (kind,) = [each for each in GONE if each.__name__ == answer["name"]]
                assert (got.status, answer["fate"]) in {(404, "not_done"), (410, "not_done")}
                raise kind(answer["message"])

        check(await delete_while_sending(shared_cluster, f"deleted-posts-{broker}", send))


async def test_posted_message_goes_at_once_to_the_next_subject_of_the_name(shared_cluster: Cluster):
    """The broker has kept the route of the deleted one, of the same version; a wait for a newer one
    would take 10 s.
    """
    subject = "deleted-posts-idle"
    address = shared_cluster.brokers[0].address
    await shared_cluster.create(subject, partitions=1)
    async with aiohttp.ClientSession() as session:

        async def post() -> int:
            url = f"http://{address}/v1/subjects/{subject}/messages?key=k"
            async with session.post(url, data=b"v") as got:
                assert got.status == 200, await got.text()
                receipt = (await got.json())["receipts"][0]
                assert receipt["offset"] == 0
                return int(receipt["partition_id"])

        before = await post()
        await delete_subject(shared_cluster.meta, subject)
        await shared_cluster.create(subject, partitions=1)
        began = time.monotonic()
        assert await post() > before
        assert time.monotonic() - began < 5

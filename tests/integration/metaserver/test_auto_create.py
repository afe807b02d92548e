"""`auto_create`: the first message creates its subject, where the pattern allows it, and nothing
else does.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from keylane import Admin, Consumer, Producer, QueueReader
from keylane.outbox import Outbox, create_tables
from keylane.protocol.errors import Reason, SubjectDeletedError, SubjectUnknownError
from keylane.protocol.routing import OrderStrategy
from support.cluster import Cluster, delete_subject
from support.raising import raises

pytestmark = pytest.mark.cluster(
    meta_settings="auto_create = 'made.*'\nauto_create_partitions = 3\n"
)


async def test_first_message_creates_its_subject_once(file_cluster: Cluster):
    """Three producers at once get one subject, with the producers' strategy and the partitions of
    the setting.
    """

    async def send(number: int) -> None:
        async with Producer(file_cluster.meta, order_strategy="best_tried") as producer:
            receipt = await producer.send("made.once", b"%d" % number, key=b"k")
            assert receipt.durable

    await asyncio.gather(*map(send, range(3)))
    async with Admin(file_cluster.meta) as admin:
        view = await admin.describe_subject("made.once")
    assert len(view.partitions) == 3
    assert view.order_strategy is OrderStrategy.BEST_TRIED
    async with Consumer(file_cluster.meta, subject="made.once", group="g") as consumer:
        values = set()
        while len(values) < 3:
            messages = await consumer.getmany()
            values |= {message.value for message in messages}
            await consumer.ack(messages)
    assert values == {b"0", b"1", b"2"}


async def test_unknown_subject_is_refused_when_the_pattern_does_not_fit(file_cluster: Cluster):
    """A misspelt name creates no subject."""
    async with Producer(file_cluster.meta) as producer, Admin(file_cluster.meta) as admin:
        with pytest.raises(SubjectUnknownError):
            await producer.send("mode.other", b"v", key=b"k")
        assert "mode.other" not in [each.subject for each in await admin.list_subjects()]


async def test_subject_is_not_created_when_it_is_only_looked_at(file_cluster: Cluster):
    """Consumers, readers, views and HTTP reads refuse an unknown name, whatever the pattern."""
    meta, subject = file_cluster.meta, "made.looked-at"
    with pytest.raises(SubjectUnknownError):
        async with Consumer(meta, subject=subject, group="g"):
            pass
    async with QueueReader(meta, subject=subject) as reader:
        with pytest.raises(SubjectUnknownError):
            await reader.queues()
    url = f"http://{file_cluster.brokers[0].address}/v1/subjects/{subject}/messages"
    async with (
        aiohttp.ClientSession() as session,
        session.get(url + "?partition=1&offset=0") as got,
    ):
        assert got.status == 404
    async with Admin(meta) as admin:
        with pytest.raises(SubjectUnknownError):
            await admin.describe_subject(subject)


@pytest.mark.parametrize("path", ["messages", "scheduled"])
async def test_posted_message_creates_its_subject(file_cluster: Cluster, path: str):
    """The first message may come by plain HTTP, and may be one for later."""
    subject = f"made.by-{path[:4]}"
    url = f"http://{file_cluster.brokers[0].address}/v1/subjects/{subject}/{path}"
    if path == "scheduled":
        url += f"?deliver_at={datetime.now(UTC) + timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"
    async with aiohttp.ClientSession() as session, session.post(url, data=b"value") as posted:
        assert posted.status == 200, await posted.text()
    async with Admin(file_cluster.meta) as admin:
        view = await admin.describe_subject(subject)
    assert view.order_strategy is OrderStrategy.STRICT


async def test_producer_is_refused_when_the_subject_has_another_strategy(file_cluster: Cluster):
    """The first message decides; a later producer with another strategy learns of it."""
    async with Producer(file_cluster.meta, order_strategy="best_tried") as producer:
        await producer.send("made.strategy", b"v", key=b"k")
    async with Producer(file_cluster.meta, order_strategy="strict") as producer:
        with raises(Reason.ORDER_STRATEGY):
            await producer.send("made.strategy", b"v", key=b"k")


async def test_message_does_not_create_a_deleted_subject_again(file_cluster: Cluster):
    """A program that goes on sending would undo the deletion, or one that is restarted; an operator
    may create it.
    """
    meta, subject = file_cluster.meta, "made.deleted"
    gone = SubjectDeletedError
    later = datetime.now(UTC) + timedelta(hours=1)
    url = f"http://{file_cluster.brokers[0].address}/v1/subjects/{subject}/messages"
    async with Producer(meta) as producer, Admin(meta) as admin:
        await producer.send(subject, b"v", key=b"k")
        await delete_subject(meta, subject)
        for _ in range(2):
            with pytest.raises(gone):
                await producer.send(subject, b"v", key=b"k")
        with pytest.raises(gone):
            await producer.send(subject, b"v", deliver_at=later)
        async with Producer(meta) as newer:
            with pytest.raises(gone, match="an operator can") as refused:
                await newer.send(subject, b"v", key=b"k")
            assert "keylane subject create" in refused.value.hint
        async with aiohttp.ClientSession() as session, session.post(url, data=b"v") as posted:
            answer = await posted.json()
            assert (posted.status, answer["name"]) == (410, "SubjectDeletedError")
        assert subject not in [each.subject for each in await admin.list_subjects()]
        await admin.create_subject(subject)
        await producer.send(subject, b"v", key=b"k")


async def test_outbox_creates_an_unknown_subject_and_not_a_deleted_one_again(
    file_cluster: Cluster, tmp_path: Path
):
    """Its row waits until an operator creates the subject, and is sent then."""
    meta, subject = file_cluster.meta, "made.by-outbox"
    url = f"sqlite:///{tmp_path / 'user.db'}"
    await create_tables(url)
    async with asyncio.timeout(60), Admin(meta) as admin, Outbox(meta, url) as outbox:
        await outbox.send(subject, b"v", key=b"k")
        assert len((await admin.describe_subject(subject)).partitions) == 3
        await delete_subject(meta, subject)
        waiting = asyncio.create_task(outbox.send(subject, b"waits", key=b"k"))
        while "until an operator creates" not in outbox.waiting.get(subject, ""):
            await asyncio.sleep(0.05)
        assert subject not in [each.subject for each in await admin.list_subjects()]
        await admin.create_subject(subject)
        async with Producer(meta) as producer:
            await producer.send(subject, b"another's", key=b"other")
        await waiting
    await file_cluster.check_history(subject, {b"k": [b"waits"], b"other": [b"another's"]})

"""A consumer group that follows a stream: its cursors are where the sink has committed, through
resizes and moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Producer
from keylane.protocol.errors import ConfigError, GroupUnknownError, Reason
from keylane.protocol.operations import OperationKind, Reshape
from keylane.spark import source as source_module
from keylane.spark.schema import spark_schema
from keylane.spark.source import KeylaneSource
from keylane.spark.streaming import progress
from keylane.spark.streaming.reader import KeylaneStreamReader
from support.cluster import Cluster, eventually
from support.raising import raises
from support.spark.query import Query

KEYS = 40


@pytest.fixture
def subject(shared_cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """A subject of the test's own, with 3 partitions and messages 0 to 299, and a group `spark`."""
    name = request.node.name.partition("[")[0].removeprefix("test_")[:60]

    async def make() -> None:
        await shared_cluster.create(name, partitions=3)
        await send(shared_cluster.meta, name, range(300))
        async with Admin(shared_cluster.meta) as admin:
            await admin.create_group(name, "spark")

    asyncio.run(make())
    return name


async def send(meta: str, subject: str, numbers: range) -> None:
    async with Producer(meta) as producer:
        await asyncio.gather(
            *(producer.send(subject, b"%d" % n, key=b"k%d" % (n % KEYS)) for n in numbers)
        )


@contextmanager
def streaming(cluster: Cluster, subject: str, **options: str) -> Iterator[KeylaneStreamReader]:
    given = {"meta": cluster.meta, "subject": subject, "commitGroup": "spark", **options}
    reader = KeylaneSource(given).streamReader(spark_schema())
    try:
        yield reader
    finally:
        reader.stop()


def lag(cluster: Cluster, subject: str) -> int:
    async def ask() -> int:
        async with Admin(cluster.meta) as admin:
            return await admin.lag(subject, "spark")

    return asyncio.run(ask())


def reshape(cluster: Cluster, **ask: object) -> None:
    asyncio.run(cluster.reshape(Reshape(**ask)))  # type: ignore[arg-type]


def test_group_is_where_the_sink_has_committed(shared_cluster, subject, monkeypatch):
    """A batch that was offered and not committed counts as unread; the last one is told when there
    is no other.
    """
    monkeypatch.setattr(progress, "COMMIT_MS", 0)
    with streaming(shared_cluster, subject, maxRowsPerTrigger="100") as reader:
        query = Query(reader)
        lags = []
        while query.construct():
            query.run()
            lags.append(lag(shared_cluster, subject))
        assert lags == [300, 200, 100]
        assert lag(shared_cluster, subject) == 0
        query.check(range(300))


def test_group_follows_through_a_resize_and_a_move_and_never_goes_back(shared_cluster, subject):
    """A restart from an older checkpoint replays batches, and leaves the cursors where they are."""
    with streaming(shared_cluster, subject, maxRowsPerTrigger="70") as reader:
        query = Query(reader)
        query.construct()
        query.run()
        reshape(shared_cluster, kind=OperationKind.RESIZE, subject=subject, partitions=4)
        asyncio.run(send(shared_cluster.meta, subject, range(300, 400)))
        query.all()
        number = max(int(number) for number in query.start()["offsets"])
        move_away(shared_cluster, subject, number)
        asyncio.run(send(shared_cluster.meta, subject, range(400, 500)))
        query.all()
        query.check(range(500))
    assert lag(shared_cluster, subject) == 0
    with streaming(shared_cluster, subject) as reader:
        again = Query(reader, query.checkpoint[:2])
        again.run()
        again.construct()
        assert lag(shared_cluster, subject) == 0


def move_away(cluster: Cluster, subject: str, number: int) -> None:
    """Move a partition to the other broker group."""

    async def look() -> str:
        async with Admin(cluster.meta) as admin:
            parts = (await admin.describe_subject(subject)).partitions
        return next(part.broker_group for part in parts if part.partition_id == number)

    here = asyncio.run(look())
    (there,) = {"g1", "g2"} - {here}
    reshape(
        cluster,
        kind=OperationKind.MOVE,
        subject=subject,
        partition_ids=(number,),
        broker_group=there,
    )


def test_group_with_consumers_is_left_alone_until_they_are_gone(shared_cluster, subject, caplog):
    """The stream goes on, and the log says why the cursors stay."""
    seen: list[bytes] = []

    async def handle(message) -> None:
        seen.append(message.value)
        await asyncio.sleep(3_600)

    async def beside(query: Query) -> None:
        settings = ConsumerSettings(handover_ms=100)
        consumer = Consumer(
            shared_cluster.meta, subject=subject, group="spark", handler=handle, settings=settings
        )
        async with consumer:
            await eventually(lambda: seen, what="a message in hand")
            await asyncio.to_thread(query.all)

    with streaming(shared_cluster, subject) as reader:
        query = Query(reader)
        asyncio.run(beside(query))
        query.check(range(300))
        assert "commitGroup: cannot set group spark of" in caplog.text
        assert lag(shared_cluster, subject) > 0
        assert not query.construct()
        assert lag(shared_cluster, subject) == 0


def test_group_that_is_not_there_ends_the_stream_at_its_start(shared_cluster, subject):
    with (
        streaming(shared_cluster, subject, commitGroup="nobody") as reader,
        pytest.raises(GroupUnknownError, match="KEYLANE_"),
    ):
        Query(reader).construct()


def test_batch_has_no_group_that_follows(shared_cluster, subject, monkeypatch):
    """Nor has a stream of a PySpark that does not tell where a batch begins."""
    given = {"meta": shared_cluster.meta, "subject": subject, "commitGroup": "spark"}
    source = KeylaneSource(given)
    with pytest.raises(ConfigError, match="commitGroup: a group can follow only a stream"):
        source.reader(source.schema())
    monkeypatch.setattr(source_module, "HAS_READ_LIMITS", False)
    with raises(Reason.NOT_STREAMABLE, match="commitGroup"):
        KeylaneSource(given).schema()


def test_limit_of_a_streams_batches_is_refused_by_a_batch(shared_cluster, subject):
    """`load()` cannot know which of both is meant; a batch would read everything all the same."""
    source = KeylaneSource(
        {"meta": shared_cluster.meta, "subject": subject, "maxRowsPerTrigger": "3"}
    )
    schema = source.schema()
    with pytest.raises(
        ConfigError, match="maxRowsPerTrigger: the option limits the batches of a stream"
    ):
        source.reader(schema)
    source.streamReader(schema)

"""Streams beside programs that hang (SIGSTOP) in a batch: ridden out or told, and each row once.
Without a JVM.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from keylane import Producer
from keylane.arrow import range_reader
from keylane.protocol.errors import KeylaneError, Reason
from keylane.spark.schema import spark_schema
from keylane.spark.source import KeylaneSource
from support.cluster import Cluster, Program, pause, resume
from support.spark.query import Query

KEYS = 20
HUNG_S = 1.5


async def send(cluster: Cluster, numbers: range) -> None:
    async with Producer(cluster.meta) as producer:
        await asyncio.gather(
            *(producer.send("streamed", b"%d" % n, key=b"k%d" % (n % KEYS)) for n in numbers)
        )


@pytest.fixture
def query(cluster: Cluster) -> Iterator[Query]:
    """A query over a subject with 300 messages; its first batch is done."""
    asyncio.run(cluster.create("streamed", partitions=2))
    asyncio.run(send(cluster, range(300)))
    source = KeylaneSource({"meta": cluster.meta, "subject": "streamed", "batchRows": "10"})
    reader = source.streamReader(spark_schema())
    query = Query(reader)
    assert query.construct()
    query.run()
    asyncio.run(send(cluster, range(300, 500)))
    yield query
    reader.stop()


def hang(program: Program) -> threading.Timer:
    """Stop a program for HUNG_S."""
    pause(program.process.pid)
    timer = threading.Timer(HUNG_S, resume, (program.process.pid,))
    timer.start()
    return timer


def test_stream_waits_for_a_program_that_hangs_between_and_within_batches(cluster, query):
    """The broker while the next batch is planned, then while it is read; then the metaserver."""
    for number, program in enumerate((cluster.brokers[0], cluster.meta_program)):
        timer = hang(program)
        assert query.construct()
        timer.join()
        timer = hang(program)
        query.run()
        timer.join()
        if number == 0:
            asyncio.run(send(cluster, range(500, 600)))
    assert len(query.batches) == 3
    query.check(range(600))


def test_batch_that_fails_beside_a_hung_broker_is_replayed_with_the_same_rows(
    cluster, query, monkeypatch
):
    """The task names the range; the replay, when the broker answers again, has each row once."""
    assert query.construct()
    monkeypatch.setattr(range_reader, "PATIENCE_S", 0.3)
    pause(cluster.brokers[0].process.pid)
    try:
        with pytest.raises(KeylaneError) as caught:
            query.run()
    finally:
        resume(cluster.brokers[0].process.pid)
    assert caught.value.reason is Reason.RANGE_UNREADABLE
    monkeypatch.undo()
    query.run()
    query.check(range(500))

"""Streams in a real local Spark session, over a real metaserver and two real brokers."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException

from keylane import Admin, Producer
from keylane.protocol.errors import CheckpointMismatchError, ConfigError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.spark import register
from keylane.spark.failure import parse_error
from keylane.spark.streaming.lag import QueryLag, StreamLag
from keylane.spark.streaming.limits import HAS_READ_LIMITS
from support.cluster import eventually

KEYS = 40
ENDS_WITHIN_S = 120


def at_most(rows: int) -> dict[str, str]:
    """The option that limits a batch, where PySpark has limits."""
    return {"maxRowsPerTrigger": str(rows)} if HAS_READ_LIMITS else {}


async def send(meta: str, subject: str, numbers: range) -> None:
    async with Producer(meta) as producer:
        await asyncio.gather(
            *(producer.send(subject, b"%d" % n, key=b"k%d" % (n % KEYS)) for n in numbers)
        )


class Copies:
    """A sink: a file of rows for each batch, written anew when the batch is run again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dies_in: int | None = None
        folder.mkdir()

    def write(self, frame, batch_id: int) -> None:
        rows = [
            (row["partition"], row["offset"], bytes(row["key"]).decode(), int(row["value"]))
            for row in frame.collect()
        ]
        if batch_id == self.dies_in:
            rows = rows[: len(rows) // 2]
        (self.folder / f"{batch_id:06}.json").write_text(json.dumps(rows))
        if batch_id == self.dies_in:
            raise SystemError("the sink is killed in mid-batch")

    def check(self, sent: range) -> None:
        """Every message once, and those of each key in the order they were sent, over all
        batches.
        """
        rows = [
            row for path in sorted(self.folder.iterdir()) for row in json.loads(path.read_text())
        ]
        assert sorted(row[3] for row in rows) == list(sent)
        for key in {row[2] for row in rows}:
            numbers = [row[3] for row in rows if row[2] == key]
            assert numbers == sorted(numbers)


@pytest.fixture
def start(spark, file_cluster, tmp_path):
    """Starts a query with Trigger.AvailableNow on the checkpoint of the test."""
    register(spark)

    def start(subject: str, sink: Copies, **options: str):
        frame = (
            spark.readStream.format("keylane")
            .option("meta", file_cluster.meta)
            .option("subject", subject)
            .options(**options)
            .load()
        )
        writer = frame.writeStream.foreachBatch(sink.write).trigger(availableNow=True)
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    return start


def test_query_killed_in_mid_batch_goes_on_after_a_resize(start, file_cluster, tmp_path):
    """The batch is replayed, then the rest is read, and the run ends: each row once in the sink,
    each key in order.
    """
    meta = file_cluster.meta
    asyncio.run(file_cluster.create("killed", partitions=2))
    asyncio.run(send(meta, "killed", range(400)))
    sink = Copies(tmp_path / "rows")
    sink.dies_in = 2 if HAS_READ_LIMITS else 0
    with pytest.raises(StreamingQueryException, match="killed in mid-batch"):
        start("killed", sink, **at_most(100)).awaitTermination(ENDS_WITHIN_S)
    ask = Reshape(kind=OperationKind.RESIZE, subject="killed", partitions=3)
    asyncio.run(file_cluster.reshape(ask))
    asyncio.run(send(meta, "killed", range(400, 600)))
    sink.dies_in = None
    for _ in range(
        1 if HAS_READ_LIMITS else 2
    ):  # an older PySpark ends the run behind the replayed batch
        assert start("killed", sink, **at_most(150)).awaitTermination(ENDS_WITHIN_S)
    sink.check(range(600))
    assert start("killed", sink).awaitTermination(ENDS_WITHIN_S)
    sink.check(range(600))


def test_group_has_followed_when_a_run_with_available_now_ends(start, file_cluster, tmp_path):
    """The last batch counts, too; an older PySpark does not tell what the sink has, and the option
    is refused.
    """
    meta = file_cluster.meta

    async def make() -> None:
        await file_cluster.create("followed", partitions=2)
        await send(meta, "followed", range(100))
        async with Admin(meta) as admin:
            await admin.create_group("followed", "spark")

    async def lag() -> int:
        async with Admin(meta) as admin:
            return await admin.lag("followed", "spark")

    asyncio.run(make())
    sink = Copies(tmp_path / "rows")
    if not HAS_READ_LIMITS:
        with pytest.raises(AnalysisException, match="commitGroup of a stream needs PySpark"):
            start("followed", sink, commitGroup="spark")
        return
    query = start("followed", sink, commitGroup="spark", maxRowsPerTrigger="30")
    assert query.awaitTermination(ENDS_WITHIN_S)
    sink.check(range(100))
    assert asyncio.run(lag()) == 0


def test_lag_and_checkpoint_of_a_query_are_seen(spark, start, file_cluster, tmp_path):
    """A listener is told what is left; a checkpoint of another subject, and a wrong schema, end the
    query by name.
    """
    meta = file_cluster.meta
    for subject in ("seen", "other"):
        asyncio.run(file_cluster.create(subject, partitions=1))
    asyncio.run(send(meta, "seen", range(50)))
    told: list[QueryLag] = []
    listener = StreamLag(told.append)
    spark.streams.addListener(listener)
    try:
        sink = Copies(tmp_path / "rows")
        assert start("seen", sink, **at_most(20)).awaitTermination(ENDS_WITHIN_S)
        if HAS_READ_LIMITS:
            asyncio.run(_eventually(lambda: [lag.messages for lag in told][:3] == [30, 10, 0]))
    finally:
        spark.streams.removeListener(listener)
    sink.check(range(50))
    with pytest.raises(StreamingQueryException) as caught:
        start("other", sink).awaitTermination(ENDS_WITHIN_S)
    assert type(parse_error(str(caught.value))) is CheckpointMismatchError
    shutil.rmtree(tmp_path / "checkpoint")
    frame = spark.readStream.format("keylane").schema("value STRING").option("meta", meta)
    query = (
        frame.option("subject", "seen")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(ENDS_WITHIN_S)
    assert type(parse_error(str(caught.value))) is ConfigError


async def _eventually(condition) -> None:
    await eventually(condition, what="the lag of each batch")

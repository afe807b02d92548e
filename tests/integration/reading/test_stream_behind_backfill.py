"""A stream that goes on behind a backfill: nothing twice, and nothing is left out between; no
Java.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from pyspark.sql.types import StructType

from keylane import Producer
from keylane.protocol.errors import (
    ConfigError,
    KeylaneError,
    PartitionUnknownError,
    Reason,
)
from keylane.protocol.operations import OperationKind, Reshape
from keylane.spark.options import parse_options
from keylane.spark.reprocess.folder import MANIFEST, OutputFolder
from keylane.spark.reprocess.job import Job
from keylane.spark.reprocess.run import plan_job
from keylane.spark.reprocess.worker import JobTask, run_piece
from keylane.spark.schema import spark_schema
from keylane.spark.source import KeylaneSource
from support.cluster import Cluster, delete_subject
from support.raising import raises

JOB = Job("same", lambda rows: rows, "jobs:same@1")
COLUMNS = "partition,offset,key,value,timestamp,properties"


async def send(cluster: Cluster, subject: str, numbers: range) -> None:
    async with Producer(cluster.meta) as producer:
        await asyncio.gather(
            *(producer.send(subject, b"%d" % n, key=b"k%d" % (n % 20)) for n in numbers)
        )


def backfill(cluster: Cluster, subject: str, folder: Path) -> OutputFolder:
    """What the tasks and the driver of a job do, without Spark."""
    output = OutputFolder(str(folder))
    options = parse_options(
        {"meta": cluster.meta, "subject": subject, "columns": COLUMNS}, now_ms=0
    )
    plan = plan_job(JOB, options, output)
    task = JobTask(options=options, pieces=plan.missing, folder=str(folder))
    for piece in plan.missing:
        run_piece(JOB, task, piece)
    output.write(MANIFEST, replace(plan.manifest, pieces=tuple(output.pieces(JOB.code))))
    return output


def source(cluster: Cluster, subject: str, **options: str) -> KeylaneSource:
    return KeylaneSource({"meta": cluster.meta, "subject": subject, **options})


def streamed(
    cluster: Cluster, subject: str, folder: Path, **options: str
) -> list[tuple[bytes, int]]:
    """The key and number of each row of a stream, batch by batch, until nothing is left."""
    made = source(cluster, subject, start=f"manifest:{folder}", **options)
    reader = made.streamReader(spark_schema())
    try:
        rows = []
        start = reader.initialOffset()
        while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
            for part in reader.partitions(start, end):
                for batch in reader.read(part):
                    rows += [(row["key"], int(row["value"])) for row in batch.to_pylist()]
            start = end
        return rows
    finally:
        reader.stop()


def resize(cluster: Cluster, subject: str, count: int) -> None:
    ask = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=count)
    asyncio.run(cluster.reshape(ask))


def test_backfill_and_stream_have_each_message_once_in_order_through_resizes(
    shared_cluster, tmp_path
):
    """One resize lies before the backfill, and one behind it."""
    asyncio.run(shared_cluster.create("handed", partitions=2))
    asyncio.run(send(shared_cluster, "handed", range(200)))
    resize(shared_cluster, "handed", 3)
    asyncio.run(send(shared_cluster, "handed", range(200, 400)))
    folder = backfill(shared_cluster, "handed", tmp_path)
    asyncio.run(send(shared_cluster, "handed", range(400, 500)))
    resize(shared_cluster, "handed", 2)
    asyncio.run(send(shared_cluster, "handed", range(500, 600)))
    live = streamed(shared_cluster, "handed", tmp_path, maxRowsPerTrigger="70")
    old = [int(value) for value in pq.read_table(folder.path)["value"].to_pylist()]
    assert sorted(old) == list(range(400))
    assert sorted(number for _, number in live) == list(range(400, 600))
    for key in {key for key, _ in live}:
        numbers = [number for each, number in live if each == key]
        assert numbers == sorted(numbers)
    some = streamed(shared_cluster, "handed", tmp_path, keys="k3")
    assert sorted(number for _, number in some) == list(range(403, 600, 20))


def test_wrong_start_behind_a_backfill_is_refused_at_load(shared_cluster, tmp_path):
    """No manifest, another subject, several subjects, a batch, an incomplete backfill, a subject
    that was made anew.
    """
    asyncio.run(shared_cluster.create("begins", partitions=1))
    asyncio.run(shared_cluster.create("others", partitions=1))
    asyncio.run(send(shared_cluster, "begins", range(10)))
    start = f"manifest:{tmp_path}"
    with raises(Reason.MANIFEST):
        source(shared_cluster, "begins", start=start).schema()
    folder = backfill(shared_cluster, "begins", tmp_path)
    assert isinstance(source(shared_cluster, "begins", start=start).schema(), StructType)
    for subject, options, error in (
        ("others", {}, Reason.MANIFEST),
        ("begins,others", {}, ConfigError),
        ("begins", {"end": start}, ConfigError),
        ("begins", {"start": "manifest:"}, ConfigError),
    ):
        with raises(error):
            source(shared_cluster, subject, **{"start": start, **options}).schema()
    with pytest.raises(ConfigError, match="a batch begins at"):
        source(shared_cluster, "begins", start=start).reader(spark_schema())
    asyncio.run(delete_subject(shared_cluster.meta, "begins"))
    asyncio.run(shared_cluster.create("begins", partitions=1))
    with pytest.raises(PartitionUnknownError):
        streamed(shared_cluster, "begins", tmp_path)
    manifest = folder.read(MANIFEST)
    assert manifest is not None
    folder.write(MANIFEST, replace(manifest, pieces=()))
    with pytest.raises(KeylaneError, match="1 pieces are missing"):
        source(shared_cluster, "begins", start=start).schema()

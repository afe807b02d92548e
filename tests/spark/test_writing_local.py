"""Writes of a real local Spark session, over a real metaserver and two real brokers; a worker is
killed on the way.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, functions

from keylane import Admin
from keylane.protocol.errors import (
    ConfigError,
    Reason,
    SubjectUnknownError,
)
from keylane.spark import register
from keylane.spark.failure import parse_error
from support.raising import is_a

COUNT = 20_000


@pytest.fixture
def rows(spark) -> DataFrame:
    """COUNT rows in 3 tasks, with 97 keys."""
    register(spark)
    number = functions.col("id")
    return spark.range(0, COUNT, 1, 3).select(
        functions.concat(functions.lit("k"), number % 97).alias("key"),
        number.cast("string").alias("value"),
    )


@pytest.fixture
def write(file_cluster):
    """Writes a frame to a subject, which is created with 2 partitions."""

    def write(frame: DataFrame, subject: str, mode: str = "append", **options: str) -> None:
        writer = frame.write.format("keylane").option("meta", file_cluster.meta)
        writer.option("subject", subject).options(**options).mode(mode).save()

    return write


def numbers(spark, meta: str, subject: str) -> Counter[int]:
    read = spark.read.format("keylane").option("meta", meta).option("subject", subject).load()
    return Counter(int(row.value) for row in read.select("value").collect())


def hidden(meta: str) -> list[str]:
    async def listed() -> list[str]:
        async with Admin(meta) as admin:
            subjects = await admin.list_subjects(hidden=True)
        return [each.subject for each in subjects if each.hidden_for and not each.problem]

    return asyncio.run(listed())


def test_batch_is_appended_whole(spark, file_cluster, rows, write):
    """To a new subject, then behind what it has; nothing hidden is left."""
    write(rows, "whole", partitions="2")
    write(rows, "whole")
    assert numbers(spark, file_cluster.meta, "whole") == Counter(dict.fromkeys(range(COUNT), 2))
    assert hidden(file_cluster.meta) == []


def test_job_that_fails_leaves_nothing(spark, file_cluster, rows, write):
    """A task raises after others have stored rows; the hidden subject is deleted."""

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if batch.column("value")[0].as_py() == "0":
                raise RuntimeError("a task fails")

    with pytest.raises(Exception, match="a task fails"):
        write(rows.mapInArrow(fail, rows.schema), "fails", partitions="2")
    with pytest.raises(AnalysisException) as caught:
        numbers(spark, file_cluster.meta, "fails")
    assert isinstance(parse_error(str(caught.value)), SubjectUnknownError)
    assert not [name for name in hidden(file_cluster.meta) if name.startswith("fails.")]


def test_rows_left_hidden_outlive_a_second_job_of_that_name(spark, file_cluster, rows, write):
    """The second job is refused before it begins, and does not delete what the first one has
    left.
    """
    write(rows, "looked", partitions="2", hidden="looked.new", publish="false")
    with pytest.raises(AnalysisException) as caught:
        write(rows, "looked", partitions="2", hidden="looked.new", publish="false")
    error = parse_error(str(caught.value))
    assert error.reason is Reason.HIDDEN_TAKEN
    assert "is filled by a write of Spark" in error.message
    assert numbers(spark, file_cluster.meta, "looked.new") == Counter(range(COUNT))


def test_job_is_whole_after_a_worker_was_killed(spark, file_cluster, rows, tmp_path, write):
    """SIGKILL of a worker whose task has stored rows: this session runs no task again, so the job
    fails and leaves nothing.
    """
    mark = tmp_path / "killed"

    def kill_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if batch.column("value")[0].as_py() == "0" and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    frame = rows.mapInArrow(kill_once, rows.schema)
    with pytest.raises(Exception, match="Python worker exited"):
        write(frame, "killed", partitions="2")
    assert mark.exists()
    assert not [name for name in hidden(file_cluster.meta) if name.startswith("killed.")]
    write(frame, "killed", partitions="2")
    assert numbers(spark, file_cluster.meta, "killed") == Counter(range(COUNT))


def test_replayed_micro_batch_is_stored_once(spark, file_cluster, rows, tmp_path):
    """Spark's own record of a finished batch is lost, as in a crash before it: the batch is run
    again.
    """
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    rows.write.parquet(str(source))
    asyncio.run(file_cluster.create("stream", partitions=2))

    def run() -> None:
        frame = spark.readStream.schema(rows.schema).parquet(str(source))
        writer = frame.writeStream.format("keylane").option("meta", file_cluster.meta)
        writer = writer.option("subject", "stream").option("checkpointLocation", str(checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    run()
    for commit in Path(checkpoint, "commits").glob("*0*"):
        commit.unlink()
    run()
    assert numbers(spark, file_cluster.meta, "stream") == Counter(range(COUNT))


def test_replayed_batch_of_foreach_is_published_once_when_it_has_a_name(
    spark, file_cluster, rows, tmp_path, write
):
    """Spark calls the function again with the same number; the rows of the job, and no others, are
    there.
    """
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    rows.write.parquet(str(source))
    asyncio.run(file_cluster.create("named", partitions=2))
    called: list[int] = []

    def store(frame: DataFrame, number: int) -> None:
        called.append(number)
        write(frame, "named", once=f"named-1/{number}")

    def run() -> None:
        frame = spark.readStream.schema(rows.schema).parquet(str(source))
        writer = frame.writeStream.foreachBatch(store).trigger(availableNow=True)
        writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()

    run()
    for commit in Path(checkpoint, "commits").glob("*0*"):
        commit.unlink()
    run()
    assert called == [0, 0]
    assert numbers(spark, file_cluster.meta, "named") == Counter(range(COUNT))


def test_wrong_write_says_so_before_it_runs(spark, file_cluster, rows, write):
    """Columns, mode, options, a subject that is not there, a column that was dropped."""
    for frame, mode, options, kind in (
        (rows.drop("value"), "append", {}, Reason.ROWS_INVALID),
        (rows.withColumn("more", functions.lit(1)), "append", {}, Reason.ROWS_INVALID),
        (rows.withColumn("value", functions.lit(1)), "append", {}, Reason.ROWS_INVALID),
        (rows, "overwrite", {}, ConfigError),
        (rows, "append", {"keys": "1"}, ConfigError),
        (rows, "append", {}, SubjectUnknownError),
        (rows.withColumn("offset", functions.lit(1)), "append", {}, Reason.ROW_ORDER),
        (rows, "append", {"order": "required"}, Reason.ROW_ORDER),
    ):
        with pytest.raises(AnalysisException) as caught:
            write(frame, "nowhere", mode, **options)
        assert is_a(parse_error(str(caught.value)), kind)


def test_shuffled_rows_are_refused(spark, file_cluster, rows, write):
    """The columns of the reader show that their order is lost."""
    write(rows, "ordered", partitions="2")
    read = spark.read.format("keylane").option("meta", file_cluster.meta)
    frame = read.option("subject", "ordered").load()
    write(frame, "copy", partitions="2")
    with pytest.raises(Exception, match="KEYLANE_1315"):
        write(frame.orderBy(functions.desc("offset")), "copy")
    write(frame.orderBy(functions.desc("offset")), "copy", order="none")
    assert numbers(spark, file_cluster.meta, "copy") == Counter(dict.fromkeys(range(COUNT), 2))
    assert Reason.ROWS_DIFFER.code == 1314


def test_write_without_the_columns_of_its_read_is_refused(spark, file_cluster, rows, write):
    """Whatever was done to the values; a key of another origin, and a key that is made anew, are
    not known to have an order.
    """
    write(rows.limit(10), "narrow", partitions="1")
    read = spark.read.format("keylane").option("meta", file_cluster.meta)
    frame = read.option("subject", "narrow").load()
    changed = frame.select("key", functions.upper(frame.value.cast("string")).alias("value"))
    counts = frame.groupBy("key").agg(functions.count("*").cast("string").alias("value"))
    for dropped in (frame.select("key", "value"), changed, counts, frame.drop("offset")):
        with pytest.raises(AnalysisException) as caught:
            write(dropped, "narrower", partitions="1")
        assert parse_error(str(caught.value)).reason is Reason.ROW_ORDER
    write(changed, "narrower", partitions="1", order="none")
    made = frame.select(functions.lit("k").alias("key"), "value")
    write(made, "narrower")
    assert numbers(spark, file_cluster.meta, "narrower") == Counter(dict.fromkeys(range(10), 2))

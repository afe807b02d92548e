"""The driver of a test on a standalone cluster: reads, streams, writes and reprocesses a subject,
and says how far it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from keylane.spark import register
from keylane.spark.options import parse_options
from keylane.spark.reprocess import run as runs
from keylane.spark.reprocess.folder import OutputFolder
from keylane.spark.reprocess.job import Job
from keylane.spark.reprocess.target import JobTarget
from keylane.spark.writing.job import WriteOptions

COLUMNS = "partition,offset,key,value,timestamp,properties"

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.task.duration.threshold": "2s",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
}


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def slow_batches():
    """Functions inside of functions travel to executors by value."""

    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(0.5)
            yield batch

    return slow


def slow_rows():
    def slow(rows: pa.Table) -> pa.Table:
        time.sleep(0.5)
        return rows

    return slow


def slow_first_attempt(folder: str):
    """Each attempt is noted by its number in the folder; the first one takes half a second for a
    batch.
    """

    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        attempt = context.attemptNumber()
        Path(folder, str(attempt)).touch()
        for batch in batches:
            time.sleep(0 if attempt else 0.5)
            yield batch

    return slow


def write_with_speculation(spark: SparkSession, meta: str, folder: str) -> None:
    """A write of one task, whose first attempt is slow: Spark begins a second one beside it."""
    attempts = Path(folder, "attempts")
    attempts.mkdir()
    source = {"meta": meta, "subject": "flights", "batchRows": "100"}
    frame = spark.read.format("keylane").options(**source).load()
    slow = frame.mapInArrow(slow_first_attempt(str(attempts)), frame.schema)
    slow.write.format("keylane").options(meta=meta, subject="copied").mode("append").save()
    say(attempts=sorted(path.name for path in attempts.iterdir()))


def read_with_archive(master: str, meta: str, folder: str) -> None:
    """The Python of executors, and that of the processes that plan, lie in an archive; here it is
    unpacked already.
    """
    os.chdir(folder)
    os.environ["PYSPARK_PYTHON"] = "./env/bin/python"
    spark = session(master, **{"spark.archives": f"{folder}/env.tar.gz#env"})
    frame = spark.read.format("keylane").options(meta=meta, subject="flights").load()
    say(rows=frame.mapInArrow(prefixes(), "prefix STRING, package STRING, rows LONG").collect())
    frame.write.format("keylane").options(meta=meta, subject="copied").mode("append").save()
    say(copied=True)
    spark.stop()


def prefixes():
    def of_this(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import keylane

        for batch in batches:
            facts = {"prefix": [sys.prefix], "package": [keylane.__file__]}
            yield pa.RecordBatch.from_pydict(facts | {"rows": [batch.num_rows]})

    return of_this


def session(master: str, **settings: str) -> SparkSession:
    spark = (
        SparkSession.builder.master(master)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .config("spark.ui.enabled", "false")
        .config("spark.executor.cores", "1")
        .config("spark.executor.memory", "512m")
        .config(map=settings)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def stream_slowly(spark: SparkSession, meta: str, folder: str) -> None:
    """A stream of slow batches; run again it goes on from its checkpoint."""
    source = {"meta": meta, "subject": "flights", "batchRows": "100", "maxRowsPerTrigger": "1500"}
    frame = spark.readStream.format("keylane").options(**source).load()
    slow = frame.mapInArrow(slow_batches(), frame.schema)
    writer = slow.writeStream.format("keylane").options(meta=meta, subject="streamed")
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint-killed")
    writer.trigger(availableNow=True).start().awaitTermination()
    say(streamed=True)


def main() -> None:
    master, meta, folder, stage = sys.argv[1:]
    if stage == "archive":
        read_with_archive(master, meta, folder)
        return
    spark = session(master, **(SPECULATION if stage == "speculate" else {}))
    if stage == "speculate":
        write_with_speculation(spark, meta, folder)
        spark.stop()
        return
    if stage == "stream":
        stream_slowly(spark, meta, folder)
        spark.stop()
        return
    if stage == "first":
        source = {"meta": meta, "subject": "flights", "batchRows": "300"}
        frame = spark.read.format("keylane").options(**source).load()
        say(rows=frame.count())
        stream = spark.readStream.format("keylane").options(meta=meta, subject="flights").load()
        writer = stream.writeStream.format("keylane").options(meta=meta, subject="streamed")
        writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
        writer.trigger(availableNow=True).start().awaitTermination()
        say(streamed=True)
        say(writing=True)
        slow = frame.mapInArrow(slow_batches(), frame.schema)
        slow.write.format("keylane").options(meta=meta, subject="copied").mode("append").save()
        say(copied=True)
    runs.PIECE_ROWS = 200
    given = {"meta": meta, "subject": "flights", "columns": COLUMNS}
    to = JobTarget(options=WriteOptions(meta=(meta,), subject="clean", partitions=2))  # type: ignore[arg-type]
    manifest = runs.run_job(
        spark,
        Job("slow", slow_rows(), "standalone_job:slow@1"),
        parse_options(given, now_ms=0),
        OutputFolder(f"{folder}/job"),
        to=to,
        planned=lambda plan: say(missing=plan.rows),
    )
    say(rows_out=manifest.rows_out)
    spark.stop()


if __name__ == "__main__":
    main()

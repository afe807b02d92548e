"""The client of a test on Spark Connect: reads, streams and writes a subject over a server, and
says what it has seen.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from keylane.arrow.snapshot import take_snapshot
from keylane.spark import StreamLag, ordered, read_ranges, register
from keylane.spark.failure import parse_error
from keylane.spark.options import parse_options


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def counting() -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Functions inside of functions travel to workers by value."""

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})

    return count


def error_of(work: Callable[[], object]) -> str:
    """The class of keylane's error in what the client is told."""
    try:
        work()
    except PySparkException as error:
        return type(parse_error(str(error))).__name__
    return ""


def read(spark: SparkSession, source: dict[str, str]) -> None:
    frame = spark.read.format("keylane").options(**source).load()
    say(rows=frame.count(), schema=frame.schema.simpleString())
    options = f"OPTIONS (meta '{source['meta']}', subject '{source['subject']}')"
    spark.sql(f"CREATE TEMPORARY VIEW seen USING keylane {options}")
    say(in_view=spark.sql("SELECT count(*) FROM seen").first()[0])
    columns = "logical_partition,epoch,offset,key,value"
    shuffled = spark.read.format("keylane").options(**source, columns=columns).load()
    by_key: dict[bytes, list[int]] = {}
    for row in ordered(shuffled.repartition(5), 3).collect():
        by_key.setdefault(bytes(row.key), []).append(int(row.value))
    say(ordered=all(numbers == sorted(numbers) for numbers in by_key.values()), keys=len(by_key))
    asked = parse_options(source, now_ms=0)
    ranges = take_snapshot(asked)
    counted = read_ranges(spark, asked, ranges, apply=counting(), schema="rows LONG").collect()
    say(in_ranges=sorted(row.rows for row in counted))


def stream(spark: SparkSession, source: dict[str, str], folder: str) -> None:
    told = threading.Event()
    lags: list[int] = []

    def note(lag: object) -> None:
        lags.append(lag.messages)  # type: ignore[attr-defined]
        if lags[-1] == 0:
            told.set()

    spark.streams.addListener(StreamLag(note))
    frame = spark.readStream.format("keylane").options(**source, maxRowsPerTrigger="1000").load()
    writer = frame.writeStream.format("keylane").options(meta=source["meta"], subject="streamed")
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
    writer.trigger(availableNow=True).start().awaitTermination()
    told.wait(60)
    say(lags=lags)


def main() -> None:
    remote, meta, folder = sys.argv[1:]
    spark = SparkSession.builder.remote(remote).getOrCreate()
    register(spark)
    source = {"meta": meta, "subject": "flights"}
    read(spark, source)
    stream(spark, source, folder)
    frame = spark.read.format("keylane").options(**source).load()
    frame.write.format("keylane").options(meta=meta, subject="copied").mode("append").save()
    say(copied=True)
    unknown = {**source, "subject": "flight"}
    say(
        unknown=error_of(lambda: spark.read.format("keylane").options(**unknown).load().count()),
        option=error_of(lambda: spark.read.format("keylane").options(topic="x").load().count()),
    )
    spark.stop()


if __name__ == "__main__":
    main()

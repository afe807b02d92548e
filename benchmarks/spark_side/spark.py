"""Measures the Spark side beside Parquet, Spark's Kafka connector and Python tuples, in one run;
prints JSON.

`--rows N` (5,000,000 of 100 bytes in 4 partitions), `--rounds N` (3), `--quick` (200,000 rows, one
round), `--kafka HOME` (see `spark_kafka.py`), `--table` (the table of docs/PERFORMANCE.md too),
`--no-live` (leave out live messages). Each round runs everything in turn, after one round that
warms up; figures are medians. The JVM has its default flags. `cpu_us` in the JSON has the
processor time of each job, in µs a row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
from machine import machine, peak_mb
from main_path import BenchCluster, line_of
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everywhere
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType
from spark_cpu import KINDS, Spent
from spark_figures import cpu_lines, lines_of, medians, medians_of_cpu, table_of
from spark_kafka import TUNED, connector_jars, start_kafka

from keylane.arrow.packing import pack_tasks
from keylane.arrow.snapshot import take_snapshot
from keylane.spark.options import parse_options
from keylane.spark.ranges import read_ranges
from keylane.spark.session import local_session
from keylane.spark.source import KeylaneSource

ROLES = str(Path(__file__).with_name("spark_roles.py"))
PARTITIONS = 4
SMALL_PARTITIONS = 1_000
TUPLE_SHARE = 10
"""The source of tuples gets a tenth of the rows, because it takes so long."""
LIVE_S = 12.0


class TupleReader(DataSourceReader):
    """The same rows as the reader of batches, as Python tuples: what most Python data sources
    do.
    """

    def __init__(self, reader: DataSourceReader) -> None:
        self._reader = reader

    def partitions(self) -> Any:
        return self._reader.partitions()

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        for batch in self._reader.read(partition):
            assert isinstance(batch, pa.RecordBatch)
            columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
            columns["properties"] = [dict(each) for each in columns["properties"]]
            yield from zip(*columns.values(), strict=True)


class TupleSource(DataSource):
    """`keylane` with tuples."""

    @classmethod
    def name(cls) -> str:
        return "keylane_tuples"

    def schema(self) -> StructType:
        return KeylaneSource(self.options).schema()

    def reader(self, schema: StructType) -> TupleReader:
        return TupleReader(KeylaneSource(self.options).reader(schema))


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


class Stopwatch:
    """Measures the duration and the processor time of the jobs of a round."""

    def __init__(self, spent: Spent) -> None:
        self._spent = spent
        self.cpu_us: dict[str, dict[str, float]] = {}
        """The processor time per row in µs, by job and kind of process."""

    def time(self, job: str, rows: int, work: Callable[[], object]) -> float:
        """Run a job, and return its duration in seconds."""
        took = 0.0

        def timed() -> None:
            nonlocal took
            took = seconds_of(work)

        spent = self._spent.by(timed)
        self.cpu_us[job] = {kind: spent[kind] / rows * 1e6 for kind in KINDS}
        return took


def scan(frame: DataFrame) -> None:
    """Materialize every row in the JVM, and store none."""
    frame.write.format("noop").mode("overwrite").save()


def aggregate(frame: DataFrame) -> None:
    """Run a groupBy over key, value and time."""
    value = F.col("value")
    made = [F.count("*"), F.sum(F.length(value)), F.max("timestamp"), F.max(value)]
    scan(frame.groupBy("key").agg(*made))


class SparkBench:
    """A filled cluster, its rows as Parquet and in Kafka, and a session."""

    def __init__(self, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self._rows: int = options.rows
        self.cluster = BenchCluster(folder, stack)
        self.fill("large", PARTITIONS, self._rows)
        self.fill("small", SMALL_PARTITIONS, self._rows)
        self.fill("few", PARTITIONS, self._rows // TUPLE_SHARE)
        self.cluster.create("live", PARTITIONS)
        jars = connector_jars(options.kafka) if options.kafka else []
        settings = {"spark.jars": ",".join(jars)} if jars else {}
        self.spark: SparkSession = local_session(2, "keylane benchmark", settings=settings)
        stack.callback(self.spark.stop)
        self.cold_s = seconds_of(lambda: self.keylane("large").count())
        self.spark.dataSource.register(TupleSource)
        self.parquet_path = str(folder / "parquet")
        self.keylane("large").write.parquet(self.parquet_path)
        self._writes = 0
        self.kafka: str | None = None
        servers = [self.cluster.broker_process.pid]
        if options.kafka:
            self.kafka, kafka_pid = start_kafka(options.kafka, folder, stack)
            servers.append(kafka_pid)
            writer = self.keylane("large").select("key", "value").write.format("kafka")
            writer.option("kafka.bootstrap.servers", self.kafka).option("topic", "large").save()
        self.spent = Spent(tuple(servers))

    def fill(self, subject: str, partitions: int, rows: int) -> None:
        """Create and fill a subject."""
        self.cluster.create(subject, partitions)
        subprocess.run(
            [sys.executable, ROLES, "fill", self.cluster.meta, subject, str(rows)],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def keylane(self, subject: str, source: str = "keylane") -> DataFrame:
        """Return a subject as a DataFrame."""
        reader = self.spark.read.format(source)
        return reader.options(meta=self.cluster.meta, subject=subject).load()

    def parquet(self) -> DataFrame:
        """Return the same rows as Parquet files."""
        return self.spark.read.parquet(self.parquet_path)

    def from_kafka(self, more: dict[str, str]) -> DataFrame:
        """Return the same rows from Kafka."""
        assert self.kafka is not None
        reader = self.spark.read.format("kafka").option("kafka.bootstrap.servers", self.kafka)
        return reader.option("subscribe", "large").options(**more).load()

    def ranges(self, apply: Any = None, schema: str | None = None) -> DataFrame:
        """Return the same rows, read with `mapInArrow`."""
        given = {"meta": self.cluster.meta, "subject": "large"}
        options = parse_options(given, now_ms=0)
        tasks = pack_tasks(take_snapshot(options), options)
        return read_ranges(self.spark, options, tasks, apply=apply, schema=schema)

    def fused(self) -> None:
        """Read every column, and count in the worker."""

        def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})

        counted = self.ranges(count, "rows LONG").collect()
        assert sum(row.rows for row in counted) == self._rows

    def write(self) -> None:
        """Write key and value of the Parquet files to a new subject, and publish it."""
        self._writes += 1
        writer = self.parquet().select("key", "value").write.format("keylane").mode("append")
        subject = f"written-{self._writes}"
        writer = writer.option("order", "none")  # rows of files have no order
        writer.options(meta=self.cluster.meta, subject=subject, partitions=PARTITIONS).save()

    def round(self, watch: Stopwatch) -> dict[str, float]:
        """Run one round of all figures except the live ones."""
        rows, time_of = self._rows, watch.time
        scan_s = time_of("scan", rows, lambda: scan(self.keylane("large")))
        parquet_s = time_of("parquet", rows, lambda: scan(self.parquet()))
        ranges_s = time_of("ranges", rows, lambda: scan(self.ranges()))
        fused_s = time_of("fused", rows, self.fused)
        agg_s = time_of("agg", rows, lambda: aggregate(self.keylane("large")))
        parquet_agg_s = time_of("parquet_agg", rows, lambda: aggregate(self.parquet()))
        few = rows // TUPLE_SHARE
        tuples_s = time_of("tuples", few, lambda: scan(self.keylane("few", "keylane_tuples")))
        small_s = time_of("small", rows, lambda: scan(self.keylane("small")))
        write_s = time_of("write", rows, self.write)
        figures = {
            "scan_rows_per_second": rows / scan_s,
            "scan_vs_parquet": parquet_s / scan_s,
            "ranges_vs_parquet": parquet_s / ranges_s,
            "agg_vs_parquet": parquet_agg_s / agg_s,
            "scan_vs_tuples": tuples_s * TUPLE_SHARE / scan_s,
            "fused_rows_per_second": rows / fused_s,
            "write_rows_per_second": rows / write_s,
            "small_partitions_ratio": small_s / scan_s,
        }
        if self.kafka:
            kafka_s = time_of("kafka", rows, lambda: scan(self.from_kafka({})))
            tuned_s = time_of("kafka_tuned", rows, lambda: scan(self.from_kafka(TUNED)))
            figures |= {"scan_vs_kafka": kafka_s / scan_s, "scan_vs_kafka_tuned": tuned_s / scan_s}
        return figures

    def live_p99_ms(self, job: Callable[[], object] | None) -> float:
        """Return the p99 latency of live messages while a job runs repeatedly."""
        command = [sys.executable, ROLES, "live", self.cluster.meta, "live", str(LIVE_S)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line_of(process)
        ends_at = time.monotonic() + LIVE_S
        while job is not None and time.monotonic() < ends_at:
            job()
        p99_ms: float = line_of(process)["p99_ms"]
        process.wait()
        return p99_ms

    def live(self) -> dict[str, float]:
        """Return the live figures during no job, a scan, and a Parquet scan as the control."""
        idle = self.live_p99_ms(None)
        beside_scan = self.live_p99_ms(lambda: scan(self.keylane("large")))
        beside_parquet = self.live_p99_ms(lambda: scan(self.parquet()))
        return {
            "live_idle_p99_ms": idle,
            "live_p99_ratio": beside_scan / idle,
            "live_parquet_p99_ratio": beside_parquet / idle,
        }


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kafka", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--no-live", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rounds = 200_000, 1
    return options


def main() -> None:
    """Run the rounds and print medians."""
    options = parsed()
    not_taken = {}
    if not options.kafka:
        why = "no --kafka HOME with the jars of a Kafka and of Spark's connector"
        not_taken = {"scan_vs_kafka": why, "scan_vs_kafka_tuned": why}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = SparkBench(options, Path(folder), stack)
        bench.round(Stopwatch(bench.spent))
        rounds, watches = [], []
        for number in range(options.rounds):
            watches.append(Stopwatch(bench.spent))
            rounds.append(bench.round(watches[-1]) | ({} if options.no_live else bench.live()))
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        figures = medians(rounds) | {
            "cold_first_query_s": bench.cold_s,
            "broker_peak_mb": peak_mb(bench.cluster.broker_process.pid),
        }
    print("\n".join(lines_of(figures, not_taken)), file=sys.stderr)
    if options.table:
        print(table_of(figures, not_taken), file=sys.stderr)
    head = {"machine": machine(), "rounds": options.rounds, "rows": options.rows}
    shown = {name: round(value, 3) for name, value in figures.items()}
    spent = medians_of_cpu([watch.cpu_us for watch in watches])
    print("\n".join(cpu_lines(spent)), file=sys.stderr)
    print(json.dumps({**head, **shown, "cpu_us": spent, "not_taken": not_taken}, indent=2))


if __name__ == "__main__":
    main()

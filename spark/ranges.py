"""Reads planned ranges into a DataFrame with `mapInArrow`, and applies a user function in the same
worker. Requires pyspark.

    options = parse_options({"meta": "127.0.0.1:7000", "subject": "orders"}, now_ms=0)
    frame = read_ranges(spark, options, take_snapshot(options))

    task: one list of ranges ──▶ Arrow batches ──▶ apply ──▶ rows of Spark

The JVM takes longer to scan a row than keylane, so a function that filters or counts in the worker
saves most of the time.

Invariants
    A task yields the rows of its ranges in order, and the function receives them batch by batch in
    the same order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import StructType

from ..arrow.planner import PlannedRange
from ..arrow.selection import ReadOptions
from ..arrow.task_reader import read_task
from .failure import readable_errors
from .schema import read_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Apply = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""Transforms the batches of a task into the batches that Spark gets."""


def read_ranges(
    spark: SparkSession,
    options: ReadOptions,
    tasks: Iterable[PlannedRange | Sequence[PlannedRange]],
    *,
    apply: Apply | None = None,
    schema: StructType | str | None = None,
) -> DataFrame:
    """
    Return a DataFrame with the rows of planned ranges.

    Its tasks raise the same errors as `arrow.task_reader.read_task`.

    Args:
        options: the result of `parse_options`; only its columns, batch rows and bytes per second
            are used.
        tasks: for each task, a range, or a list of ranges to read one after another.
        apply: called in the worker with the batches of each task; it may drop and create rows.
        schema: the schema of the batches that `apply` yields; None for the columns in the options.
    """
    pickled_tasks = [
        pickle.dumps([task] if isinstance(task, PlannedRange) else list(task)) for task in tasks
    ]
    result_schema = read_schema(options) if schema is None else schema
    if not pickled_tasks:
        return spark.createDataFrame([], result_schema)
    # Spark Connect has no SparkContext, so each task gets all ranges, and selects its own by its
    # id.
    all_tasks = None if hasattr(spark, "sparkContext") else pickled_tasks

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with readable_errors():
            rows = _read_rows(options, batches, all_tasks)
            yield from rows if apply is None else apply(rows)

    if all_tasks is not None:
        return spark.range(0, len(pickled_tasks), 1, len(pickled_tasks)).mapInArrow(
            read, result_schema
        )
    # One element for each task, so that `numSlices` gives each task exactly one.
    numbered = spark.sparkContext.parallelize(list(enumerate(pickled_tasks)), len(pickled_tasks))
    frame = spark.createDataFrame(numbered, "id LONG, ranges BINARY")
    return frame.mapInArrow(read, result_schema)


def _read_rows(
    options: ReadOptions, tasks: Iterator[pa.RecordBatch], all_tasks: Sequence[bytes] | None
) -> Iterator[pa.RecordBatch]:
    for batch in tasks:
        if all_tasks is None:
            selected = batch.column("ranges").to_pylist()
        else:
            selected = [all_tasks[number] for number in batch.column("id").to_pylist()]
        for ranges in selected:
            yield from read_task(options, pickle.loads(ranges))  # noqa: S301 - pickled by us

"""Planned ranges as a DataFrame by `mapInArrow`, with a function of the user's run in the worker
beside the read.  Needs pyspark.

    options = parse_options({"meta": "127.0.0.1:7000", "subject": "orders"}, now_ms=0)
    frame = read_ranges(spark, options, take_snapshot(options))

    task: one list of ranges ──▶ Arrow batches ──▶ apply ──▶ rows of Spark

A row of a scan costs the JVM more than keylane; a function that filters or counts in the worker
spares it that.

Invariants
    The rows of a task are those of its ranges, in their order; a function sees them batch by batch
    in that order.
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
from .schema import schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Apply = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""From the batches of a task to the batches that Spark gets."""


def read_ranges(
    spark: SparkSession,
    options: ReadOptions,
    tasks: Iterable[PlannedRange | Sequence[PlannedRange]],
    *,
    apply: Apply | None = None,
    schema: StructType | str | None = None,
) -> DataFrame:
    """
    A DataFrame of the rows of ranges.

    Args:
        options: as `parse_options` gives them; columns, batch rows and pace are of use here.
        tasks: the range of each task, or its ranges, read one after another.
        apply: runs in the worker over the batches of each task; it may leave out rows and make
            others.
        schema: of what `apply` yields; None: the columns of the options.

    The tasks raise what `arrow.task_reader.read_task` raises.
    """
    packed = [
        pickle.dumps([task] if isinstance(task, PlannedRange) else list(task)) for task in tasks
    ]
    made = schema_of(options) if schema is None else schema
    if not packed:
        return spark.createDataFrame([], made)
    of_all = None if hasattr(spark, "sparkContext") else packed

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with readable_errors():
            rows = _rows(options, batches, of_all)
            yield from rows if apply is None else apply(rows)

    if (
        of_all is not None
    ):  # Spark Connect has no SparkContext: its tasks bring all ranges, and read their own
        return spark.range(0, len(packed), 1, len(packed)).mapInArrow(read, made)
    # An element for each task: `numSlices` then cuts between all of them.
    numbered = spark.sparkContext.parallelize(list(enumerate(packed)), len(packed))
    return spark.createDataFrame(numbered, "id LONG, ranges BINARY").mapInArrow(read, made)


def _rows(
    options: ReadOptions, tasks: Iterator[pa.RecordBatch], of_all: Sequence[bytes] | None
) -> Iterator[pa.RecordBatch]:
    for batch in tasks:
        if of_all is None:
            mine = batch.column("ranges").to_pylist()
        else:
            mine = [of_all[number] for number in batch.column("id").to_pylist()]
        for ranges in mine:
            yield from read_task(options, pickle.loads(ranges))  # noqa: S301 - made by this program's driver

"""The data source `keylane` for PySpark 4, which plans ranges and reads them as Arrow batches.
Requires pyspark.

    reader = spark.read.format("keylane")
    reader.option("meta", "127.0.0.1:7000").option("subject", "orders").load()

    load()   schema() takes the snapshot, which is pickled with the source
    plan     reader().partitions() returns the tasks of `arrow/packing.py`
    task     read() yields Arrow batches; a task gets only its part of the plan

For an SQL table, Spark passes the options only to CREATE TABLE, but the schema to every query. So
the options are stored in the schema.

Invariants
    The snapshot is taken once per load(), so that each action on the DataFrame reads the same rows.
    Reading changes nothing on the broker: it takes no locks and sends no acks. Spark stores the
    progress.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from ..arrow.packing import Task, pack_tasks
from ..arrow.planner import PlannedRange, check_batch
from ..arrow.selection import EARLIEST, ReadOptions
from ..arrow.snapshot import has_expired, take_snapshot
from ..arrow.task_reader import read_task
from ..protocol.errors import (
    ConfigError,
    KeylaneError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
)
from .failure import readable_errors
from .options import is_sql_table, parse_options, user_options
from .schema import embed_options, embedded_options, read_schema
from .streaming.handover import resolve_backfill_start
from .streaming.limits import HAS_READ_LIMITS
from .streaming.reader import KeylaneStreamReader
from .streaming.settings import StreamSettings, stream_settings
from .travel import reduce_by_value
from .writing.batch_writer import KeylaneBatchWriter
from .writing.stream_writer import KeylaneStreamWriter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@dataclass
class KeylaneTask(InputPartition):
    """A Spark task, with the planned ranges that it reads one after another."""

    ranges: Task


class KeylaneSource(DataSource):
    """Reads and writes subjects as DataFrames. `options.py` lists the options."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._loaded_ms = time.time_ns() // 1_000_000
        self._plan: list[PlannedRange] | None = None
        self._plan_on_driver_only = False

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "keylane"

    def schema(self) -> StructType:
        """Take the snapshot, and return the schema."""
        with readable_errors():
            options = self._parse(self.options)
            resolve_backfill_start(options)
            self._check_streamable(options)
            try:
                # PySpark does not tell whether this is a stream, and only a stream may start after
                # a backfill, move a group's cursors, or limit its batches.
                start = EARLIEST if options.start.manifest else options.start
                batch = replace(options, start=start, commit_group=None, max_rows_per_trigger=None)
                self._snapshot(batch)
            except OffsetOutOfRangeError as error:
                # A stream that continues from its checkpoint no longer needs the messages at its
                # start, which retention may have removed. So only a batch fails.
                if (error.offset or 0) >= (error.first_offset or 0):
                    raise
            except PartitionUnknownError as error:  # or retention has removed the whole partition
                if error.partition_id is None or not has_expired(options, error.partition_id):
                    raise
        schema = read_schema(options)
        return (
            embed_options(schema, user_options(self.options))
            if is_sql_table(self.options)
            else schema
        )

    def reader(self, schema: StructType) -> KeylaneReader:
        """Return a reader for the snapshot. A schema given by the user must equal the snapshot's
        schema.
        """
        with readable_errors():
            options = self._parse({**embedded_options(schema), **self.options})
            _check_schema(options, schema)
            check_batch(options)
            reader = KeylaneReader(options, pack_tasks(self._snapshot(options), options))
        # Spark now pickles the source again for each task, where it does not need the plan.
        self._plan_on_driver_only = True
        return reader

    def streamReader(  # noqa: N802 - PySpark's name
        self, schema: StructType
    ) -> KeylaneStreamReader:
        """
        Return a stream reader.

        PySpark hides errors that are raised here, so the reader's first call raises them.
        """
        options = self._parse({**embedded_options(schema), **self.options})
        try:
            options = resolve_backfill_start(options)
            _check_schema(options, schema)
            settings = stream_settings(options, self.options, has_read_limits=HAS_READ_LIMITS)
        except KeylaneError as error:
            settings = StreamSettings(error=error)
        return KeylaneStreamReader(options, settings, read_task)

    def writer(self, schema: StructType, overwrite: bool) -> KeylaneBatchWriter:
        """Create the hidden subject for a job, and return the job's writer."""
        with readable_errors():
            return KeylaneBatchWriter.begin(self.options, schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802 - PySpark's name
        self, schema: StructType, overwrite: bool
    ) -> KeylaneStreamWriter:
        """Return a writer for the micro-batches of a query."""
        with readable_errors():
            return KeylaneStreamWriter.begin(self.options, schema, overwrite=overwrite)

    def _check_streamable(self, options: ReadOptions) -> None:
        """Raise InvalidRequestError if an option is set that a stream cannot use."""
        if options.max_rows_per_trigger is not None or options.commit_group is not None:
            stream_settings(options, self.options, has_read_limits=HAS_READ_LIMITS)

    def _parse(self, options: Mapping[str, str]) -> ReadOptions:
        return parse_options(options, now_ms=self._loaded_ms)

    def _snapshot(self, options: ReadOptions) -> list[PlannedRange]:
        if self._plan is None:
            assert not self._plan_on_driver_only, "a source of a task plans nothing"
            self._plan = take_snapshot(options)
        return self._plan

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        if self._plan_on_driver_only:
            state["_plan"] = None
        return reduce_by_value(KeylaneSource, state)


def _check_schema(options: ReadOptions, schema: StructType) -> None:
    names = tuple(schema.names)
    if names != options.columns:
        raise ConfigError(
            "give no schema and no list of columns; choose columns with the option `columns`: "
            f"they are {', '.join(options.columns)}, and the schema has {', '.join(names)}"
        )
    for expected, given_types in zip(read_schema(options).fields, schema.fields, strict=True):
        expected_type, given_type = (
            expected.dataType.simpleString(),
            given_types.dataType.simpleString(),
        )
        if expected_type != given_type:
            raise ConfigError(
                f"give no schema: column {expected.name} is {expected_type}, and the schema says "
                f"{given_type}; cast the column of the DataFrame instead"
            )


class KeylaneReader(DataSourceReader):
    """Reads the tasks of one snapshot. The copy of the reader in a Spark task has no list of
    tasks.
    """

    def __init__(self, options: ReadOptions, tasks: list[Task]) -> None:
        self._options = options
        self._tasks = tasks

    def partitions(self) -> list[InputPartition]:
        """Return a partition for each task, or an empty list if there is nothing to read."""
        return [KeylaneTask(task) for task in self._tasks]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """
        Yield the rows of one task.

        If there are no tasks, Spark still calls this once, with its own partition, which has no
        rows.
        """
        if not isinstance(partition, KeylaneTask):
            assert partition is None or partition.value is None
            return
        if self._options.gc_freeze and TaskContext.get() is not None:
            _SparkWorker.freeze()
        with readable_errors():
            yield from read_task(self._options, partition.ranges)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_by_value(KeylaneReader, {**self.__dict__, "_tasks": []})


class _SparkWorker:
    """The Python process in which Spark runs tasks one after another."""

    _frozen = False

    @classmethod
    def freeze(cls) -> None:
        """
        Exclude the loaded objects from garbage collection. Only the first call has an effect.

        Spark collects garbage after each task, which would otherwise take 30 ms.
        """
        if not cls._frozen:
            gc.collect()
            gc.freeze()
            cls._frozen = True

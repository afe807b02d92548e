"""The data source `keylane` for PySpark 4: plans ranges, reads them as Arrow batches.  Needs pyspark.

    register(spark)
    spark.read.format("keylane").option("meta", "127.0.0.1:7000").option("subject", "flights").load()

    load()   schema() takes the snapshot; it travels inside the pickled source
    plan     reader().partitions(): one KeylaneRange per physical partition
    task     read(): Arrow batches of one range

Invariants
    The snapshot is taken once per load(): each action on the DataFrame reads the same rows.
    Reading changes nothing at the broker: no lock, no ack; progress is Spark's own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from ..arrow.planner import PlannedRange
from ..arrow.range_reader import read_range
from ..arrow.selection import ReadOptions
from ..arrow.snapshot import take_snapshot
from ..protocol.errors import ConfigError
from .failure import readable_errors
from .options import parse_options
from .schema import spark_schema
from .writing.batch_writer import KeylaneBatchWriter
from .writing.stream_writer import KeylaneStreamWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

FORMAT = "keylane"


@dataclass
class KeylaneRange(InputPartition):
    """One task of Spark: the planned range it reads."""

    planned: PlannedRange


class KeylaneSource(DataSource):
    """A subject as a DataFrame; the options are in `options.py`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._plan: list[PlannedRange] | None = None

    @classmethod
    def name(cls) -> str:
        """The word after `format`."""
        return FORMAT

    def schema(self) -> StructType:
        """The columns, and the moment at which the snapshot is taken."""
        self._snapshot()
        return spark_schema(self._read_options.columns)

    def reader(self, schema: StructType) -> KeylaneReader:
        """A reader of the snapshot; a schema given by the user has to be this one."""
        with readable_errors():
            names = tuple(schema.names)
            if names != self._read_options.columns:
                raise ConfigError(
                    "give no schema; choose columns with the option `columns`: they are "
                    f"{', '.join(self._read_options.columns)}, and the schema has {', '.join(names)}"
                )
        return KeylaneReader(self._read_options, self._snapshot())

    @cached_property
    def _read_options(self) -> ReadOptions:
        with readable_errors():
            return parse_options(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> KeylaneBatchWriter:
        """A writer of one job, whose hidden subject is made."""
        with readable_errors():
            return KeylaneBatchWriter.begin(self.options, schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> KeylaneStreamWriter:
        """A writer of the micro-batches of one query."""
        with readable_errors():
            return KeylaneStreamWriter.begin(self.options, schema, overwrite=overwrite)

    def _snapshot(self) -> list[PlannedRange]:
        if self._plan is None:
            with readable_errors():
                self._plan = take_snapshot(self._read_options)
        return self._plan


class KeylaneReader(DataSourceReader):
    """Reads the ranges of one snapshot."""

    def __init__(self, options: ReadOptions, plan: list[PlannedRange]) -> None:
        self._options = options
        self._plan = plan

    def partitions(self) -> list[InputPartition]:
        """One per physical partition, empty ranges too."""
        return [KeylaneRange(planned) for planned in self._plan]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The rows of one range; none for what Spark makes of an empty list of ranges."""
        if not isinstance(partition, KeylaneRange):
            assert partition is None or partition.value is None
            return
        if self._options.gc_freeze and TaskContext.get() is not None:
            _SparkWorker.freeze()
        with readable_errors():
            yield from read_range(self._options, partition.planned)


class _SparkWorker:
    """The Python process that Spark runs tasks in, one after another."""

    _frozen = False

    @classmethod
    def freeze(cls) -> None:
        """Once: take what is loaded out of the collection that Spark runs after each task (30 ms each)."""
        if not cls._frozen:
            gc.collect()
            gc.freeze()
            cls._frozen = True


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("keylane")` known to this session."""
    spark.dataSource.register(KeylaneSource)

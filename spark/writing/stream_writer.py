"""`df.writeStream.format("keylane")`: stores the rows of a micro-batch once, however often Spark
repeats the batch. Requires pyspark.

After a crash, Spark repeats a batch with the same query id, batch id and rows. Each task numbers
its rows under a producer id derived from (query id, batch id, task number), so brokers recognize
repeated rows. Rows are visible as soon as they are stored, so committing a batch publishes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from ...arrow.opening import run_with_network
from ...protocol.clock import SystemClock
from ...protocol.errors import ConfigError
from ...rpc.client import MetaClient
from ..failure import readable_errors
from ..schema import key_was_read
from .batch_writer import TaskDone
from .guard import guarded_columns
from .job import WriteOptions, check_sources, parse_write_options
from .schema import check_columns
from .task import write_task

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:
    # PySpark 4.0 only checks whether a writer takes Arrow batches, not what it writes.
    from pyspark.sql.datasource import (  # type: ignore[assignment]
        DataSourceArrowWriter as DataSourceStreamArrowWriter,
    )

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
BATCH_ONLY = ("partitions", "once", "hidden", "publish")


class KeylaneStreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of one query."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    @classmethod
    def begin(
        cls, given_options: Mapping[str, str], schema: StructType, *, overwrite: bool
    ) -> KeylaneStreamWriter:
        """
        Check the options, the columns and the subject. This blocks.

        Raises:
            ConfigError, RowsError: the options or columns are invalid.
            SubjectUnknownError: the subject does not exist.
            UnreachableError: no metaserver responds.
        """
        options = parse_write_options(given_options)
        invalid = [name for name in BATCH_ONLY if name in {each.lower() for each in given_options}]
        if invalid:
            raise ConfigError(
                f"the options cannot work: only batch writes have {', '.join(invalid)}; a stream "
                "writes to a subject that exists"
            )
        if overwrite:
            raise ConfigError(
                'a stream is written with outputMode("append"); write rows that change, such as '
                "counts by key, with foreachBatch"
            )
        check_columns(schema)
        guarded_columns(schema.names, options.order, key_was_read=key_was_read(schema))
        run_with_network(
            lambda network: MetaClient(network, options.meta).route(options.subject),
            options.security,
        )
        return cls(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskDone:
        """Write the rows of one task of a batch, and return its commit message."""
        context = TaskContext.get()
        assert context is not None
        task = context.partitionId()
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if query is None or batch is None:
            raise ConfigError("Spark does not pass the query and the batch of this task")
        work = partial(
            write_task,
            options=self._options,
            subject=self._options.subject,
            batches=iter(iterator),
            identity=("stream", self._options.subject, query, batch, task),
            task=task,
            sent_at_ns=SystemClock.wall_ns(),
            clock=SystemClock(),
            rng=random.Random(),
        )
        with readable_errors():
            return TaskDone(run_with_network(work, self._options.security))

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - PySpark's name
    ) -> None:
        """Check a batch whose rows are already stored. Raises RowsError if two tasks may have had
        rows with the same key.
        """
        with readable_errors():
            check_sources([each.report for each in messages if isinstance(each, TaskDone)])

    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - PySpark's name
    ) -> None:
        """Do nothing: if Spark repeats the batch, rows that are already stored are not stored
        twice.
        """

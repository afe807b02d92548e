"""Small Arrow batches, as those of many small partitions, become batches of about the rows that were asked for.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from ..protocol.errors import KeylaneError
from .rows import BATCH_BYTES_MAX


def joined(batches: Iterable[pa.RecordBatch], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """
    The rows in their order, in batches that are not below `batch_rows` where they can be joined.

    A batch costs Spark's JVM as much as some thousand rows.  Before an error all rows are yielded that came before it.
    """
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    source = iter(batches)
    while True:
        failure: KeylaneError | None = None
        try:
            batch = next(source, None)
        except KeylaneError as error:
            batch, failure = None, error
        full = batch is not None and (
            rows + batch.num_rows > batch_rows or size + batch.nbytes > BATCH_BYTES_MAX
        )
        if waiting and (batch is None or full):
            yield _one(waiting)
            waiting, rows, size = [], 0, 0
        if failure is not None:
            raise failure
        if batch is None:
            return
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= batch_rows:  # at once: its reader waits
            yield _one(waiting)
            waiting, rows, size = [], 0, 0


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole

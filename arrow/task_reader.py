"""Reads the ranges of a task, filters rows by key, and skips rows that retention has removed if the
options allow it. Performs network I/O.

Invariants
    Lost rows are always reported: by a DataLossError, or by a log warning if the options allow data
    loss.
    Every remaining row is returned exactly once, in the order of the ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from ..protocol import endpoints
from ..protocol.errors import KeylaneError, OffsetOutOfRangeError
from ..protocol.reading.bounds import AskBounds, BoundsOf, PartitionBounds
from .loss import loss_error
from .planner import PlannedRange
from .process_loop import ProcessLoop
from .range_reader import read_ranges
from .rows import KeyFilter
from .selection import ReadOptions

_LOG = logging.getLogger(__name__)


def read_task(options: ReadOptions, ranges: Sequence[PlannedRange]) -> Iterator[pa.RecordBatch]:
    """
    Return an iterator over the rows of the ranges, one range after another, as Arrow batches.

    The iterator blocks, and needs a thread without an event loop.

    Raises:
        DataLossError: retention has removed rows, and `fail_on_data_loss` is set.
        OffsetOutOfRangeError: the partition ends before the range does.
        CorruptBatchError: a broker's answer is damaged, or does not contain the range.
        UnreachableError: a broker did not respond.
    """
    return _TaskIterator(options, ranges)


class _TaskIterator(Iterator[pa.RecordBatch]):
    """
    Iterates over the rows of a task.

    This is not a generator, because an interrupted generator ends, and a later call would silently
    miss the remaining batches.
    """

    def __init__(self, options: ReadOptions, ranges: Sequence[PlannedRange]) -> None:
        self._remaining = list(ranges)
        """The ranges that have not been consumed yet, including the rows of the last batch."""
        self._last_batch_rows = 0
        """The number of rows of the last batch."""
        self._key_filter: KeyFilter | None = None
        if options.keys is not None:
            self._key_filter = KeyFilter(options.keys, options.columns)
            options = replace(options, columns=self._key_filter.columns_to_read)
        self._options = options
        self._batches: Iterator[pa.RecordBatch] | None = None
        """The iterator over the remaining ranges; None before the first batch and after an error.
        """

    def __next__(self) -> pa.RecordBatch:
        while remaining := _without_first(self._remaining, self._last_batch_rows):
            self._remaining = remaining
            self._last_batch_rows = 0
            batches, self._batches = self._batches, None
            if batches is None:
                batches = read_ranges(self._options, tuple(remaining))
            try:
                batch = next(batches)
            except OffsetOutOfRangeError as error:
                self._remaining = _without_lost(self._options, remaining, error)
                continue
            rows = batch if self._key_filter is None else self._key_filter.rows(batch)
            self._batches = batches
            self._last_batch_rows = batch.num_rows
            if rows.num_rows:
                return rows
        self._batches = None
        raise StopIteration


def _without_first(ranges: list[PlannedRange], rows: int) -> list[PlannedRange]:
    """Return the ranges without their first `rows` rows."""
    remaining = list(ranges)
    while remaining and rows >= remaining[0].rows:
        rows -= remaining.pop(0).rows
    if rows:
        remaining[0] = replace(remaining[0], start=remaining[0].start + rows)
    return remaining


def _without_lost(
    options: ReadOptions, ranges: list[PlannedRange], error: OffsetOutOfRangeError
) -> list[PlannedRange]:
    """
    Return the ranges without the rows that are lost according to `error`, and log a warning.

    Raises:
        DataLossError: the options do not allow data loss.
        OffsetOutOfRangeError: `error` does not mean that rows were lost.
    """
    index = next(
        (
            number
            for number, each in enumerate(ranges)
            if error.partition_id in {None, each.partition_id}
        ),
        0,
    )
    planned_range, first_offset = ranges[index], error.first_offset
    if first_offset is None or first_offset <= planned_range.start:
        raise error
    lost_start = (
        planned_range.start if error.offset is None else max(planned_range.start, error.offset)
    )
    end = min(first_offset, planned_range.end)
    loss = loss_error(
        planned_range.subject, _current_bounds(options, planned_range, error), lost_start, end
    )
    if options.fail_on_data_loss:
        raise loss from error
    _LOG.warning("%s", loss.message)
    return [*ranges[:index], replace(planned_range, start=end), *ranges[index + 1 :]]


def _current_bounds(
    options: ReadOptions, planned_range: PlannedRange, error: OffsetOutOfRangeError
) -> PartitionBounds:
    """Return the partition's bounds from its broker, or from the error if the broker does not
    respond.
    """
    try:
        loop = ProcessLoop.current()
        return loop.run(_fetch_bounds(loop, options, planned_range))
    except KeylaneError:
        return PartitionBounds(
            partition_id=planned_range.partition_id,
            first_offset=error.first_offset or 0,
            next_offset=error.next_offset or 0,
        )


async def _fetch_bounds(
    loop: ProcessLoop, options: ReadOptions, planned_range: PlannedRange
) -> PartitionBounds:
    body = AskBounds(partitions=[BoundsOf(partition_id=planned_range.partition_id)])
    broker = loop.broker(options.security, planned_range.address)
    reply = await broker.control(endpoints.PARTITION_BOUNDS, body)
    if not reply.partitions:
        raise KeylaneError
    return reply.partitions[0]

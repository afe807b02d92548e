"""Reads the ranges of a task: it chooses rows by key, and skips rows that retention has removed if
the options allow it. Network only.

Invariants
    Lost rows are reported: as a DataLossError, or, if the options allow a loss, as a warning in the
    log.
    Every remaining row is yielded once, in the order of the ranges.
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

    It blocks, and needs a thread without an event loop.

    Raises:
        DataLossError: retention has removed rows, and `fail_on_data_loss` is set.
        OffsetOutOfRangeError: the partition ends before the range does.
        CorruptBatchError: the answer of a broker is damaged, or does not contain the range.
        UnreachableError: a broker did not answer.
    """
    return _TaskReading(options, ranges)


class _TaskReading(Iterator[pa.RecordBatch]):
    """
    The iterator over the rows of a task.

    It is no generator: Ctrl-C would end one, and a later call would silently miss the remaining
    batches.
    """

    def __init__(self, options: ReadOptions, ranges: Sequence[PlannedRange]) -> None:
        self._left = list(ranges)
        """Ranges whose rows were not returned yet, and the rows of the last batch."""
        self._given = 0
        """Number of rows of the last batch, which are still part of the ranges left."""
        self._chosen: KeyFilter | None = None
        if options.keys is not None:
            self._chosen = KeyFilter(options.keys, options.columns)
            options = replace(options, columns=self._chosen.columns_to_read)
        self._options = options
        self._batches: Iterator[pa.RecordBatch] | None = None
        """The iterator over the ranges left; None before the first batch and after an error."""

    def __next__(self) -> pa.RecordBatch:
        while left := _without_first(self._left, self._given):
            self._left = left
            self._given = 0
            batches, self._batches = self._batches, None
            if batches is None:
                batches = read_ranges(self._options, tuple(left))
            try:
                batch = next(batches)
            except OffsetOutOfRangeError as error:
                self._left = _without_lost(self._options, left, error)
                continue
            rows = batch if self._chosen is None else self._chosen.rows(batch)
            self._batches = batches
            self._given = batch.num_rows
            if rows.num_rows:
                return rows
        self._batches = None
        raise StopIteration


def _without_first(ranges: list[PlannedRange], rows: int) -> list[PlannedRange]:
    """Return the ranges without their first `rows` rows."""
    left = list(ranges)
    while left and rows >= left[0].rows:
        rows -= left.pop(0).rows
    if rows:
        left[0] = replace(left[0], start=left[0].start + rows)
    return left


def _without_lost(
    options: ReadOptions, ranges: list[PlannedRange], error: OffsetOutOfRangeError
) -> list[PlannedRange]:
    """
    Return the ranges without the lost rows.

    Raises:
        DataLossError: the options do not allow a loss.
        OffsetOutOfRangeError: `error` does not mean that rows were lost.
    """
    index = next(
        (at for at, each in enumerate(ranges) if error.partition_id in {None, each.partition_id}),
        0,
    )
    planned, first = ranges[index], error.first_offset
    if first is None or first <= planned.start:
        raise error
    lost_from = planned.start if error.offset is None else max(planned.start, error.offset)
    end = min(first, planned.end)
    loss = loss_error(planned.subject, _bounds_now(options, planned, error), lost_from, end)
    if options.fail_on_data_loss:
        raise loss from error
    _LOG.warning("%s", loss.message)
    return [*ranges[:index], replace(planned, start=end), *ranges[index + 1 :]]


def _bounds_now(
    options: ReadOptions, planned: PlannedRange, error: OffsetOutOfRangeError
) -> PartitionBounds:
    """Return the bounds of the partition, from its broker or else from the error."""
    try:
        loop = ProcessLoop.current()
        return loop.run(_ask(loop, options, planned))
    except KeylaneError:
        return PartitionBounds(
            partition_id=planned.partition_id,
            first_offset=error.first_offset or 0,
            next_offset=error.next_offset or 0,
        )


async def _ask(loop: ProcessLoop, options: ReadOptions, planned: PlannedRange) -> PartitionBounds:
    body = AskBounds(partitions=[BoundsOf(partition_id=planned.partition_id)])
    answers = await loop.broker(options.secured, planned.address).control(
        endpoints.PARTITION_BOUNDS, body
    )
    if not answers.partitions:
        raise KeylaneError
    return answers.partitions[0]

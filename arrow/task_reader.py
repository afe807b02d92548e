"""Reads the ranges of a task: the rows of the keys asked for, and past what retention has removed.
Network only.

Invariants
    Lost rows are told: as a DataLossError, or, where the options allow a loss, as a warning in the
    log. Every row that is left comes once, in the order of the ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from ..protocol import endpoints
from ..protocol.errors import KeylaneError, OffsetOutOfRangeError
from ..protocol.reading.bounds import AskBounds, BoundsOf, PartitionBounds
from .keys import KeyFilter
from .loss import loss_error
from .planner import PlannedRange
from .process_loop import ProcessLoop
from .range_reader import read_ranges
from .selection import ReadOptions

_LOG = logging.getLogger(__name__)


def read_task(options: ReadOptions, ranges: Sequence[PlannedRange]) -> Iterator[pa.RecordBatch]:
    """
    Yield the rows of the ranges, one range after another, as Arrow batches.  Blocks; needs a thread
    without event loop.

    Raises:
        DataLossError: retention has removed rows, and `fail_on_data_loss` is set.
        OffsetOutOfRangeError: the partition ends before the range does.
        CorruptBatchError: what a broker sent is damaged, or not the range.
        UnreachableError: a broker did not answer.
    """
    return _TaskReading(options, ranges)


class _TaskReading(Iterator[pa.RecordBatch]):
    """
    The rows of a task.  It is no generator, which Ctrl-C would end: a later batch would then be
    missed in silence.

    Args:
        options, ranges: as of `read_task`.
    """

    def __init__(self, options: ReadOptions, ranges: Sequence[PlannedRange]) -> None:
        self._left = list(ranges)
        """Of which the rows are not given out."""
        self._given = 0
        """Rows of the batch that was given out last, which are among those left."""
        self._chosen: KeyFilter | None = None
        if options.keys is not None:
            self._chosen = KeyFilter(options.keys, options.columns)
            options = replace(options, columns=self._chosen.columns_to_read)
        self._options = options
        self._batches: Iterator[pa.RecordBatch] | None = None
        """Gives the rows that are left; None: it has ended with an error."""

    def __next__(self) -> pa.RecordBatch:
        while left := _behind(self._left, self._given):
            self._left, self._given = left, 0
            batches, self._batches = self._batches, None
            if batches is None:
                batches = read_ranges(self._options, tuple(left))
            try:
                batch = next(batches)
            except OffsetOutOfRangeError as error:
                self._left = _behind_loss(self._options, left, error)
                continue
            rows = batch if self._chosen is None else self._chosen.rows(batch)
            self._batches, self._given = batches, batch.num_rows
            if rows.num_rows:
                return rows
        self._batches = None
        raise StopIteration


def _behind(ranges: list[PlannedRange], rows: int) -> list[PlannedRange]:
    """The ranges without their first `rows` rows."""
    left = list(ranges)
    while left and rows >= left[0].rows:
        rows -= left.pop(0).rows
    if rows:
        left[0] = replace(left[0], start=left[0].start + rows)
    return left


def _behind_loss(
    options: ReadOptions, ranges: list[PlannedRange], error: OffsetOutOfRangeError
) -> list[PlannedRange]:
    """The ranges without the rows that are lost; raises the error of the loss, or of what is
    none.
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
    """The bounds of the partition: what its broker says of them, or what the error does."""
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

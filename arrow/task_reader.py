"""Reads the ranges of a task: the rows of the keys asked for, and past what retention has removed.  Network only.

Invariants
    Lost rows are told: as a DataLossError, or, where the options allow a loss, as a warning in the log.
    Every row that is left comes once, in the order of the ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

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
    Yield the rows of the ranges, one range after another, as Arrow batches.  Blocks; needs a thread without event loop.

    Raises:
        DataLossError: retention has removed rows, and `fail_on_data_loss` is set.
        OffsetOutOfRangeError: the partition ends before the range does.
        CorruptBatchError: what a broker sent is damaged, or not the range.
        UnreachableError: a broker did not answer.
    """
    if options.keys is None:
        yield from _past_losses(options, ranges)
        return
    chosen = KeyFilter(options.keys, options.columns)
    for batch in _past_losses(replace(options, columns=chosen.columns_to_read), ranges):
        if (rows := chosen.rows(batch)).num_rows:
            yield rows


def _past_losses(options: ReadOptions, ranges: Sequence[PlannedRange]) -> Iterator[pa.RecordBatch]:
    left = list(ranges)
    while left:
        try:
            for batch in read_ranges(options, tuple(left)):
                left = _behind(left, batch.num_rows)
                yield batch
            return
        except OffsetOutOfRangeError as error:
            left = _behind_loss(options, left, error)


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
    """The ranges without the rows that are lost; raises the error of the loss, or of what is none."""
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
    answers = await loop.broker(options.secured, planned.address).bounds(body)
    if not answers.partitions:
        raise KeylaneError
    return answers.partitions[0]

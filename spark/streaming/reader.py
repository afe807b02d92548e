"""The stream reader, which plans offsets and batches on Spark's driver, and reads ranges in tasks.
Requires pyspark.

    driver   initialOffset ─▶ latestOffset(start) ─▶ checkpoint ─▶ partitions(start, end) ─▶ …
    tasks                                                            read(StreamTask)

Invariants
    The rows of a batch depend only on its two offsets, which are in Spark's checkpoint.
    Reading changes nothing on the broker: it takes no locks and sends no acks. Spark stores the
    progress.
    A reader opens no connections before its first call, because Spark creates some readers only to
    pickle `read`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from ...arrow.planner import PlannedRange
from ...arrow.selection import Edge, ReadOptions
from ...protocol.errors import (
    CheckpointMismatchError,
    DataLossError,
    JobError,
    KeylaneError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    SubjectDeletedError,
    SubjectUnknownError,
)
from ..failure import readable_errors
from .batches import (
    BatchRange,
    LostRange,
    batch_ranges,
    finished_partitions,
    first_offset,
    lost_ranges,
    next_offset,
    stored_end,
    task_ranges,
)
from .handover import lost_after_start, rows_to_skip
from .limits import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from .lineage import View
from .offset import StreamOffset, check_keys, check_subjects, describe_keys, from_json, to_json
from .progress import GroupProgress
from .settings import StreamSettings
from .watch import PartitionWatcher

log = logging.getLogger("keylane.spark")

POLL_S = 0.1
"""The time in seconds between two polls of an idle stream. Spark itself calls every 10 ms."""
TASK_ROWS = 32_768
"""The maximum number of rows of small ranges that share a task. Reading them takes about as long as
starting a task.
"""
T = TypeVar("T")
TaskReader = Callable[[ReadOptions, Sequence[PlannedRange]], Iterator[pa.RecordBatch]]


@dataclass
class StreamTask(InputPartition):
    """A task of a batch, with the ranges that it reads one after another."""

    ranges: tuple[PlannedRange, ...]


class KeylaneStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream reader of one query."""

    def __init__(
        self, options: ReadOptions, settings: StreamSettings, read_task: TaskReader
    ) -> None:
        self._options = options
        self._settings = settings
        self._read_task = read_task
        self._driver: _StreamDriver | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_driver": None}

    # ── on the driver ─────────────────────────────────────────────────────────────────────────────
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - PySpark's name
        """
        Return the offset at which batch 0 starts, which is the same for each call of a reader.

        An invalid start only raises an error when the next batch is requested, because a replayed
        batch 0 starts where the checkpoint says.
        """
        return self._call(lambda driver: driver.initial())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - PySpark's name
        """Return the limit of the option `maxRowsPerTrigger`."""
        rows_max = self._settings.rows_max
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def latestOffset(  # noqa: N802 - PySpark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """
        Return the end of the next batch or, after a short wait, `start` itself if there is nothing
        to read.

        Args:
            start, limit: None before PySpark 4.2, where a batch reads all stored messages.
        """
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if start is None:
            return self._call(lambda driver: driver.latest_without_start())
        return self._call(lambda driver: driver.latest(start, rows_max))

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - PySpark's name
        """Return the end of the stored messages, for the query's progress."""
        return None if self._driver is None else self._driver.stored_ends

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - PySpark's name
        """Fix the end of the run, which reads only the messages that are stored now."""
        self._call(lambda driver: driver.fix_target())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[StreamTask]:
        """Return the tasks of a batch. Apart from broker addresses, they only depend on the two
        offsets.
        """
        return self._call(lambda driver: driver.tasks(start, end))

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing, because Spark stores the progress."""

    def stop(self) -> None:
        """Close the connections."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _call(self, work: Callable[[_StreamDriver], Coroutine[Any, Any, T]]) -> T:
        with readable_errors():
            if self._settings.error is not None:
                raise self._settings.error
            if self._driver is None:
                self._driver = _StreamDriver(self._options, self._settings)
            return self._driver.run(work(self._driver))

    # ── in tasks ──────────────────────────────────────────────────────────────────────────────────
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task, range by range."""
        assert isinstance(partition, StreamTask)
        with readable_errors():
            yield from self._read_task(self._options, partition.ranges)


class _StreamDriver:
    """Holds a reader's connections and state in the driver process while the query runs."""

    def __init__(self, options: ReadOptions, settings: StreamSettings) -> None:
        self._options = options
        self._settings = settings
        self._runner = asyncio.Runner()
        self._watcher = PartitionWatcher(options)
        self._keys = describe_keys(options.keys)
        self._progress: GroupProgress | None = None
        self._initial: dict[str, Any] | None = None
        self._start_error: KeylaneError | None = None
        """The error to raise if no batch can start at the option `start`; None if one can."""
        self._is_new_query = False
        self._view: View | None = None
        self._ends: dict[int, int] | None = None
        self._target_ends: dict[int, int] | None = None
        self._is_idle = False
        self._logged_losses: set[LostRange] = set()
        self.stored_ends: dict[str, Any] | None = None
        try:
            self.run(self._open())
        except BaseException:
            self._runner.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this driver's event loop."""
        return self._runner.run(work)

    def close(self) -> None:
        """Close the connections and the event loop."""
        try:
            self.run(self._watcher.close())
        finally:
            self._runner.close()

    async def _open(self) -> None:
        self._watcher.open()
        if self._options.commit_group is not None:
            self._progress = self._watcher.progress_of(self._options.commit_group)

    async def initial(self) -> dict[str, Any]:
        """
        Return the offset at which batch 0 starts.

        Raises:
            DataLossError, JobError, PartitionUnknownError, OffsetOutOfRangeError: the messages at
                the option `start` are not stored, and a Spark version that passes no start begins a
                new batch 0.
        """
        if self._initial is None:
            await self._fix_initial()
        if self._start_error is not None and self._is_new_query:
            raise self._start_error
        assert self._initial is not None
        return self._initial

    async def _fix_initial(self) -> None:
        """Resolve the option `start` to the offset at which batch 0 starts, or to an error."""
        view = await self._watcher.fetch_view()
        start_offsets: dict[int, int] = {}
        try:
            start_offsets = await self._start_offsets(view)
        except (
            DataLossError,
            JobError,
            PartitionUnknownError,
            OffsetOutOfRangeError,
        ) as error:
            self._start_error = error
        self._initial = self._encode(first_offset(view, start_offsets, self._watcher.subjects))

    def _encode(self, offset: StreamOffset) -> dict[str, Any]:
        return to_json(replace(offset, keys=self._keys))

    def _decode(self, encoded: dict[str, Any]) -> StreamOffset:
        """Decode an offset. Raises CheckpointMismatchError if its keys differ from those of the
        stream.
        """
        offset = from_json(encoded)
        check_keys(offset, self._keys)
        return offset

    async def _start_offsets(self, view: View) -> dict[int, int]:
        """Return the offset of the option `start` in each partition. Raises an error if it is not
        stored.
        """
        for partition_id in sorted(self._options.partitions or ()):
            branch = view.lineage.branches.get(
                partition_id
            )  # None if the keys are in other partitions
            if branch is not None and branch.is_gone:
                raise self._watcher.no_data_error("partitions", partition_id)
        start_offsets = await self._watcher.resolve_bound(view, self._options.start)
        for lost_range in lost_after_start(view, self._options.start):
            self._report_loss(view, lost_range)
        for partition_id, start_offset in start_offsets.items():
            stored_offsets = view.stored.get(partition_id)
            if stored_offsets is None:
                continue
            if (
                start_offset < stored_offsets.first
                and self._options.start.at(partition_id) is not Edge.EARLIEST
            ):
                self._report_loss(view, LostRange(partition_id, start_offset, stored_offsets.first))
            if start_offset > stored_offsets.end:
                raise OffsetOutOfRangeError(
                    f"start: offset {start_offset} is not in partition {partition_id}, which has "
                    f"[{stored_offsets.first}, {stored_offsets.end})",
                    partition_id=partition_id,
                    offset=start_offset,
                    first_offset=stored_offsets.first,
                    next_offset=stored_offsets.end,
                )
            start_offsets[partition_id] = max(start_offset, stored_offsets.first)
        return start_offsets | rows_to_skip(view, self._options.start)

    async def latest(self, start: dict[str, Any], rows_max: int | None) -> dict[str, Any]:
        """Return the end of the batch that starts at `start`, and update the group's cursors."""
        offset = self._decode(start)
        if offset.initial and self._start_error is not None:
            raise self._start_error
        if self._is_idle:
            await asyncio.sleep(POLL_S)
        view = self._view = await self._fetch_view(offset, reached=offset)
        for lost_range in lost_ranges(view, offset):
            self._report_loss(view, lost_range)
        if self._progress is not None:
            await self._watcher.retry(partial(self._progress.load, view, offset))
        ends = await self._end_offsets()
        end = next_offset(view, offset, ends=ends, rows_max=rows_max)
        finished = finished_partitions(view, end)
        unread_ends = {
            partition_id: each.end
            for partition_id, each in view.stored.items()
            if partition_id not in finished
        }
        self.stored_ends = self._encode(
            StreamOffset(subjects=self._watcher.subjects, offsets=unread_ends)
        )
        self._is_idle = end is offset
        if self._progress is not None:
            await self._progress.update(view, offset, idle=self._is_idle)
        return start if end is offset else self._encode(end)

    async def latest_without_start(self) -> dict[str, Any]:
        """Return the end of a batch that contains all stored messages, for Spark versions that do
        not pass the start.
        """
        origin = await self._origin()
        if self._is_idle:
            await asyncio.sleep(POLL_S)
        view = self._view = await self._watcher.fetch_view()
        unanswered_ids = [
            partition_id
            for partition_id, branch in view.lineage.branches.items()
            if partition_id not in view.stored and not branch.is_gone
        ]
        if unanswered_ids:
            raise NotSentError(
                f"the broker of partition {unanswered_ids[0]} does not answer, and with this "
                "version of PySpark no partition can be skipped",
                partition_id=unanswered_ids[0],
            )
        end = self._encode(stored_end(view, self._watcher.subjects, origin))
        self._is_idle = end == self.stored_ends
        self.stored_ends = end
        return end

    async def _origin(self) -> StreamOffset | None:
        """
        Return the offset at which batch 0 starts, for a Spark version that requests its end first.
        Return None if messages at the option `start` have been removed.

        A stream that continues from its checkpoint does not need this offset. For other streams,
        Spark requests it next, and `initial` raises the error.
        """
        if self._initial is None:
            await self._fix_initial()
        self._is_new_query = True
        return None if self._start_error is not None else from_json(self._initial)

    async def fix_target(self) -> None:
        """Fix the end of a run with Trigger.AvailableNow."""
        view = await self._watcher.fetch_view()
        self._target_ends = {partition_id: each.end for partition_id, each in view.stored.items()}

    async def _end_offsets(self) -> dict[int, int] | None:
        """Return the end of the stream in each partition, or None if the stream has no end."""
        if self._settings.has_end and self._ends is None:
            self._ends = await self._watcher.resolve_bound(
                await self._watcher.fetch_view(), self._options.end
            )
        if self._ends is None or self._target_ends is None:
            return self._target_ends if self._ends is None else self._ends
        return {
            partition_id: min(end, self._ends.get(partition_id, 0))
            for partition_id, end in self._target_ends.items()
        }

    async def _fetch_view(self, offset: StreamOffset, *, reached: StreamOffset) -> View:
        """
        Fetch the readable messages after `offset`, and check the checkpoint's offset `reached`.

        Raises:
            SubjectDeletedError: a subject that the stream was reading has been deleted.
            CheckpointMismatchError: `reached` belongs to other subjects; or a broker has stored
                less for READ_GIVE_UP_MS, because it runs on an older copy of its data folder.
        """

        def check(view: View) -> CheckpointMismatchError | None:
            check_subjects(reached, self._watcher.subjects)
            return _behind_checkpoint_error(view, reached)

        try:
            return await self._watcher.fetch_view_until(offset, check)
        except (SubjectDeletedError, SubjectUnknownError) as error:
            if error.subject not in reached.subjects:
                raise
            raise SubjectDeletedError(
                f"subject {error.subject!r}, which this stream has read, was deleted: a stream of "
                "a later subject of this name needs another checkpointLocation",
                subject=error.subject,
            ) from error

    def _report_loss(self, view: View, lost_range: LostRange) -> None:
        """Raise DataLossError. If the options allow data loss, log the lost range once instead."""
        subject = view.lineage.branches[lost_range.partition_id].subject
        count = None if lost_range.end is None else lost_range.end - lost_range.start
        lost_messages = (
            f"everything from offset {lost_range.start} on"
            if lost_range.end is None
            else f"{count} messages, [{lost_range.start}, {lost_range.end}),"
        )
        text = (
            f"{lost_messages} of partition {lost_range.partition_id} of {subject} were removed "
            "before the stream had read them"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(
                text,
                subject=subject,
                partition_id=lost_range.partition_id,
                offset=lost_range.start,
                lost_until=lost_range.end,
                rows=count,
            )
        if lost_range not in self._logged_losses:
            self._logged_losses.add(lost_range)
            log.warning("%s", text)

    # ── batches ───────────────────────────────────────────────────────────────────────────────────
    async def tasks(self, start: dict[str, Any], end: dict[str, Any]) -> list[StreamTask]:
        """Return the tasks of the batch between two offsets."""
        if start == end:
            return []
        start_offset, end_offset = self._decode(start), self._decode(end)
        if start_offset.initial and end_offset.origin is None and self._start_error is not None:
            raise self._start_error
        view = self._view
        if view is None:
            view_offset = (
                end_offset.origin
                if start_offset.initial and end_offset.origin is not None
                else start_offset
            )
            view = self._view = await self._fetch_view(view_offset, reached=end_offset)
        check_subjects(start_offset, self._watcher.subjects)
        check_subjects(end_offset, self._watcher.subjects)
        ranges = batch_ranges(view, start_offset, end_offset)
        _check_ranges_are_read(view, ranges)
        tasks = task_ranges(view, ranges, rows_max=TASK_ROWS)
        return [StreamTask(self._plan_task(view, task)) for task in tasks]

    def _plan_task(self, view: View, task: Sequence[BatchRange]) -> tuple[PlannedRange, ...]:
        """Plan the parts of a task's ranges that are stored."""
        stored_parts = (self._clip_to_stored(view, each) for each in task)
        return tuple(_plan_range(view, each) for each in stored_parts if each is not None)

    def _clip_to_stored(self, view: View, batch_range: BatchRange) -> BatchRange | None:
        """Return the part of a range that is stored, or None if nothing is stored."""
        if view.lineage.branches[batch_range.partition_id].is_gone:
            self._report_loss(
                view, LostRange(batch_range.partition_id, batch_range.start, batch_range.end)
            )
            return None
        stored_offsets = view.stored.get(batch_range.partition_id)
        if stored_offsets is None:
            raise NotSentError(
                f"the broker of partition {batch_range.partition_id} does not answer",
                partition_id=batch_range.partition_id,
            )
        first = stored_offsets.first
        if batch_range.start < first:
            self._report_loss(
                view,
                LostRange(batch_range.partition_id, batch_range.start, min(first, batch_range.end)),
            )
        return (
            None
            if first >= batch_range.end
            else replace(batch_range, start=max(batch_range.start, first))
        )


def _behind_checkpoint_error(view: View, reached: StreamOffset) -> CheckpointMismatchError | None:
    """Return an error if a partition stores less than the stream has read, otherwise None."""
    for partition_id, offset in reached.offsets.items():
        stored_offsets = view.stored.get(partition_id)
        if stored_offsets is not None and offset > stored_offsets.end:
            return CheckpointMismatchError(
                f"the checkpoint is at offset {offset} of partition {partition_id}, which ends at "
                f"{stored_offsets.end}",
                partition_id=partition_id,
                offset=offset,
                next_offset=stored_offsets.end,
            )
    return None


def _check_ranges_are_read(view: View, ranges: Sequence[BatchRange]) -> None:
    """Raise CheckpointMismatchError if a range is in a partition that the stream does not read."""
    for batch_range in ranges:
        if batch_range.partition_id not in view.lineage.branches:
            raise CheckpointMismatchError(
                f"the checkpoint has partition {batch_range.partition_id}, which the "
                f"stream does not read",
                partition_id=batch_range.partition_id,
                offset=batch_range.start,
            )


def _plan_range(view: View, batch_range: BatchRange) -> PlannedRange:
    branch = view.lineage.branches[batch_range.partition_id]
    partition = branch.partition
    return PlannedRange(
        partition_id=batch_range.partition_id,
        broker_group=partition.broker_group,
        address=str(partition.address),
        start=batch_range.start,
        end=batch_range.end,
        subject=branch.subject,
        range_start=partition.range_start,
        range_end=partition.range_end,
        queue=partition.queue,
        logic_start=partition.logic_start,
        epoch=branch.epoch,
    )

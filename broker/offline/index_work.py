"""Rebuilds, converts and verifies the indexes of a data folder that no broker uses. Does disk I/O.

rebuild   log ─▶ index
switch    index ─▶ index of the other kind; the old one is removed
verify    compares each index with the log, and the indexes with each other; changes nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ...protocol.errors import InvalidRequestError, StorageError
from ...protocol.record import Header
from ..settings import INDEX_KINDS
from ..storage.files import Files
from ..storage.index.interface import ConsumeQueues, Unit
from ..storage.index.kinds import (
    has_index,
    is_incomplete,
    mark_incomplete,
    open_index,
    open_read_only,
    remove_index,
    unmark_incomplete,
)
from ..storage.log.holes import Hole
from ..storage.log.recovery import scan_log
from ..storage.snapshot import Snapshots
from ..store.replay import Dispatch

PROBLEMS_MAX = 100
INCOMPLETE = "it is incomplete; the next start of the broker, or `rebuild`, rebuilds it"
NONE = "there is no index; the next start of the broker, or `rebuild`, creates one"
ALL = 1 << 62
OnPosition = Callable[[int], None]
"""Called with the position of each log record that is read."""

OnProgress = Callable[[int, int], None]
"""Called with the number of offsets that are done, and their total."""


def _ignore(*_progress: int) -> None:
    """Ignore the progress."""


@dataclass(slots=True)
class IndexReport:
    """A summary of an index, and its problems."""

    index: str
    partitions: int = 0
    batches: int = 0
    position: int = 0
    """The log position up to which the index contains every batch."""
    problems: list[str] = field(default_factory=list)

    def add_problem(self, text: str) -> None:
        """Add a problem. Only the first PROBLEMS_MAX are kept."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)


class _DispatchVisitor:
    """A `Visitor` that passes the log up to position `end` to a `Dispatch`."""

    def __init__(self, dispatch: Dispatch, end: int, on_position: OnPosition) -> None:
        self._dispatch = dispatch
        self._end = end
        self._on_position = on_position

    def on_record(self, header: Header, _body: memoryview) -> None:
        self._on_position(header.position)
        if header.position < self._end:
            self._dispatch.on_record(header)

    def on_hole(self, hole: Hole) -> None:
        if hole.start < self._end:
            self._dispatch.on_hole(hole)


def rebuild_index(files: Files, kind: str, on_position: OnPosition = _ignore) -> IndexReport:
    """
    Rebuild the index of this kind from the log.

    Raises:
        StorageError: the index cannot be written, or the log cannot be read.
    """
    mark_incomplete(files, kind)
    queues = open_index(files, kind)
    mark_incomplete(files, kind)
    try:
        dispatch = Dispatch(queues, start=0)
        recovered = scan_log(files, _DispatchVisitor(dispatch, ALL, on_position))
        dispatch.flush()
        queues.checkpoint(recovered.end)
        report = _summarize(kind, queues)
    finally:
        queues.close()
    unmark_incomplete(files, kind)
    return report


def switch_index(files: Files, to: str, on_progress: OnProgress = _ignore) -> IndexReport:
    """
    Create an index of the kind `to` from the index of the other kind, and remove the old index.

    Raises:
        InvalidRequestError: there is no index of the other kind.
        StorageError: the old index cannot be read, or the new one cannot be written. The old index
            is unchanged.
    """
    (old,) = (kind for kind in INDEX_KINDS if kind != to)
    if not has_index(files, old):
        raise InvalidRequestError(f"{files.name()} has no {old} index; run `rebuild`")
    mark_incomplete(files, to)
    source, target = open_index(files, old), open_index(files, to)
    mark_incomplete(files, to)
    try:
        bounds = {each: source.bounds(each) or (0, 0) for each in source.partitions()}
        total = sum(end - start for start, end in bounds.values())
        done = 0
        for partition_id, (start, _) in bounds.items():
            for units in _unit_chunks(source, partition_id):
                target.dispatch([(partition_id, unit) for unit in units])
                on_progress(done + units[-1].next_offset - start, total)
            done += bounds[partition_id][1] - start
        target.checkpoint(source.position)
        report = _summarize(to, target)
    finally:
        source.close()
        target.close()
    unmark_incomplete(files, to)
    remove_index(files, old)
    return report


def verify_indexes(files: Files, on_position: OnPosition = _ignore) -> list[IndexReport]:
    """Compare each index with the log, and the indexes with each other. The reports list the
    problems.
    """
    reports = []
    with ExitStack() as stack:
        opened = []
        for kind in INDEX_KINDS:
            if is_incomplete(files, kind):
                reports.append(IndexReport(kind, problems=[INCOMPLETE]))
            elif has_index(files, kind):
                report = IndexReport(kind)
                try:
                    queues = stack.enter_context(open_read_only(files, kind))
                    report = _summarize(kind, queues)
                    _compare_with_log(files, queues, report, on_position)
                    opened.append((queues, report))
                except StorageError as error:
                    report.add_problem(error.message)
                reports.append(report)
        if len(opened) == 2:
            _compare_bounds(opened[0][0], *opened[1])
    return reports or [IndexReport("none", problems=[NONE])]


def _summarize(kind: str, queues: ConsumeQueues) -> IndexReport:
    """Return a report with the counts of an index, and the problems found while reading it."""
    report = IndexReport(kind, position=queues.position)
    for partition_id in queues.partitions():
        report.partitions += 1
        try:
            report.batches += sum(map(len, _unit_chunks(queues, partition_id)))
        except StorageError as error:
            report.add_problem(f"partition {partition_id}: {error.message}")
    return report


def _unit_chunks(queues: ConsumeQueues, partition_id: int) -> Iterator[list[Unit]]:
    """Yield all units of a partition, in lists. Raises StorageError if one is missing."""
    bounds = queues.bounds(partition_id)
    offset, end = bounds or (0, 0)
    while offset < end:
        units = queues.find(partition_id, offset, end=end, bytes_max=ALL)
        if not units:
            raise StorageError(f"offset {offset} is missing")
        yield units
        offset = units[-1].next_offset


class _IndexComparison:
    """A `DispatchTarget` that compares units with an index instead of adding them."""

    def __init__(self, queues: ConsumeQueues, report: IndexReport) -> None:
        self._queues = queues
        self._report = report
        self.ends: dict[int, int] = {}

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        end = self.ends.get(partition_id)
        return None if end is None else (0, end)

    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        for partition_id, unit in units:
            self.ends[partition_id] = unit.next_offset
            bounds = self._queues.bounds(partition_id)
            if bounds is not None and unit.base_offset < bounds[0]:
                continue  # retention was about to remove this batch
            try:
                indexed = self._queues.find(
                    partition_id, unit.base_offset, end=unit.next_offset, bytes_max=1
                )
            except StorageError as error:
                self._report.add_problem(f"partition {partition_id}: {error.message}")
                continue
            if indexed[:1] != [unit]:
                self._report.add_problem(
                    f"partition {partition_id}: the log has {unit}, "
                    f"the index {indexed[0] if indexed else 'nothing'}"
                )


def _compare_with_log(
    files: Files, queues: ConsumeQueues, report: IndexReport, on_position: OnPosition
) -> None:
    """Compare the units and bounds of an index with the batches in the log."""
    comparison = _IndexComparison(queues, report)
    dispatch = Dispatch(comparison, start=0)
    recovered = scan_log(files, _DispatchVisitor(dispatch, queues.position, on_position))
    dispatch.flush()
    durable = Snapshots(files).load(lambda _number, _image: None).position
    if queues.position < durable:
        report.add_problem(
            f"the index is damaged: it ends at position {queues.position}, but was durable up to "
            f"{durable} according to the snapshot"
        )
    if queues.position > recovered.end:
        report.add_problem(
            f"the index ends at position {queues.position}, the log at {recovered.end}"
        )
    for partition_id in queues.partitions():
        bounds = queues.bounds(partition_id)
        end = comparison.ends.get(partition_id)
        if end is not None and bounds is not None and bounds[1] != end:
            report.add_problem(
                f"partition {partition_id} ends at {end}, in the index at {bounds[1]}"
            )


def _compare_bounds(index: ConsumeQueues, other: ConsumeQueues, report: IndexReport) -> None:
    """Compare the bounds of two indexes that have reached the same position."""
    if index.position != other.position:
        return  # the comparison with the log has already reported the shorter one
    for partition_id in sorted({*index.partitions(), *other.partitions()}):
        bounds = index.bounds(partition_id), other.bounds(partition_id)
        if bounds[0] != bounds[1]:
            report.add_problem(
                f"partition {partition_id}: the bounds are {bounds[0]} and {bounds[1]}"
            )

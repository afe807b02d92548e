"""`keylane queue` and `keylane subject queues`: the logic queues of a static subject."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NotRequired, TypedDict

from ...protocol.control import TimeBound
from ...protocol.errors import KeylaneError
from ...protocol.queues import QueueView, SegmentView, is_behind_loss
from ...protocol.routing import PartitionState
from ...protocol.text import counted
from ..answer import CommonOptions, expand_options
from ..groups import CommandGroup
from ..options import WAIT_S, CountOption, OutputFormat, SubjectArgument, parse_time
from ..parameters import Argument, Option
from ..screen import make_table, show_data, show_line, show_table

if TYPE_CHECKING:
    from ...consumer import QueueReader

COLUMNS = (
    *("queue#", "logical", "min#", "max#", "partition#"),
    *("broker group", "state", "logic offsets"),
)

queue_app = CommandGroup()
QueueArgument = Annotated[
    int, Argument(metavar="QUEUE", min=0, help="Number of the queue, from 0.")
]


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The logic offsets `[low, high)` of a queue. They are None if unknown, and `problem` then says
    why.
    """

    low: int | None
    high: int | None
    problem: str | None = None


def _open_reader(meta: str, subject: str) -> QueueReader:
    from ...consumer import QueueReader

    return QueueReader(meta, subject=subject, wait_s=WAIT_S.get())


# ── subject queues ────────────────────────────────────────────────────────────────────────────────
async def show_queues(meta: str, output: OutputFormat, subject: str) -> None:
    """Show a subject's logic queues with their ranges, partitions and logic offsets."""
    import asyncio

    async with _open_reader(meta, subject) as reader:
        views = await reader.queues()
        bounds = await asyncio.gather(*(_fetch_bounds(reader, view.queue) for view in views))
    queues = list(zip(views, bounds, strict=True))
    if output is not OutputFormat.TABLE:
        queue_fields = [_queue_fields(view, queue_bounds) for view, queue_bounds in queues]
        show_data(output, QueueBounds(subject=subject, queues=queue_fields))
        return
    rows = [
        _row(view, segment, queue_bounds)
        for view, queue_bounds in queues
        for segment in view.segments
    ]
    show_table(make_table(f"{subject}: {counted(len(views), 'queue')}", COLUMNS, rows))
    for view in views:
        for segment in view.segments:
            if is_behind_loss(segment.partition):
                show_line(_loss_text(view.queue, segment.partition.logic_start))
    for queue_bounds in bounds:
        if queue_bounds.problem:
            show_line(f"offsets unknown: {queue_bounds.problem}")


async def _fetch_bounds(reader: QueueReader, queue: int) -> _Bounds:
    try:
        low, high = await reader.bounds(queue)
    except KeylaneError as error:
        return _Bounds(None, None, error.message)
    return _Bounds(low, high)


def _loss_text(queue: int, offset: int) -> str:
    return (
        f"queue {queue}: messages before logic offset {offset} are lost with a disk; "
        f"how many is not known"
    )


class SegmentFields(TypedDict):
    """A segment of a queue, as JSON."""

    partition_id: int
    name: str
    broker_group: str
    state: PartitionState
    logic_start: int
    logic_end: int | None
    behind_loss: bool


class QueueFields(TypedDict):
    """A queue of `subject queues`, as JSON."""

    queue: int
    range_start: int
    range_end: int
    min_offset: int | None
    max_offset: int | None
    problem: str | None
    segments: list[SegmentFields]


class QueueBounds(TypedDict):
    """The queues of a subject, as JSON."""

    subject: str
    queues: list[QueueFields]


class QueueOffsets(TypedDict):
    """The bounds of a queue, and the offset for a time if one was asked for, as JSON."""

    subject: str
    queue: int
    min_offset: int
    max_offset: int
    at_ms: NotRequired[int]
    offset: NotRequired[int | None]


def _queue_fields(view: QueueView, bounds: _Bounds) -> QueueFields:
    return {
        "queue": view.queue,
        "range_start": view.range_start,
        "range_end": view.range_end,
        "min_offset": bounds.low,
        "max_offset": bounds.high,
        "problem": bounds.problem,
        "segments": [_segment_fields(segment) for segment in view.segments],
    }


def _segment_fields(segment: SegmentView) -> SegmentFields:
    partition = segment.partition
    return {
        "partition_id": partition.partition_id,
        "name": partition.name,
        "broker_group": partition.broker_group,
        "state": partition.state,
        "logic_start": partition.logic_start,
        "logic_end": segment.logic_end,
        "behind_loss": is_behind_loss(partition),
    }


def _row(view: QueueView, segment: SegmentView, bounds: _Bounds) -> tuple[object, ...]:
    """Return the table row for a segment. Only the first row of a queue fills the columns about the
    queue.
    """
    is_first = segment is view.segments[0]
    partition = segment.partition
    end = "…" if segment.logic_end is None else f"{segment.logic_end})"
    return (
        view.queue if is_first else "",
        f"[{view.range_start}, {view.range_end})" if is_first else "",
        bounds.low if is_first else "",
        bounds.high if is_first else "",
        partition.partition_id,
        partition.broker_group,
        partition.state,
        f"[{partition.logic_start}, {end}",
    )


# ── queue offsets ─────────────────────────────────────────────────────────────────────────────────
@queue_app.add("offsets", shows=".commands.queue:QueueOffsets")
@expand_options
def queue_offsets(
    subject: SubjectArgument,
    queue: QueueArgument,
    *,
    at: Annotated[
        str | None,
        Option(metavar="TIME", help="Show the offset for a time: ISO 8601, UTC without a zone."),
    ] = None,
    bound: Annotated[
        TimeBound,
        Option(
            help="lower: the first message at or after the time. upper: the last at or before it."
        ),
    ] = TimeBound.LOWER,
    common: CommonOptions,
) -> None:
    """Show a queue's first and next logic offset, or the offset for a time."""
    common.run(_show_offsets, subject, queue, at, bound)


async def _show_offsets(
    meta: str, output: OutputFormat, subject: str, queue: int, at: str | None, bound: TimeBound
) -> None:
    at_ms = None if at is None else parse_time(at)
    offset = None
    async with _open_reader(meta, subject) as reader:
        low, high = await reader.bounds(queue)
        if at_ms is not None:
            offset = await reader.offset_at(queue, at_ms, bound)
    if output is not OutputFormat.TABLE:
        fields = QueueOffsets(subject=subject, queue=queue, min_offset=low, max_offset=high)
        if at_ms is not None:
            fields |= {"at_ms": at_ms, "offset": offset}
        show_data(output, fields)
        return
    show_line(f"queue {queue} of {subject}: min {low}, max {high}")
    if at_ms is not None:
        show_line(f"{bound} of {at}: {'no such message' if offset is None else offset}")


# ── queue read ────────────────────────────────────────────────────────────────────────────────────
@queue_app.add("read", shows=".message_json:MessageFields")
@expand_options
def queue_read(
    subject: SubjectArgument,
    queue: QueueArgument,
    *,
    offset: Annotated[
        int | None, Option(min=0, help="Logic offset to begin at.  [default: the first]")
    ] = None,
    count: CountOption = None,
    common: CommonOptions,
) -> None:
    """Print a queue's messages from a logic offset to its current end; no group, no acks."""
    common.run(_read_queue, subject, queue, offset, count=count)


async def _read_queue(
    meta: str,
    output: OutputFormat,
    subject: str,
    queue: int,
    offset: int | None,
    *,
    count: int | None,
) -> None:
    from ..message_json import message_printer

    show = message_printer(output, "{queue}:{logic_offset} {key} {value}")
    async with _open_reader(meta, subject) as reader:
        low, high = await reader.bounds(queue)
        next_offset = low if offset is None else offset
        printed = 0
        while True:
            queue_slice = await reader.read(queue, next_offset)
            if queue_slice.lost:
                first_offset = (
                    queue_slice.messages[0].logic_offset
                    if queue_slice.messages
                    else queue_slice.next_offset
                )
                show_line(_loss_text(queue, first_offset), errors=True)
            messages = (
                queue_slice.messages if count is None else queue_slice.messages[: count - printed]
            )
            for message in messages:
                sys.stdout.write(show(message) + "\n")
            sys.stdout.flush()
            printed += len(messages)
            next_offset = queue_slice.next_offset
            if next_offset >= high or printed == count or not queue_slice.messages:
                return

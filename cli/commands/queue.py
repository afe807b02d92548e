"""`keylane queue`, and `keylane subject queues`: the logic queues of a static subject, by logic
offset.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.control import TimeBound
from ...protocol.errors import KeylaneError
from ...protocol.queues import QueueView, SegmentView, is_behind_loss
from ...protocol.text import counted
from ..answer import Answer, expanded
from ..options import WAIT_S, LineFormatOption, OutputFormat, SubjectArgument, parse_time
from ..screen import make_table, show_json, show_line, show_table

if TYPE_CHECKING:
    from ...consumer import QueueReader

COLUMNS = (
    *("queue#", "logical", "min#", "max#", "partition#"),
    *("broker group", "state", "logic offsets"),
)

queue_app = typer.Typer()
QueueArgument = Annotated[
    int, typer.Argument(metavar="QUEUE", min=0, help="Number of the queue, from 0.")
]


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The logic offsets `[low, high)` of a queue; None, with a `problem`, if they are unknown."""

    low: int | None
    high: int | None
    problem: str | None = None


def _open_reader(meta: str, subject: str) -> QueueReader:
    from ...consumer import QueueReader

    return QueueReader(meta, subject=subject, wait_s=WAIT_S.get())


# ── subject queues ────────────────────────────────────────────────────────────────────────────────
async def show_queues(meta: str, output: OutputFormat, subject: str) -> None:
    """Show the logic queues of a subject: ranges, partitions, logic offsets."""
    import asyncio

    async with _open_reader(meta, subject) as reader:
        views = await reader.queues()
        bounds = await asyncio.gather(*(_bounds(reader, view.queue) for view in views))
    queues = list(zip(views, bounds, strict=True))
    if output is OutputFormat.JSON:
        described = [_queue_facts(view, ends) for view, ends in queues]
        show_json({"subject": subject, "queues": described})
        return
    rows = [_row(view, segment, ends) for view, ends in queues for segment in view.segments]
    show_table(make_table(f"{subject}: {counted(len(views), 'queue')}", COLUMNS, rows))
    for view in views:
        for segment in view.segments:
            if is_behind_loss(segment.partition):
                show_line(_loss(view.queue, segment.partition.logic_start))
    for ends in bounds:
        if ends.problem:
            show_line(f"offsets unknown: {ends.problem}")


async def _bounds(reader: QueueReader, queue: int) -> _Bounds:
    try:
        low, high = await reader.bounds(queue)
    except KeylaneError as error:
        return _Bounds(None, None, error.message)
    return _Bounds(low, high)


def _loss(queue: int, offset: int) -> str:
    return (
        f"queue {queue}: messages before logic offset {offset} are lost with a disk; "
        f"how many is not known"
    )


def _queue_facts(view: QueueView, bounds: _Bounds) -> dict[str, object]:
    return {
        "queue": view.queue,
        "range_start": view.range_start,
        "range_end": view.range_end,
        "min_offset": bounds.low,
        "max_offset": bounds.high,
        "problem": bounds.problem,
        "segments": [_segment_facts(segment) for segment in view.segments],
    }


def _segment_facts(segment: SegmentView) -> dict[str, object]:
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
    """Return the row of a segment; only the first row of a queue has the columns of the queue."""
    first = segment is view.segments[0]
    partition = segment.partition
    end = "…" if segment.logic_end is None else f"{segment.logic_end})"
    return (
        view.queue if first else "",
        f"[{view.range_start}, {view.range_end})" if first else "",
        bounds.low if first else "",
        bounds.high if first else "",
        partition.partition_id,
        partition.broker_group,
        partition.state,
        f"[{partition.logic_start}, {end}",
    )


# ── queue offsets ─────────────────────────────────────────────────────────────────────────────────
@queue_app.command("offsets")
@expanded
def queue_offsets(
    subject: SubjectArgument,
    queue: QueueArgument,
    *,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Show the offset for a time: ISO 8601, UTC without a zone."
        ),
    ] = None,
    bound: Annotated[
        TimeBound,
        typer.Option(
            help="lower: the first message at or after the time. upper: the last at or before it."
        ),
    ] = TimeBound.LOWER,
    answer: Answer,
) -> None:
    """Show a queue's first and next logic offset, or the offset for a time."""
    answer.run(_show_offsets, subject, queue, at, bound)


async def _show_offsets(
    meta: str, output: OutputFormat, subject: str, queue: int, at: str | None, bound: TimeBound
) -> None:
    at_ms = None if at is None else parse_time(at)
    offset = None
    async with _open_reader(meta, subject) as reader:
        low, high = await reader.bounds(queue)
        if at_ms is not None:
            offset = await reader.offset_at(queue, at_ms, bound)
    if output is OutputFormat.JSON:
        facts = {"subject": subject, "queue": queue, "min_offset": low, "max_offset": high}
        show_json(facts if at_ms is None else {**facts, "at_ms": at_ms, "offset": offset})
        return
    show_line(f"queue {queue} of {subject}: min {low}, max {high}")
    if at_ms is not None:
        show_line(f"{bound} of {at}: {'no such message' if offset is None else offset}")


# ── queue read ────────────────────────────────────────────────────────────────────────────────────
@queue_app.command("read")
@expanded
def queue_read(
    subject: SubjectArgument,
    queue: QueueArgument,
    *,
    offset: Annotated[
        int | None, typer.Option(min=0, help="Logic offset to begin at.  [default: the first]")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="Stop after this many messages.")
    ] = None,
    format: LineFormatOption = "{queue}:{logic_offset} {key} {value}",  # noqa: A002 - the option
    answer: Answer,
) -> None:
    """Print a queue's messages from a logic offset to its present end; no group, no acks."""
    answer.run(_read_queue, subject, queue, offset, count=count, template=format)


async def _read_queue(
    meta: str,
    output: OutputFormat,
    subject: str,
    queue: int,
    offset: int | None,
    *,
    count: int | None,
    template: str,
) -> None:
    from ..message_json import message_json
    from .consume import parse_format

    show = message_json if output is OutputFormat.JSON else parse_format(template)
    async with _open_reader(meta, subject) as reader:
        low, high = await reader.bounds(queue)
        at = low if offset is None else offset
        printed = 0
        while True:
            part = await reader.read(queue, at)
            if part.lost:
                begins = part.messages[0].logic_offset if part.messages else part.next_offset
                show_line(_loss(queue, begins), errors=True)
            messages = part.messages if count is None else part.messages[: count - printed]
            for message in messages:
                sys.stdout.write(show(message) + "\n")
            sys.stdout.flush()
            printed += len(messages)
            at = part.next_offset
            if at >= high or printed == count or not part.messages:
                return

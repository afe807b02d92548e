"""`keylane subject queues` and `keylane queue`: the logic queues of a static subject, by logic offset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.control import TimeBound
from ...protocol.text import counted
from ..options import META_DEFAULT, MetaOption, OutputFormat, OutputOption, SubjectArgument
from ..screen import show_line

if TYPE_CHECKING:
    from ...consumer import QueueReader
    from ...protocol.queues import QueueView, SegmentView

queue_app = typer.Typer(
    no_args_is_help=True, help="Read and look at the logic queues of static subjects."
)
QueueArgument = Annotated[
    int, typer.Argument(metavar="QUEUE", min=0, help="Number of the queue, from 0.")
]


def register(subject_app: typer.Typer) -> None:
    """Add `queues` to `keylane subject`."""
    subject_app.command("queues")(queues)


def queues(
    subject: SubjectArgument,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show a static subject's logic queues: range, partitions, logic offsets."""
    from ..screen import run

    run(output, _show_queues(meta, output, subject))


@queue_app.command("offsets")
def offsets(
    subject: SubjectArgument,
    queue: QueueArgument,
    *,
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The offset for a time: ISO 8601, UTC without a zone."),
    ] = None,
    bound: Annotated[
        TimeBound,
        typer.Option(help="lower: the first message at or after it. upper: the last at or before."),
    ] = TimeBound.LOWER,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show a queue's first and next logic offset, or the one for a time."""
    from ..screen import run

    run(output, _show_offsets(meta, output, subject, queue, at, bound))


@queue_app.command("read")
def read(
    subject: SubjectArgument,
    queue: QueueArgument,
    *,
    offset: Annotated[
        int | None, typer.Option(min=0, help="Logic offset to begin at.  [default: the first]")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="Stop after so many messages.")
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="How a line looks.")
    ] = "{queue}:{logic_offset} {key} {value}",
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Print a queue's messages from a logic offset to its end; no group, no acks."""
    from ..screen import run

    run(output, _read(meta, output, subject, queue, offset, count=count, template=format))


def _reader(meta: str, subject: str) -> QueueReader:
    from ...consumer import QueueReader

    return QueueReader(meta, subject=subject)


async def _show_queues(meta: str, output: OutputFormat, subject: str) -> None:
    import asyncio

    from ...protocol.queues import is_behind_loss
    from ..screen import make_table, show_json, show_table

    async with _reader(meta, subject) as reader:
        views = await reader.queues()
        found = await asyncio.gather(*(_bounds(reader, one.queue) for one in views))
    described = [
        {
            "queue": view.queue,
            "range_start": view.range_start,
            "range_end": view.range_end,
            "min_offset": low,
            "max_offset": high,
            "problem": problem,
            "segments": [_facts(one) for one in view.segments],
        }
        for view, (low, high, problem) in zip(views, found, strict=True)
    ]
    if output is OutputFormat.JSON:
        show_json({"subject": subject, "queues": described})
        return
    rows = [
        _row(view, one, low, high)
        for view, (low, high, _) in zip(views, found, strict=True)
        for one in view.segments
    ]
    columns = (
        "queue#", "logical", "min#", "max#", "partition#", "broker group", "state", "logic offsets",
    )  # fmt: skip
    show_table(make_table(f"{subject}: {counted(len(views), 'queue')}", columns, rows))
    for view in views:
        for one in view.segments:
            if is_behind_loss(one.partition):
                show_line(_loss(view.queue, one.partition.logic_start))
    for _low, _high, problem in found:
        if problem:
            show_line(f"offsets unknown: {problem}")


async def _bounds(reader: QueueReader, queue: int) -> tuple[int | None, int | None, str | None]:
    """Min and max, or why they cannot be known now."""
    from ...protocol.errors import KeylaneError

    try:
        low, high = await reader.bounds(queue)
    except KeylaneError as error:
        return None, None, error.message
    return low, high, None


def _loss(queue: int, offset: int) -> str:
    return f"queue {queue}: messages before logic offset {offset} are lost with a disk; how many is not known"


def _facts(one: SegmentView) -> dict[str, object]:
    from ...protocol.queues import is_behind_loss

    partition = one.partition
    return {
        "partition_id": partition.partition_id,
        "name": partition.name,
        "broker_group": partition.broker_group,
        "state": partition.state,
        "logic_start": partition.logic_start,
        "logic_end": one.logic_end,
        "behind_loss": is_behind_loss(partition),
    }


def _row(
    view: QueueView, one: SegmentView, low: int | None, high: int | None
) -> tuple[object, ...]:
    first = one is view.segments[0]
    end = "…" if one.logic_end is None else f"{one.logic_end})"
    return (
        view.queue if first else "",
        f"[{view.range_start}, {view.range_end})" if first else "",
        low if first else "",
        high if first else "",
        one.partition.partition_id,
        one.partition.broker_group,
        one.partition.state,
        f"[{one.partition.logic_start}, {end}",
    )


async def _show_offsets(
    meta: str, output: OutputFormat, subject: str, queue: int, at: str | None, bound: TimeBound
) -> None:
    from ..options import parse_time
    from ..screen import show_json

    at_ms = None if at is None else parse_time(at)
    facts: dict[str, object] = {"subject": subject, "queue": queue}
    async with _reader(meta, subject) as reader:
        facts["min_offset"], facts["max_offset"] = await reader.bounds(queue)
        if at_ms is not None:
            facts["at_ms"] = at_ms
            facts["offset"] = await reader.offset_at(queue, at_ms, bound)
    if output is OutputFormat.JSON:
        show_json(facts)
        return
    show_line(f"queue {queue} of {subject}: min {facts['min_offset']}, max {facts['max_offset']}")
    if at_ms is not None:
        found = facts["offset"]
        show_line(f"{bound} of {at}: {'no such message' if found is None else found}")


async def _read(
    meta: str,
    output: OutputFormat,
    subject: str,
    queue: int,
    offset: int | None,
    *,
    count: int | None,
    template: str,
) -> None:
    import sys

    from ..message_json import message_json
    from .consume import parse_format

    show = message_json if output is OutputFormat.JSON else parse_format(template)
    async with _reader(meta, subject) as reader:
        low, high = await reader.bounds(queue)
        at = low if offset is None else offset
        printed = 0
        while True:
            found = await reader.read(queue, at)
            if found.lost:
                begins = found.messages[0].logic_offset if found.messages else found.next_offset
                show_line(_loss(queue, begins), errors=True)
            left = len(found.messages) if count is None else count - printed
            for message in found.messages[:left]:
                sys.stdout.write(show(message) + "\n")
            sys.stdout.flush()
            printed += len(found.messages[:left])
            at = found.next_offset
            if at >= high or printed == count or not found.messages:
                return

"""`keylane queue`: the options and help of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ....protocol.control import TimeBound
from ...answer import Answer, expanded
from ...options import SubjectArgument

queue_app = typer.Typer(
    no_args_is_help=True, help="Read and look at the logic queues of static subjects."
)
QueueArgument = Annotated[
    int, typer.Argument(metavar="QUEUE", min=0, help="Number of the queue, from 0.")
]


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
    """Show a queue's first and next logic offset, or the one for a time."""
    from .read import show_offsets

    answer.run(show_offsets, subject, queue, at, bound)


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
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="How a line looks.")
    ] = "{queue}:{logic_offset} {key} {value}",
    answer: Answer,
) -> None:
    """Print a queue's messages from a logic offset to its end; no group, no acks."""
    from .read import read_queue

    answer.run(read_queue, subject, queue, offset, count=count, template=format)

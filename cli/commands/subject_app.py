"""The `keylane subject` commands: their options and help."""

from __future__ import annotations

from typing import Annotated

import typer

from ...protocol.control import CreateSubject, Retention
from ...protocol.limits import PARTITIONS_MAX
from ...protocol.routing import OrderStrategy
from ..options import META_DEFAULT, MetaOption, OutputFormat, OutputOption, SubjectArgument
from . import queue, reshape

subject_app = typer.Typer(no_args_is_help=True, help="Create, list and describe subjects.")
reshape.register(subject_app)
queue.register(subject_app)


@subject_app.command("create")
def subject_create(
    subject: SubjectArgument,
    partitions: Annotated[
        int, typer.Option(min=1, max=PARTITIONS_MAX, help="Physical partitions.")
    ] = 2,
    *,
    static: Annotated[
        bool, typer.Option("--static", help="Logic queues, whose number never changes.")
    ] = False,
    queues: Annotated[
        int | None,
        typer.Option(
            min=1, max=PARTITIONS_MAX, help="How many logic queues, with --static.  [default: 2]"
        ),
    ] = None,
    strategy: Annotated[
        OrderStrategy,
        typer.Option(
            help="strict: wait for the partition, whatever it takes. "
            "best_tried: go elsewhere after some seconds, and say so.",
        ),
    ] = OrderStrategy.STRICT,
    retention: Annotated[
        Retention,
        typer.Option(
            help="What an old message waits for. acked: every group has handled it. "
            "time: its age alone counts.",
        ),
    ] = Retention.ACKED,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Create a subject; again with the same settings changes nothing."""
    from ..screen import run
    from .subject import create_subject

    if queues is not None and not static:
        raise typer.BadParameter("goes with --static", param_hint="--queues")

    run(
        output,
        create_subject(
            meta,
            output,
            CreateSubject(
                subject=subject,
                partitions=partitions if queues is None else queues,
                order_strategy=strategy,
                static=static,
                retention=retention,
            ),
        ),
    )


@subject_app.command("list")
def subject_list(
    meta: MetaOption = META_DEFAULT, output: OutputOption = OutputFormat.TABLE
) -> None:
    """List all subjects."""
    from ..screen import run
    from .subject import list_subjects

    run(output, list_subjects(meta, output))


@subject_app.command("describe")
def subject_describe(
    subject: SubjectArgument,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show a subject's partitions: range, broker, state, offsets."""
    from ..screen import run
    from .subject import describe_subject

    run(output, describe_subject(meta, output, subject=subject))

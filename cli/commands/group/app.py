"""`keylane group`: the options and help of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ....protocol.routing import ConsumeStrategy
from ...options import (
    META_DEFAULT,
    ConsumerGroupArgument,
    DryRunOption,
    ForceOption,
    MetaOption,
    OutputFormat,
    OutputOption,
    SubjectArgument,
    WaitOption,
    YesOption,
)

group_app = typer.Typer(
    no_args_is_help=True, help="Look at consumer groups, set their progress, delete them."
)


@group_app.command("describe")
def group_describe(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the owner, cursor and lag of each partition."""
    from ...screen import run
    from .describe import describe_group

    run(output, describe_group(meta, output, subject=subject, group=group))


@group_app.command("list")
def group_list(
    subject: SubjectArgument,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the consumer groups of a subject, with their strategies."""
    from ...screen import run
    from .describe import list_groups

    run(output, list_groups(meta, output, subject=subject))


@group_app.command("switch")
def group_switch(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    strategy: Annotated[
        ConsumeStrategy,
        typer.Argument(
            help="exclusive: each partition has one consumer, and order is kept. "
            "shared: every consumer gets messages of every partition, without order."
        ),
    ],
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Change a group's strategy.  Its consumers end; consumers started with the new strategy take over."""
    from ...screen import run
    from .describe import switch_group

    run(output, switch_group(meta, output, subject=subject, group=group, strategy=strategy))


@group_app.command("delete")
def group_delete(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    force: ForceOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Delete a consumer group and its progress; run again, it shows how far that is."""
    from ...screen import run
    from ..deletion import confirm, delete

    confirm(f"Delete group {group} of {subject} with its progress?", yes=yes)
    run(
        output,
        delete(
            meta,
            output,
            f"group {group} of {subject}",
            lambda admin, known: admin.delete_group(subject, group, force=force, group_id=known),
            wait=wait,
        ),
    )


@group_app.command("reset")
def group_reset(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="earliest|latest|AGO|TIME|OFFSET",
            help="AGO is -1h, -15m, -2d; TIME is ISO 8601, UTC without a zone; "
            "an offset needs --queue (logic offset) or --partition (physical offset).",
        ),
    ] = None,
    shift: Annotated[
        int | None,
        typer.Option(metavar="MESSAGES", help="In place of --to: forward, or back: --shift -100."),
    ] = None,
    dry_run: DryRunOption = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Also with live consumers: they hand everything over, and go on at the new offsets.",
        ),
    ] = False,
    queue: Annotated[
        int | None, typer.Option(min=0, help="Only this logic queue, of a static subject.")
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Only the partition with this id, not of a static subject. Partitions before and behind it "
            "keep their cursors.",
        ),
    ] = None,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Set the cursors of a group without live consumers, or --live; run again, it finishes an interrupted reset."""
    from ...screen import run
    from .reset import reset_group

    run(
        output,
        reset_group(
            meta,
            output,
            subject,
            group,
            to=to,
            shift=shift,
            queue=queue,
            partition=partition,
            dry_run=dry_run,
            live=live,
        ),
    )

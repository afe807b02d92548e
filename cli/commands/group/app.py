"""`keylane group`: the options and help of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ....protocol.groups import TRIES_MAX_MAX, FailurePolicy, FullPolicy
from ....protocol.routing import ConsumeStrategy
from ...options import (
    META_DEFAULT,
    AllPartitionsOption,
    CancelOption,
    ConsumerGroupArgument,
    DryRunOption,
    ForceOption,
    LiveOption,
    MetaOption,
    OutputFormat,
    OutputOption,
    SubjectArgument,
    WaitOption,
    YesOption,
)

group_app = typer.Typer(
    no_args_is_help=True,
    help="Look at consumer groups, make and delete them, set their policy and progress, suspend them.",
)
ClientOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Only the consumers of this name, as `group describe` shows owners."
    ),
]


@group_app.command("describe")
def group_describe(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    all_partitions: AllPartitionsOption = False,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the owner, cursor and lag of each partition."""
    from ...screen import run
    from .describe import describe_group

    shown = describe_group(
        meta, output, subject=subject, group=group, all_partitions=all_partitions
    )
    run(output, shown)


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


@group_app.command("create")
def group_create(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    start: Annotated[
        str,
        typer.Option(
            metavar="earliest|latest|AGO|TIME|manifest:DIR",
            help="Where it begins. AGO is -1h, -15m, -2d; TIME is ISO 8601, UTC without a zone; "
            "manifest:DIR is where the backfill in that folder ended.",
        ),
    ] = "earliest",
    strategy: Annotated[
        ConsumeStrategy, typer.Option(help="How its consumers share out the messages.")
    ] = ConsumeStrategy.EXCLUSIVE,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Make a consumer group, and fix where it begins; what is stored from then on is delivered to it."""
    from ...screen import run
    from .settings import create_group

    run(output, create_group(meta, output, subject, group, start=start, strategy=strategy))


@group_app.command("set")
def group_set(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    on_failure: Annotated[
        FailurePolicy | None,
        typer.Option(
            help="What becomes of a message that failed too often. block: it is tried on, and its key waits; "
            "park: its key is set aside in order; dead: the message alone is."
        ),
    ] = None,
    on_full: Annotated[
        FullPolicy | None,
        typer.Option(
            help="What becomes of a key that is to be parked where no more can be. block: its message waits; "
            "dead: it is set aside all the same, in order, as dead letters."
        ),
    ] = None,
    tries_max: Annotated[
        int | None, typer.Option(min=1, max=TRIES_MAX_MAX, help="How often is too often.")
    ] = None,
    backoff_first_ms: Annotated[
        int | None,
        typer.Option(min=0, help="Pause after the first try; goes with --backoff-max-ms."),
    ] = None,
    backoff_max_ms: Annotated[
        int | None, typer.Option(min=1, help="The longest pause between two tries.")
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Forget first what was stored of the policy.")
    ] = False,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Store what a group does with failing messages; its running consumers follow, whatever their code says."""
    from ...screen import run
    from .settings import set_group

    run(
        output,
        set_group(
            meta,
            output,
            subject,
            group,
            on_failure=on_failure,
            on_full=on_full,
            tries_max=tries_max,
            backoff_first_ms=backoff_first_ms,
            backoff_max_ms=backoff_max_ms,
            forget=forget,
        ),
    )


@group_app.command("suspend")
def group_suspend(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    client: ClientOption = None,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Have a group, or one client of it, hand over its partitions and get none until resume."""
    from ...screen import run
    from .settings import suspend_group

    run(output, suspend_group(meta, output, subject, group, client=client))


@group_app.command("resume")
def group_resume(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    client: ClientOption = None,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """End what suspend with the same --client has begun."""
    from ...screen import run
    from .settings import change

    run(
        output,
        change(meta, output, lambda admin: admin.resume_group(subject, group, client=client)),
    )


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
    live: LiveOption = False,
    cancel: CancelOption = False,
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
    from .reset import cancel_reset, reset_group

    if cancel:
        alone = (to, shift, queue, partition) == (None,) * 4 and not (dry_run or live)
        run(output, cancel_reset(meta, output, subject, group, alone=alone))
        return
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

"""`keylane group`: the options and help of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ....protocol.groups import TRIES_MAX_MAX, FailurePolicy, FullPolicy
from ....protocol.routing import ConsumeStrategy
from ...answer import Answer, expanded
from ...options import (
    AllPartitionsOption,
    CancelOption,
    ConsumerGroupArgument,
    DryRunOption,
    ForceOption,
    LiveOption,
    SubjectArgument,
    WaitOption,
    YesOption,
)

group_app = typer.Typer(
    no_args_is_help=True,
    help="Look at consumer groups, make and delete them, set their policy and "
    "progress, suspend them.",
)
ClientOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Only the consumers of this name, as `group describe` shows owners."
    ),
]


@group_app.command("describe")
@expanded
def group_describe(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    all_partitions: AllPartitionsOption = False,
    answer: Answer,
) -> None:
    """Show the owner, cursor and lag of each partition."""
    from .describe import describe_group

    answer.run(describe_group, subject=subject, group=group, all_partitions=all_partitions)


@group_app.command("list")
@expanded
def group_list(
    subject: SubjectArgument,
    *,
    answer: Answer,
) -> None:
    """List the consumer groups of a subject, with their strategies."""
    from .describe import list_groups

    answer.run(list_groups, subject=subject)


@group_app.command("switch")
@expanded
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
    *,
    answer: Answer,
) -> None:
    """Change a group's strategy.  Its consumers end; consumers started with the new strategy take
    over.
    """
    from .describe import switch_group

    answer.run(switch_group, subject=subject, group=group, strategy=strategy)


@group_app.command("create")
@expanded
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
    answer: Answer,
) -> None:
    """Make a consumer group, and fix where it begins; what is stored from then on is delivered to
    it.
    """
    from .settings import create_group

    answer.run(create_group, subject, group, start=start, strategy=strategy)


@group_app.command("set")
@expanded
def group_set(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    on_failure: Annotated[
        FailurePolicy | None,
        typer.Option(
            help="What becomes of a message that failed too often. block: it is tried on, and its "
            "key waits; "
            "park: its key is set aside in order; dead: the message alone is."
        ),
    ] = None,
    on_full: Annotated[
        FullPolicy | None,
        typer.Option(
            help="What becomes of a key that is to be parked where no more can be. block: its "
            "message waits; "
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
    answer: Answer,
) -> None:
    """Store what a group does with failing messages; its running consumers follow, whatever their
    code says.
    """
    from .settings import set_group

    answer.run(
        set_group,
        subject,
        group,
        on_failure=on_failure,
        on_full=on_full,
        tries_max=tries_max,
        backoff_first_ms=backoff_first_ms,
        backoff_max_ms=backoff_max_ms,
        forget=forget,
    )


@group_app.command("suspend")
@expanded
def group_suspend(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    client: ClientOption = None,
    answer: Answer,
) -> None:
    """Have a group, or one client of it, hand over its partitions and get none until resume."""
    from .settings import suspend_group

    answer.run(suspend_group, subject, group, client=client)


@group_app.command("resume")
@expanded
def group_resume(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    client: ClientOption = None,
    answer: Answer,
) -> None:
    """End what suspend with the same --client has begun."""
    from .settings import change

    answer.run(change, lambda admin: admin.resume_group(subject, group, client=client))


@group_app.command("delete")
@expanded
def group_delete(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    force: ForceOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    answer: Answer,
) -> None:
    """Delete a consumer group and its progress; run again, it shows how far that is."""
    from ..deletion import confirm, delete

    confirm(f"Delete group {group} of {subject} with its progress?", yes=yes)
    answer.run(
        delete,
        f"group {group} of {subject}",
        lambda admin, known: admin.delete_group(subject, group, force=force, group_id=known),
        wait=wait,
    )


@group_app.command("reset")
@expanded
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
            help="Only the partition with this id, not of a static subject. Partitions "
            "before and behind it "
            "keep their cursors.",
        ),
    ] = None,
    answer: Answer,
) -> None:
    """Set the cursors of a group without live consumers, or --live; run again, it finishes an
    interrupted reset.
    """
    from .reset import cancel_reset, reset_group

    if cancel:
        alone = (to, shift, queue, partition) == (None,) * 4 and not (dry_run or live)
        answer.run(cancel_reset, subject, group, alone=alone)
        return
    answer.run(
        reset_group,
        subject,
        group,
        to=to,
        shift=shift,
        queue=queue,
        partition=partition,
        dry_run=dry_run,
        live=live,
    )

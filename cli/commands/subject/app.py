"""`keylane subject`: the options and help of its commands."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import click

from ....protocol.control import Retention
from ....protocol.limits import MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX_MIN, PARTITIONS_MAX
from ....protocol.routing import OrderStrategy
from ...answer import CommonOptions, expand_options
from ...completion import complete_group
from ...groups import CommandGroup
from ...options import (
    AllPartitionsOption,
    DryRunOption,
    ForceOption,
    SubjectArgument,
    WaitOption,
    YesOption,
)
from ...parameters import Argument, Option
from ..broker.app import evacuate

subject_app = CommandGroup()
MESSAGE_BYTES_HELP = "Key, value and properties of one message, in bytes."
PartitionArgument = Annotated[int, Argument(metavar="PARTITION", help="Id of an open partition.")]


@subject_app.add("create", shows="..admin:SubjectView")
@expand_options
def subject_create(
    subject: SubjectArgument,
    partitions: Annotated[int, Option(min=1, max=PARTITIONS_MAX, help="Physical partitions.")] = 2,
    *,
    static: Annotated[
        bool, Option("--static", help="Logic queues, whose number only `grow` changes.")
    ] = False,
    queues: Annotated[
        int | None,
        Option(
            min=1, max=PARTITIONS_MAX, help="Number of logic queues, with --static.  [default: 2]"
        ),
    ] = None,
    strategy: Annotated[
        OrderStrategy,
        Option(
            "--order-strategy",
            "--strategy",
            help="strict: wait for the partition as long as it takes. "
            "best_tried: use another partition after some seconds, and report it.",
        ),
    ] = OrderStrategy.STRICT,
    retention: Annotated[
        Retention,
        Option(
            help="When an old message may be removed. acked: every group has handled it. "
            "time: it has reached its age.",
        ),
    ] = Retention.ACKED,
    message_bytes_max: Annotated[
        int,
        Option(min=MESSAGE_BYTES_MAX_MIN, max=MESSAGE_BYTES_MAX, help=MESSAGE_BYTES_HELP),
    ] = MESSAGE_BYTES_MAX,
    common: CommonOptions,
) -> None:
    """Create a subject; repeating the command with the same settings changes nothing."""
    from .subjects import show_created_subject

    if queues is not None and not static:
        raise click.BadParameter("needs --static", param_hint="--queues")
    common.ask(
        lambda admin: admin.create_subject(
            subject,
            partitions=partitions if queues is None else queues,
            order_strategy=strategy,
            static=static,
            retention=retention,
            message_bytes_max=message_bytes_max,
        ),
        show_created_subject,
    )


@subject_app.add("list", shows="..admin:SubjectSummary")
@expand_options
def subject_list(
    *,
    hidden: Annotated[
        bool, Option("--hidden", help="Also list hidden subjects, with their targets.")
    ] = False,
    common: CommonOptions,
) -> None:
    """List all subjects."""
    from .subjects import show_subjects

    common.ask(lambda admin: admin.list_subjects(hidden=hidden), show_subjects)


@subject_app.add("publish", shows="..admin:Publication")
@expand_options
def subject_publish(
    hidden: Annotated[str, Argument(metavar="HIDDEN", help="Name of the hidden subject.")],
    subject: SubjectArgument,
    *,
    replace: Annotated[
        bool,
        Option(
            "--replace", help="Delete the messages of the subject; the hidden one takes its name."
        ),
    ] = False,
    groups_from: Annotated[
        str,
        Option(
            metavar="DIR",
            help="With --replace: carry the consumer groups over, by the manifest of `keylane "
            "spark reprocess` in this folder. Producers may continue; stop the consumers.",
        ),
    ] = "",
    yes: YesOption = False,
    wait: WaitOption = True,
    common: CommonOptions,
) -> None:
    """Publish a hidden subject: its messages are appended to those of the subject, all at once.
    Repeating the command changes nothing.
    """
    from ...confirmation import confirm
    from .subjects import publish_subject, show_parked

    if replace:
        if groups_from:
            show_parked(groups_from)
        confirm(f"Delete all messages that subject {subject} has now?", yes=yes)
    common.run(
        publish_subject, hidden, subject, replace=replace, groups_from=groups_from, wait=wait
    )


@subject_app.add("describe", shows="..admin:SubjectDescription")
@expand_options
def subject_describe(
    subject: SubjectArgument,
    *,
    all_partitions: AllPartitionsOption = False,
    common: CommonOptions,
) -> None:
    """Show a subject's partitions: range, broker, state, offsets."""
    from .subjects import describe_subject

    common.run(describe_subject, subject=subject, all_partitions=all_partitions)


@subject_app.add("set", shows="..admin:OperationView")
@expand_options
def subject_set(
    subject: SubjectArgument,
    *,
    order_strategy: Annotated[
        OrderStrategy | None, Option(help="strict or best_tried; see `subject create`.")
    ] = None,
    retention: Annotated[
        Retention | None,
        Option(help="acked or time; stored messages keep their current setting."),
    ] = None,
    message_bytes_max: Annotated[
        int | None,
        Option(
            min=MESSAGE_BYTES_MAX_MIN,
            max=MESSAGE_BYTES_MAX,
            help=f"{MESSAGE_BYTES_HELP} Larger stored messages stay.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    common: CommonOptions,
) -> None:
    """Change the settings of a subject while it is in use; repeating the command changes
    nothing.
    """
    from .subjects import set_subject

    if order_strategy is None and retention is None and message_bytes_max is None:
        settings = "--order-strategy, --retention, --message-bytes-max"
        raise click.BadParameter(f"pass at least one of {settings}")
    set_subject(
        common.meta,
        common.output,
        subject,
        order_strategy=order_strategy,
        retention=retention,
        message_bytes_max=message_bytes_max,
        dry_run=dry_run,
        wait=wait,
    )


@subject_app.add("delete", shows="..admin:SubjectDeletion")
@expand_options
def subject_delete(
    subject: SubjectArgument,
    *,
    force: ForceOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    common: CommonOptions,
) -> None:
    """
    Delete a subject with its messages and consumer groups; repeat the command to see the progress.

    The command asks on a terminal; without a terminal, it needs --yes.
    """
    from ..deletion import delete, subject_question

    common.run(
        delete,
        f"subject {subject}",
        lambda admin, subject_id: admin.delete_subject(subject, force=force, subject_id=subject_id),
        wait=wait,
        question=None if yes else partial(subject_question, subject=subject),
    )


@subject_app.add("queues", shows=".commands.queue:QueueBounds")
@expand_options
def subject_queues(
    subject: SubjectArgument,
    *,
    common: CommonOptions,
) -> None:
    """Show a static subject's logic queues: range, partitions, logic offsets."""
    from ..queue import show_queues

    common.run(show_queues, subject)


@subject_app.add("resize", shows="..admin:OperationView")
@expand_options
def subject_resize(
    subject: SubjectArgument,
    partitions: Annotated[int, Option(help="Physical partitions, 1 to 1024.")],
    *,
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    common: CommonOptions,
) -> None:
    """Change the number of partitions. Partitions whose range stays the same are kept, and every
    key keeps its order.
    """
    from ..operations import change_partitions

    change_partitions(
        common.meta,
        common.output,
        lambda admin: admin.resize(subject, partitions, dry_run=dry_run),
        planned=dry_run,
        wait=wait,
    )


@subject_app.add("grow", shows="..admin:OperationView")
@expand_options
def subject_grow(
    subject: SubjectArgument,
    queues: Annotated[int, Option(min=0, max=PARTITIONS_MAX, help="The new number of queues.")] = 0,
    queue: Annotated[
        list[int] | None, Option(min=0, help="A queue to split; may be repeated.")
    ] = None,
    *,
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    common: CommonOptions,
) -> None:
    """Split logic queues. A queue keeps its number, offsets and first half; its second half is a
    new queue from 0.
    """
    from ..operations import change_partitions

    if bool(queues) == bool(queue):
        raise click.BadParameter("pass either --queues or --queue", param_hint="--queues")
    change_partitions(
        common.meta,
        common.output,
        lambda admin: admin.grow_subject(subject, queues, queues=queue or (), dry_run=dry_run),
        planned=dry_run,
        wait=wait,
    )


@subject_app.add("split", shows="..admin:OperationView")
@expand_options
def subject_split(
    partition: PartitionArgument,
    *,
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    common: CommonOptions,
) -> None:
    """Split a partition in two."""
    from ..operations import change_partitions

    change_partitions(
        common.meta,
        common.output,
        lambda admin: admin.split(partition, dry_run=dry_run),
        planned=dry_run,
        wait=wait,
    )


@subject_app.add("merge", shows="..admin:OperationView")
@expand_options
def subject_merge(
    partitions: Annotated[
        list[int], Argument(metavar="PARTITION...", help="Ids of neighbouring partitions.")
    ],
    *,
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    common: CommonOptions,
) -> None:
    """Merge neighbouring partitions into one."""
    from ..operations import change_partitions

    change_partitions(
        common.meta,
        common.output,
        lambda admin: admin.merge(partitions, dry_run=dry_run),
        planned=dry_run,
        wait=wait,
    )


@subject_app.add("move", shows="..admin:OperationView")
@expand_options
def subject_move(
    partitions: Annotated[
        list[int], Argument(metavar="PARTITION...", help="Ids of open partitions.")
    ],
    *,
    to: Annotated[str, Option("--broker-group", metavar="GROUP", help="Broker group to move to.")],
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    common: CommonOptions,
) -> None:
    """Continue partitions on another broker group."""
    from ..operations import change_partitions

    change_partitions(
        common.meta,
        common.output,
        lambda admin: admin.move(partitions, to=to, dry_run=dry_run),
        planned=dry_run,
        wait=wait,
    )


subject_app.add(
    "evacuate", shows="..admin:OperationView", help_text="The same as `keylane broker evacuate`."
)(evacuate)


@subject_app.add("operations", shows=".commands.operations:ListedOperation")
@expand_options
def subject_operations(
    subject: SubjectArgument,
    *,
    common: CommonOptions,
) -> None:
    """Show the operations on a subject's partitions: their progress, and what they wait for."""
    from ..operations import list_operations

    common.run(list_operations, subject)


@subject_app.add("cancel", shows="..admin:OperationView")
@expand_options
def subject_cancel(
    operation: Annotated[int, Argument(metavar="ID", help="Id of an operation.")],
    *,
    common: CommonOptions,
) -> None:
    """Cancel an operation that has not started sealing; after that it can only be completed."""
    from ..operations import show_canceled

    common.ask(lambda admin: admin.cancel(operation), show_canceled)


@subject_app.add("history", shows="..admin:SubjectHistory")
@expand_options
def subject_history(
    subject: SubjectArgument,
    *,
    common: CommonOptions,
) -> None:
    """Draw the lineage of a subject's partitions: parents and children."""
    from .subjects import show_history

    common.ask(lambda admin: admin.history(subject), show_history)


@subject_app.add("lineage", shows=".commands.subject.lineage_file:WrittenPicture")
@expand_options
def subject_lineage(
    subject: SubjectArgument,
    *,
    svg: Annotated[
        Path,
        Option(metavar="FILE", help="The file to write; it is replaced. -: standard output."),
    ],
    group: Annotated[
        list[str] | None,
        Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="Consumer group whose progress is drawn; may be repeated.  [default: the first 6]",
            complete=complete_group,
        ),
    ] = None,
    common: CommonOptions,
) -> None:
    """Draw the lineage of a subject as a picture: which partition had which keys when, on which
    broker group, and how far each consumer group has read.
    """
    from .lineage_file import write_lineage

    common.run(write_lineage, subject=subject, file=svg, groups=group or ())

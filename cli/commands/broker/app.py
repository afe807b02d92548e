"""`keylane broker`: the options and help of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from ...answer import CommonOptions, expand_options
from ...groups import CommandGroup
from ...options import DryRunOption, OutputFormat, OutputOption, WaitOption, YesOption
from ...parameters import Argument, Option
from ..programs import ServerProgram, add_run_command

broker_app = CommandGroup()

index_app = CommandGroup("index", "The index of a broker that is not running.")
broker_app.add_command(index_app)
add_run_command(broker_app, ServerProgram.BROKER)

FolderArgument = Annotated[
    Path, Argument(metavar="DIR", help="Data folder of a broker that is not running.")
]


@broker_app.add("verify", shows="..broker.offline.inspection:Inspection")
def broker_verify(folder: FolderArgument, output: OutputOption = OutputFormat.TABLE) -> None:
    """Check every byte of a data folder; change nothing. Exit status 1 if anything is wrong."""
    from .folder import verify_folder

    verify_folder(folder, output)


@broker_app.add(
    "dump", shows=".commands.broker.folder:RecordFields .commands.broker.folder:ScheduledFields"
)
def broker_dump(
    folder: FolderArgument,
    *,
    partition: Annotated[int | None, Option(help="Only the partition with this id.")] = None,
    start: Annotated[
        int, Option("--from", help="First log position; with --partition, first offset.")
    ] = 0,
    limit: Annotated[int, Option("--limit", "-n", help="Number of records.")] = 100,
    messages: Annotated[
        bool, Option("--messages", help="Show keys, values and properties as well.")
    ] = False,
    scheduled: Annotated[
        bool,
        Option("--scheduled", help="Print the changes of scheduled messages, not all records."),
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Print the records of a data folder, oldest first."""
    from .folder import dump_folder, dump_scheduled

    if scheduled and (partition is not None or start):
        raise click.BadParameter("excludes --partition and --from", param_hint="--scheduled")
    if scheduled:
        dump_scheduled(folder, output, limit=limit, messages=messages)
        return
    dump_folder(folder, output, partition=partition, start=start, limit=limit, messages=messages)


@broker_app.add("health", shows="..admin:Health")
def broker_health(
    address: Annotated[str, Argument(metavar="HOST:PORT", help="Address of the broker.")],
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show whether a broker accepts writes, and if not, why. Exit status 1 if it does not."""
    from ...screen import run
    from .groups import show_health

    run(output, show_health(address, output))


GroupArgument = Annotated[str, Argument(metavar="GROUP", help="Name of a broker group.")]


@broker_app.add("list", shows="..admin:BrokerView")
@expand_options
def broker_list(*, common: CommonOptions) -> None:
    """List the broker groups that have ever reported."""
    from .groups import list_brokers

    common.run(list_brokers)


@broker_app.add("cordon", shows="..admin:BrokerView")
@expand_options
def broker_cordon(
    group: GroupArgument,
    *,
    common: CommonOptions,
) -> None:
    """Give a broker group no new partitions; it keeps those that it has. An evacuation also cordons
    it.
    """
    from .groups import show_cordon

    common.ask(lambda admin: admin.cordon(group), show_cordon)


@broker_app.add("uncordon", shows="..admin:BrokerView")
@expand_options
def broker_uncordon(
    group: GroupArgument,
    *,
    common: CommonOptions,
) -> None:
    """Allow new partitions on a broker group again."""
    from .groups import show_cordon

    common.ask(lambda admin: admin.uncordon(group), show_cordon)


@broker_app.add("evacuate", shows="..admin:OperationView")
@expand_options
def evacuate(
    group: Annotated[
        str, Argument(metavar="GROUP", help="Broker group to take out of use, or a dead one.")
    ],
    *,
    without_source: Annotated[
        bool,
        Option(
            "--without-source",
            help="The broker does not answer: best_tried subjects continue, declared as reordered; "
            "strict and static subjects wait for its return.",
        ),
    ] = False,
    accept_loss: Annotated[
        bool,
        Option(
            "--accept-loss",
            help="The broker's disk is lost for good: strict and static subjects continue too, and "
            "messages that only it had are given up. Use --dry-run first.",
        ),
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    common: CommonOptions,
) -> None:
    """
    Continue all partitions of a broker group, of every subject, on other broker groups.

    The group gets no new partitions, even if the evacuation is canceled, until keylane broker
    uncordon GROUP. With --without-source the exit status is 1 if any subject still has partitions
    there. With --accept-loss the command shows what is given up, and asks on a terminal.
    """
    from ..operations import change_partitions, confirm_loss

    if accept_loss and not dry_run:
        confirm_loss(common.meta, common.output, group, yes=yes)
    change_partitions(
        common.meta,
        common.output,
        lambda admin: admin.evacuate(
            group, without_source=without_source, accept_loss=accept_loss, dry_run=dry_run
        ),
        planned=dry_run,
        wait=wait,
    )


@broker_app.add("accept", shows="..admin:RefusedBroker")
@expand_options
def broker_accept(
    group: GroupArgument,
    *,
    address: Annotated[
        str, Option(metavar="HOST:PORT", help="The broker, if several are refused.")
    ] = "",
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show what would be given up, change nothing.")
    ] = False,
    yes: YesOption = False,
    common: CommonOptions,
) -> None:
    """Let a refused broker serve an older copy of the data folder, and give up the messages that
    the copy lacks.
    """
    from ...confirmation import confirm, will_ask
    from ...screen import run
    from .groups import show_accepted, show_outdated

    if not dry_run and will_ask(yes=yes):
        run(common.output, show_outdated(common.meta, group=group, address=address))
        confirm(f"Give up the messages that this copy of {group}'s data folder lacks?", yes=yes)
    common.ask(
        lambda admin: admin.accept_folder(group, address=address, dry_run=dry_run),
        lambda accepted: show_accepted(accepted, dry_run=dry_run),
    )


@broker_app.add("promote", shows="..broker.offline.promotion:Promotion")
@expand_options
def broker_promote(
    folder: Annotated[
        Path, Argument(metavar="DIR", help="A copy that no program keeps up to date now.")
    ],
    *,
    yes: YesOption = False,
    common: CommonOptions,
) -> None:
    """
    Make a copy of a data folder the one of its broker group, whose own folder is gone.

    Then start a broker on it. If acks waited for the copy, nothing that was acked is lost; before
    another one is promoted, the command asks. Refused while the group's broker reports itself.
    """
    from .folder import promote

    promote(folder, common.meta, common.output, yes=yes)


@broker_app.add("copies", shows=".commands.broker.copies:CopiesView")
@expand_options
def broker_copies(
    group: GroupArgument,
    *,
    wanted: Annotated[
        int | None,
        Option(min=1, max=5, help="How many data folders there are to be, the broker's own too."),
    ] = None,
    least: Annotated[
        int | None,
        Option(
            min=1,
            max=5,
            help="How many of them must have a message before it is acked; with --wanted. By "
            "default 2 of three and more, otherwise 1.",
        ),
    ] = None,
    allow_one_machine: Annotated[
        bool | None,
        Option(
            "--allow-one-machine/--no-allow-one-machine",
            help="Let copies count that are on one machine, with the broker or with each other.",
        ),
    ] = None,
    end_quarantine: Annotated[
        bool,
        Option(
            "--end-quarantine",
            help="The database fell back, and no copy has taken the broker's place unnoticed.",
        ),
    ] = False,
    common: CommonOptions,
) -> None:
    """
    Show the copies of a broker group's data folder, which of them acks wait for, and how far each
    is behind; or set how many folders there are to be.

    Followers that have everything join until there are so many: keylane broker run --follow true.
    """
    from .copies import show_copies

    common.run(
        show_copies,
        group=group,
        wanted=wanted,
        least=least,
        allow_one_machine=allow_one_machine,
        end_quarantine=end_quarantine,
    )


@broker_app.add("forget", shows="..admin:CopySet")
@expand_options
def broker_forget(
    group: GroupArgument,
    copy: Annotated[str, Argument(metavar="COPY", help="The id of the copy.")],
    *,
    common: CommonOptions,
) -> None:
    """
    Let acks wait no more for a copy that is gone for good.

    The last copy of the set is kept: keylane broker copies GROUP --wanted 1 lets acks wait for
    none. A copy whose follower runs joins again.
    """
    from .copies import show_set

    common.ask(lambda admin: admin.forget_copy(group, copy), show_set)


@broker_app.add("hand-over", shows="..admin:HandedOver")
@expand_options
def broker_hand_over(
    group: GroupArgument,
    *,
    to: Annotated[
        str, Option(metavar="COPY", help="The copy; otherwise the set's that was heard last.")
    ] = "",
    common: CommonOptions,
) -> None:
    """
    Let a copy take the place of a broker that serves, which becomes a copy then.

    Clients wait for an instant and see no error. If the copy does not come within 3 s, the broker
    continues to serve. A broker that is stopped with SIGTERM hands over by itself.
    """
    from .copies import show_handed_over

    common.ask(lambda admin: admin.hand_over(group, copy_id=to), show_handed_over)


KindOption = Annotated[str, Option(help="Kind of the index: file or rocksdb.")]


@index_app.add("rebuild", shows="..broker.offline.index_work:IndexReport")
def index_rebuild(
    folder: FolderArgument,
    index: KindOption = "file",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Rebuild the index from the log."""
    from .folder import rebuild

    rebuild(folder, index, output)


@index_app.add("switch", shows="..broker.offline.index_work:IndexReport")
def index_switch(
    folder: FolderArgument,
    index: Annotated[str, Option(help="The new kind of index: file or rocksdb.")],
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Convert the index to another kind; then start the broker with it (--index)."""
    from .folder import switch

    switch(folder, index, output)


@index_app.add("verify", shows="..broker.offline.index_work:IndexReport")
def index_verify(folder: FolderArgument, output: OutputOption = OutputFormat.TABLE) -> None:
    """Compare every index with the log, and the two with each other. Exit status 1 if they
    differ.
    """
    from .folder import verify

    verify(folder, output)

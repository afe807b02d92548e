"""`keylane group`: consumer groups, their policy, progress and suspension."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from ...protocol.clock import SystemClock
from ...protocol.errors import ConfigError
from ...protocol.groups import TRIES_LIMIT, FailurePolicy, FullPolicy
from ...protocol.progress import ResetTo
from ...protocol.reading.instants import parse_ago_ms
from ...protocol.routing import ConsumeStrategy
from ...protocol.text import counted, listed, parse_number
from ..answer import CommonOptions, expand_options
from ..confirmation import confirm, will_ask
from ..groups import CommandGroup
from ..options import (
    AllPartitionsOption,
    CancelOption,
    ConsumerGroupArgument,
    DryRunOption,
    ForceOption,
    LiveOption,
    OutputFormat,
    SubjectArgument,
    WaitOption,
    YesOption,
    parse_time,
)
from ..parameters import Argument, Option
from ..screen import make_table, run, show_line, show_table

if TYPE_CHECKING:
    from ...admin import Admin, GroupDescription, GroupSettings, GroupSummary
    from ...protocol.progress import GroupReset

group_app = CommandGroup()
ClientOption = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Only the consumers of this name, which `group describe` shows as an owner.",
    ),
]


@group_app.add("describe", shows=".commands.group_description:DescribedGroup")
@expand_options
def group_describe(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    all_partitions: AllPartitionsOption = False,
    common: CommonOptions,
) -> None:
    """Show the owner, cursor and lag of each partition."""
    from .group_description import describe_group

    common.run(describe_group, subject=subject, group=group, all_partitions=all_partitions)


@group_app.add("list", shows="..admin:GroupSummary")
@expand_options
def group_list(subject: SubjectArgument, *, common: CommonOptions) -> None:
    """List the consumer groups of a subject, with their strategies."""

    def show(groups: list[GroupSummary]) -> None:
        rows = [(each.group, each.strategy, each.sessions) for each in groups]
        title = f"groups of {subject}" if rows else f"no groups on {subject} yet"
        show_table(make_table(title, ("group", "strategy", "consumers#"), rows))

    common.ask(lambda admin: admin.list_groups(subject), show)


@group_app.add("switch", shows="..admin:GroupView")
@expand_options
def group_switch(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    strategy: Annotated[
        ConsumeStrategy,
        Argument(
            help="exclusive: each partition has one consumer, and order is kept. "
            "shared: every consumer gets messages of every partition, without order."
        ),
    ],
    *,
    common: CommonOptions,
) -> None:
    """Change a group's strategy. Its consumers end; consumers started with the new strategy take
    over.
    """
    common.ask(
        lambda admin: admin.switch_group(subject, group, strategy),
        lambda view: show_line(f"{group} on {subject} is {view.strategy}"),
    )


# ── settings ──────────────────────────────────────────────────────────────────────────────────────
@group_app.add("create", shows="..admin:GroupSettings")
@expand_options
def group_create(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    start: Annotated[
        str,
        Option(
            metavar="earliest|latest|AGO|TIME|manifest:DIR",
            help="Where it begins. AGO is -1h, -15m, -2d; TIME is ISO 8601, UTC without a zone; "
            "manifest:DIR is where the backfill in that folder ended.",
        ),
    ] = "earliest",
    strategy: Annotated[
        ConsumeStrategy, Option(help="How the messages are divided among its consumers.")
    ] = ConsumeStrategy.EXCLUSIVE,
    common: CommonOptions,
) -> None:
    """Create a consumer group and fix where it starts; it gets all messages from that position."""
    from ...consumer.arguments import PREFIX, manifest_start

    if start.startswith(PREFIX):
        manifest = manifest_start(start, subject=subject)
        at, at_ms, cursors = manifest.at.value, manifest.at_ms, manifest.cursors
    else:
        target, _, at_ms = parse_target(start, now_ms=SystemClock.wall_ms())
        if target is ResetTo.OFFSET:
            raise ConfigError(
                "a group starts at earliest, latest or a time; an offset needs a reset"
            )
        at, cursors = target.value, None
    common.ask(
        lambda admin: admin.create_group(
            subject, group, start=at, at_ms=at_ms, cursors=cursors, consume_strategy=strategy
        ),
        _show_settings,
    )


@group_app.add("set", shows="..admin:GroupSettings")
@expand_options
def group_set(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    on_failure: Annotated[
        FailurePolicy | None,
        Option(
            help="What happens to a message that keeps failing. block: it is retried forever, "
            "and its key waits; after --tries-max tries, park sets its key aside, in order, and "
            "dead sets only the message aside."
        ),
    ] = None,
    on_full: Annotated[
        FullPolicy | None,
        Option(
            help="What happens to a key that cannot be parked because there are too many. block: "
            "its message waits; dead: its messages are set aside as dead letters, in order."
        ),
    ] = None,
    tries_max: Annotated[
        int | None,
        Option(min=1, max=TRIES_LIMIT, help="Number of tries, after which --on-failure applies."),
    ] = None,
    backoff_first_ms: Annotated[
        int | None,
        Option(min=0, help="Pause after the first try; needs --backoff-max-ms."),
    ] = None,
    backoff_max_ms: Annotated[
        int | None, Option(min=1, help="Longest pause between two tries.")
    ] = None,
    forget: Annotated[bool, Option("--forget", help="First delete the stored policy.")] = False,
    common: CommonOptions,
) -> None:
    """Store what a group does with failing messages; this overrides the settings of its
    consumers.
    """
    values = (on_failure, on_full, tries_max, backoff_first_ms, backoff_max_ms)
    if not forget and all(value is None for value in values):
        raise ConfigError(
            "pass what to set: --on-failure, --on-full, --tries-max, the back-off, or --forget"
        )
    common.ask(
        lambda admin: admin.set_group(
            subject,
            group,
            on_failure=on_failure,
            on_full=on_full,
            tries_max=tries_max,
            backoff_first_ms=backoff_first_ms,
            backoff_max_ms=backoff_max_ms,
            forget=forget,
        ),
        _show_settings,
    )


@group_app.add("suspend", shows="..admin:GroupSettings")
@expand_options
def group_suspend(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    client: ClientOption = None,
    common: CommonOptions,
) -> None:
    """Let a group, or one of its clients, release its partitions and get none until it is
    resumed.
    """
    description_before: GroupDescription | None = None

    async def suspend(admin: Admin) -> GroupSettings:
        nonlocal description_before
        description_before = None if client is None else await admin.describe_group(subject, group)
        return await admin.suspend_group(subject, group, client=client)

    common.ask(suspend, _show_settings)
    if description_before is None or common.output is not OutputFormat.TABLE:
        return
    owners = {each.owner for each in description_before.partitions if each.owner is not None}
    suspended = (
        description_before.settings.suspended_clients
        if description_before.settings is not None
        else ()
    )
    if client not in owners and client not in suspended:
        names = ", ".join(sorted(owners)) or "none"
        show_line(
            f"no consumer named {client} had a partition (owners: {names}); the "
            "suspension applies to any that joins later"
        )


@group_app.add("resume", shows="..admin:GroupSettings")
@expand_options
def group_resume(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    client: ClientOption = None,
    common: CommonOptions,
) -> None:
    """Undo `suspend` with the same --client."""
    common.ask(lambda admin: admin.resume_group(subject, group, client=client), _show_settings)


def _show_settings(settings: GroupSettings) -> None:
    from .group_description import settings_lines

    for line in settings_lines(settings):
        show_line(line)


@group_app.add("delete", shows="..admin:GroupDeletion")
@expand_options
def group_delete(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    force: ForceOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    common: CommonOptions,
) -> None:
    """Delete a consumer group and its progress; repeat the command to see the deletion's
    progress.
    """
    from .deletion import delete

    confirm(f"Delete group {group} of {subject} with its progress?", yes=yes)
    common.run(
        delete,
        f"group {group} of {subject}",
        lambda admin, group_id: admin.delete_group(subject, group, force=force, group_id=group_id),
        wait=wait,
    )


# ── reset ─────────────────────────────────────────────────────────────────────────────────────────
@group_app.add("reset", shows="..admin:GroupReset ..admin:CanceledReset")
@expand_options
def group_reset(
    subject: SubjectArgument,
    group: ConsumerGroupArgument,
    *,
    to: Annotated[
        str | None,
        Option(
            metavar="earliest|latest|AGO|TIME|OFFSET",
            help="AGO is -1h, -15m, -2d; TIME is ISO 8601, UTC without a zone; "
            "an offset needs --queue (logic offset) or --partition (physical offset).",
        ),
    ] = None,
    shift: Annotated[
        int | None,
        Option(metavar="MESSAGES", help="Instead of --to: forward, or backward with --shift -100."),
    ] = None,
    dry_run: DryRunOption = False,
    live: LiveOption = False,
    cancel: CancelOption = False,
    yes: YesOption = False,
    queue: Annotated[
        int | None, Option(min=0, help="Only this logic queue, of a static subject.")
    ] = None,
    partition: Annotated[
        int | None,
        Option(
            min=1,
            help="Only the partition with this id; not for static subjects. Its parents and "
            "children keep their cursors.",
        ),
    ] = None,
    common: CommonOptions,
) -> None:
    """Set the cursors of a group without live consumers, or with --live; run it again to finish an
    interrupted reset. If it skips messages, it asks on a terminal.
    """
    if cancel:
        if (to, shift, queue, partition) != (None,) * 4 or dry_run or live:
            raise ConfigError(
                "--cancel ends the reset in progress, and cannot be combined with other options"
            )
        common.ask(
            lambda admin: admin.cancel_reset(subject, group),
            lambda canceled: show_line(
                f"the reset of {group} on {subject} to {canceled.asked.to} is canceled; "
                "nothing was changed"
            ),
        )
        return
    if (to is None) == (shift is None):
        raise ConfigError("pass either --to POSITION or --shift MESSAGES")
    target, offset, at_ms = ResetTo.SHIFT, None, None
    if to is not None:
        target, offset, at_ms = parse_target(to, now_ms=SystemClock.wall_ms())
    verb = "would be set" if dry_run else "was set"
    target_text = f"to {to}" if to is not None else f"by {shift:+}"

    async def reset(admin: Admin, *, dry_run: bool) -> GroupReset:
        return await admin.reset_group(
            subject,
            group,
            target,
            offset=offset,
            at_ms=at_ms,
            queue=queue,
            partition_id=partition,
            shift=shift,
            dry_run=dry_run,
            live=live,
        )

    if not dry_run and will_ask(yes=yes):
        run(common.output, _confirm_skipped(common.meta, partial(reset, dry_run=True)))
    common.ask(
        partial(reset, dry_run=dry_run),
        partial(_show_reset, title=f"{group} on {subject} {verb} {target_text}", dry_run=dry_run),
    )


async def _confirm_skipped(
    meta: str, plan: Callable[[Admin], Coroutine[Any, Any, GroupReset]]
) -> None:
    """Ask for confirmation if a reset would move cursors past messages that are not acked."""
    from ..connection import open_admin

    async with open_admin(meta) as admin:
        planned = await plan(admin)
    if skipped := count_skipped(planned):
        confirm(
            f"Skip up to {counted(skipped, 'message')} of {planned.subject}, which no consumer of "
            f"{planned.group} will handle?",
            yes=False,
        )


def count_skipped(planned: GroupReset) -> int:
    """Return the number of messages between the present cursors and later ones; those that were
    acked above a cursor count too.
    """
    return sum(
        max(cursor.cursor - cursor.before, 0)
        for cursor in planned.cursors
        if cursor.before is not None
    )


def parse_target(to: str, *, now_ms: int) -> tuple[ResetTo, int | None, int | None]:
    """
    Parse a position. Return its kind, its offset if it is one, and the time in milliseconds since
    1970 if it is a time or an age.

    Raises:
        ConfigError: the text is not a keyword, an offset, an age or a time.
    """
    if to in {ResetTo.EARLIEST, ResetTo.LATEST}:
        return ResetTo(to), None, None
    offset = parse_number(to)
    if offset is not None:
        return ResetTo.OFFSET, offset, None
    ago = parse_ago_ms(to)
    if ago is not None:
        return ResetTo.TIME, None, max(now_ms - ago, 0)
    try:
        return ResetTo.TIME, None, parse_time(to)
    except ConfigError:
        raise ConfigError(
            f"{to[:80]!r} is not a position: give earliest, latest, an offset, how long ago, "
            "such as -1h, or a time, such as 2024-05-31T12:00:00"
        ) from None


def _show_reset(reset: GroupReset, *, title: str, dry_run: bool) -> None:
    columns: tuple[str, ...] = ("partition#", "offset#", "before#" if dry_run else "token#")
    rows: list[tuple[int | None, ...]] = [
        (cursor.partition_id, cursor.cursor, cursor.before if dry_run else cursor.token)
        for cursor in reset.cursors
    ]
    if reset.static:
        columns = ("queue#", "logic offset#", *columns)
        rows = [
            (cursor.queue, cursor.logic_cursor, *row)
            for cursor, row in zip(reset.cursors, rows, strict=True)
        ]
    show_table(make_table(title, columns, rows))
    if line := still_parked_line(reset):
        show_line(line)
    if reset.left_out:
        ids = ", ".join(map(str, reset.left_out))
        show_line(
            f"left unchanged, on brokers that do not answer and were abandoned: partitions {ids}"
        )


def still_parked_line(reset: GroupReset) -> str:
    """Return a line about messages that remain parked on the reset partitions, or "" if there are
    none.
    """
    affected = [cursor for cursor in reset.cursors if cursor.parked]
    if not affected:
        return ""
    count = sum(cursor.parked or 0 for cursor in affected)
    return (
        f"{counted(count, 'message')} of partitions before these "
        f"{'stays' if count == 1 else 'stay'} parked on "
        f"{counted(len(affected), 'partition')} "
        f"({listed(cursor.partition_id for cursor in affected)}): "
        f"keylane parked list {reset.subject} {reset.group}"
    )

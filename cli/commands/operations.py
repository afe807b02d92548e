"""Starts, follows, lists and cancels operations on partitions.

The metaserver does the work even if the command is interrupted; `keylane subject operations NAME`
then shows the operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import click
from msgspec.structs import asdict

from ...admin import (
    Admin,
    BrokerView,
    LossView,
    OperationKind,
    OperationList,
    OperationView,
    UndrainedPartition,
)
from ...protocol.errors import UnreachableError
from ...protocol.text import counted
from ..confirmation import confirm, will_ask
from ..connection import open_admin
from ..failing import failing_lines
from ..options import OutputFormat
from ..screen import make_table, run, show_data, show_line, show_table
from ..status import showing

POLL_SECONDS = 0.1


def change_partitions(
    meta: str,
    output: OutputFormat,
    start: Callable[[Admin], Awaitable[OperationView | OperationList]],
    *,
    planned: bool,
    wait: bool,
) -> None:
    """
    Start operations and show their results. Exit with status 1 if a subject still has partitions on
    an evacuated broker group.

    Args:
        start: calls the admin client.
        planned: True for a dry run, which leaves nothing to wait for.
        wait: return only after the routes have changed.
    """
    busy_subjects: list[str] = []

    async def work() -> None:
        async with open_admin(meta) as admin:
            with showing(f"waiting for {meta}"):
                operation_list = await start(admin)
            if isinstance(operation_list, OperationView):
                operation_list = OperationList(operations=[operation_list])
            views = operation_list.operations
            busy_subjects.extend(busy.subject for busy in operation_list.busy)
            if wait and not planned:
                views = [await _watch(admin, view, output) for view in views]
        if output is not OutputFormat.TABLE:
            show_data(output, views)
        else:
            _show_views(views, planned=planned)
        _show_remaining(operation_list, output)

    run(output, work())
    if busy_subjects:
        raise click.exceptions.Exit(1)


def confirm_loss(meta: str, output: OutputFormat, group: str, *, yes: bool) -> None:
    """Show what accepting the loss of a broker group would give up, and ask for confirmation. Does
    nothing with `yes` or without a terminal.
    """
    if not will_ask(yes=yes):
        return

    async def show() -> None:
        async with open_admin(meta) as admin:
            plan = await admin.evacuate(group, accept_loss=True, dry_run=True)
            brokers = (await admin.list_brokers()).brokers
        for line in _copies_lines(brokers, group):
            show_line(line, errors=True)
        losses = [(view.subject, loss) for view in plan.operations for loss in view.losses]
        for subject, loss in losses:
            show_line(_loss_text(subject, loss, planned=True), errors=True)
        _show_group_losses(plan.operations, errors=True)
        if not losses:
            show_line(f"no partition of {group} would be lost now", errors=True)

    run(output, show())
    confirm(
        f"Give up the messages that only broker group {group} has, and refuse its data folder "
        "forever?",
        yes=yes,
    )


def _copies_lines(brokers: Sequence[BrokerView], group: str) -> list[str]:
    """Return what an operator should know of the copies of a folder that is to be given up."""
    return [
        f"Acks waited for {counted(each.folders - 1, 'copy', 'copies')} of the data folder of "
        f"{group}, with everything that was acked. Where one is left, nothing is lost if it takes "
        "the folder's place: keylane broker promote DIR"
        for each in brokers
        if each.broker_group == group and each.folders > 1
    ]


def _show_remaining(evacuation: OperationList, output: OutputFormat) -> None:
    """Show which subjects remain on an evacuated broker group and that it is cordoned. With JSON
    output, this is printed to standard error.
    """
    errors = output is not OutputFormat.TABLE
    for busy in evacuation.busy:
        operation = f"operation {busy.operation_id}" if busy.operation_id else "no operation"
        show_line(f"{busy.subject}: not empty there ({operation}): {busy.problem}", errors=errors)
    if evacuation.cordoned:
        show_line(_cordoned_text(evacuation.cordoned), errors=errors)


def _cordoned_text(group: str) -> str:
    return f"{group} gets no new partitions until: keylane broker uncordon {group}"


async def _watch(admin: Admin, view: OperationView, output: OutputFormat) -> OperationView:
    """Follow an operation until the route has changed, showing each state and problem once."""
    last_shown = ("", "")
    advice = (
        f"keylane subject operations {view.subject} shows it; Ctrl-C leaves it going on "
        "(--no-wait does not wait)."
    )
    with showing(lambda: _progress_text(view), advice=advice):
        while True:
            try:
                async for latest_view in admin.follow(view):
                    view = latest_view
                    state = (view.state.value, view.problem)
                    if output is OutputFormat.TABLE and state != last_shown and view.operation_id:
                        show_line(_progress_text(view))
                        last_shown = state
                return view
            except UnreachableError as error:
                if last_shown[1] != error.message:
                    last_shown = (last_shown[0], error.message)
                    if output is OutputFormat.TABLE:
                        show_line(f"{view.subject}: {error.message}")
            await asyncio.sleep(POLL_SECONDS)


def _progress_text(view: OperationView) -> str:
    done_count = sum(step.done for step in view.steps)
    waiting = f"; waits: {view.problem}" if view.problem else ""
    return (
        f"{view.subject}: {view.state}, {done_count} of {counted(len(view.steps), 'step')}{waiting}"
    )


def _show_views(views: list[OperationView], *, planned: bool) -> None:
    views = [view for view in views if view.sealed]
    if not views:
        show_line("nothing to do")
    for view in views:
        state = "a plan only" if planned else view.state.value
        for loss in view.losses:
            show_line(_loss_text(view.subject, loss, planned=planned))
        if view.children:
            _show_children(view, state)
        else:
            show_line(
                f"{view.kind} of {view.subject}: {state}, no longer waits for partitions "
                f"{_join_ids(view.sealed)}"
            )
    if planned:
        _show_group_losses(views)


def _loss_text(subject: str, loss: LossView, *, planned: bool) -> str:
    state = "would be given up" if planned else "is lost"
    end = "its end is not known" if loss.end_offset is None else f"ends at {loss.end_offset}"
    unread_max = {each.group: each.messages_max for each in loss.losses}
    groups = [f"{group} ({max_loss_text(unread_max.get(group))})" for group in loss.unread_by]
    unread = f"; not read to its end by {', '.join(groups)}" if groups else ""
    return f"partition {loss.partition_id} of {subject} {state}: {end}{unread}"


def max_loss_text(*counts: int | None) -> str:
    """Describe the maximum number of messages that a group loses, given the maximum for each
    partition, or None if it is unknown.
    """
    known_counts = [count for count in counts if count is not None]
    unknown = len(counts) - len(known_counts)
    if not known_counts:
        return "an unknown number of messages"
    unknown_text = f", and an unknown number on {counted(unknown, 'partition')}" if unknown else ""
    return f"at most {counted(sum(known_counts), 'message')}{unknown_text}"


def _show_group_losses(views: list[OperationView], *, errors: bool = False) -> None:
    """Show how many messages each group would lose in total by planned operations."""
    group_losses: dict[tuple[str, str], list[int | None]] = {}
    for view in views:
        for loss in view.losses:
            for each in loss.losses:
                group_losses.setdefault((view.subject, each.group), []).append(each.messages_max)
    for (subject, group), counts in sorted(group_losses.items()):
        show_line(f"{group} of {subject} would lose {max_loss_text(*counts)}", errors=errors)


def _show_children(view: OperationView, state: str) -> None:
    title = f"{view.kind} of {view.subject}: {state}, seals partitions {_join_ids(view.sealed)}"
    grows = view.kind is OperationKind.GROW
    rows = [
        (
            child.partition_id or None,
            child.name,
            *((child.queue,) if grows else ()),
            f"[{child.range_start}, {child.range_end})",
            child.broker_group,
            _join_ids(child.parents),
        )
        for child in view.children
    ]
    queue = ("queue#",) if grows else ()
    columns = ("id#", "opens", *queue, "logical", "broker group", "parents")
    show_table(make_table(title, columns, rows))
    if view.reordered:
        show_line(f"declared as reordered: what is left in {_join_ids(view.reordered)}")


class ListedOperation(OperationView, frozen=True, kw_only=True):
    """An operation with the partitions that it sealed and groups have not drained."""

    undrained: list[UndrainedPartition]


async def list_operations(meta: str, output: OutputFormat, subject: str) -> None:
    """Show a subject's operations, newest first, and the sealed partitions that groups have not
    fully acked.
    """
    async with open_admin(meta) as admin:
        operations = await admin.list_operations(subject)
        undrained = await admin.undrained(subject) if operations else []
        failing_groups = {each.group for each in undrained if each.group and each.failing}
        descriptions = {
            group: await admin.describe_group(subject, group) for group in sorted(failing_groups)
        }
    undrained_by_id = {
        view.operation_id: _undrained_partitions(view, undrained) for view in operations
    }
    if output is not OutputFormat.TABLE:
        show_data(
            output,
            [
                ListedOperation(**asdict(view), undrained=undrained_by_id[view.operation_id])
                for view in operations
            ],
        )
        return
    rows = [
        (
            view.operation_id,
            view.kind,
            view.state,
            f"{sum(step.done for step in view.steps)} of {len(view.steps)}",
            _join_ids(view.sealed),
            _join_ids([child.partition_id for child in view.children]),
            "; ".join(
                filter(
                    None, [view.problem, *map(_waiting_text, undrained_by_id[view.operation_id])]
                )
            )
            or None,
        )
        for view in operations
    ]
    columns = ("id#", "operation", "state", "steps", "seals", "opens", "waits for")
    title = f"operations on {subject}" if rows else f"no operations on {subject} yet"
    show_table(make_table(title, columns, rows))
    for partition in undrained:
        if partition.group is not None and partition.failing is not None:
            description = descriptions[partition.group]
            owners = {each.partition_id: each.owner for each in description.partitions}
            for line in failing_lines(
                subject,
                partition.group,
                partition.partition_id,
                partition.failing,
                policy=None if description.settings is None else description.settings.policy,
                owned=owners.get(partition.partition_id) is not None,
            ):
                show_line(line)


def _undrained_partitions(
    view: OperationView, undrained: Sequence[UndrainedPartition]
) -> list[UndrainedPartition]:
    """Return the undrained partitions among those that an operation sealed."""
    return [partition for partition in undrained if partition.partition_id in view.sealed]


def _waiting_text(partition: UndrainedPartition) -> str:
    if partition.group is None:
        return f"partition {partition.partition_id}: {partition.problem}"
    position = (
        f"{partition.group}: partition {partition.partition_id} at {partition.offset} of "
        f"{partition.end_offset}"
    )
    return position if partition.failing is None else f"{position}, {partition.failing.kind}"


def show_canceled(view: OperationView) -> None:
    """Show the state of a canceled operation."""
    show_line(f"{view.kind} of {view.subject}: {view.state}")
    if view.cordoned:
        show_line(_cordoned_text(view.cordoned))


def _join_ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))

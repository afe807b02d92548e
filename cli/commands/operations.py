"""Begins, watches, lists and cancels changes of partitions.

The metaserver does the work, whether the command watches or not; `keylane subject operations NAME`
shows the operation of an interrupted command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import typer
from msgspec.structs import asdict

from ...admin import (
    Admin,
    LossView,
    OperationKind,
    OperationList,
    OperationView,
    UndrainedPartition,
)
from ...protocol.errors import UnreachableError
from ...protocol.text import counted
from ..connection import open_admin
from ..failing import failing_lines
from ..options import OutputFormat
from ..screen import make_table, run, show_json, show_line, show_table
from .deletion import asks, confirm

POLL_SECONDS = 0.1


def change_partitions(
    meta: str,
    output: OutputFormat,
    begin: Callable[[Admin], Awaitable[OperationView | OperationList]],
    *,
    planned: bool,
    wait: bool,
) -> None:
    """
    Begin operations and show their results; the exit status is 1 if a subject stays on an evacuated
    broker group.

    Args:
        begin: calls an admin client.
        planned: True for a dry run, where there is nothing to wait for.
        wait: return only when the routes have changed.
    """
    stays: list[str] = []

    async def work() -> None:
        async with open_admin(meta) as admin:
            answer = await begin(admin)
            if isinstance(answer, OperationView):
                answer = OperationList(operations=[answer])
            views = answer.operations
            stays.extend(subject.subject for subject in answer.busy)
            if wait and not planned:
                views = [await _watch(admin, view, output) for view in views]
        if output is OutputFormat.JSON:
            show_json(views)
        else:
            _show_views(views, planned=planned)
        _show_left(answer, output)

    run(output, work())
    if stays:
        raise typer.Exit(1)


def confirm_loss(meta: str, output: OutputFormat, group: str, *, yes: bool) -> None:
    """Show what the loss of a broker group gives up, and ask on a terminal before it is accepted,
    unless `yes`.
    """
    if not asks(yes=yes):
        return

    async def show() -> None:
        async with open_admin(meta) as admin:
            plan = await admin.evacuate(group, accept_loss=True, dry_run=True)
        losses = [(view.subject, loss) for view in plan.operations for loss in view.losses]
        for subject, loss in losses:
            show_line(_loss(subject, loss, planned=True), errors=True)
        _show_group_losses(plan.operations, errors=True)
        if not losses:
            show_line(f"no partition of {group} would be lost now", errors=True)

    run(output, show())
    confirm(
        f"Give up the messages that only broker group {group} has, and refuse its data folder "
        "forever?",
        yes=yes,
    )


def _show_left(answer: OperationList, output: OutputFormat) -> None:
    """Show what stays on an evacuated broker group, and that it is cordoned; with JSON output on
    standard error.
    """
    errors = output is OutputFormat.JSON
    for left in answer.busy:
        which = f"operation {left.operation_id}" if left.operation_id else "no operation"
        show_line(f"{left.subject}: not empty there ({which}): {left.problem}", errors=errors)
    if answer.cordoned:
        show_line(_cordoned(answer.cordoned), errors=errors)


def _cordoned(group: str) -> str:
    return f"{group} gets no new partitions until: keylane broker uncordon {group}"


async def _watch(admin: Admin, view: OperationView, output: OutputFormat) -> OperationView:
    """Follow an operation until its route has changed, and show each state and problem once."""
    shown = ("", "")
    while True:
        try:
            async for latest in admin.follow(view):
                view = latest
                state = (view.state.value, view.problem)
                if output is OutputFormat.TABLE and state != shown and view.operation_id:
                    show_line(_progress(view))
                    shown = state
            return view
        except UnreachableError as error:
            if shown[1] != error.message:
                shown = (shown[0], error.message)
                if output is OutputFormat.TABLE:
                    show_line(f"{view.subject}: {error.message}")
        await asyncio.sleep(POLL_SECONDS)


def _progress(view: OperationView) -> str:
    done = sum(step.done for step in view.steps)
    waits = f"; waits: {view.problem}" if view.problem else ""
    return f"{view.subject}: {view.state}, {done} of {counted(len(view.steps), 'step')}{waits}"


def _show_views(views: list[OperationView], *, planned: bool) -> None:
    views = [view for view in views if view.sealed]
    if not views:
        show_line("nothing to do")
    for view in views:
        what = "a plan only" if planned else view.state.value
        for loss in view.losses:
            show_line(_loss(view.subject, loss, planned=planned))
        if view.children:
            _show_children(view, what)
        else:
            show_line(
                f"{view.kind} of {view.subject}: {what}, no longer waits for partitions "
                f"{_ids(view.sealed)}"
            )
    if planned:
        _show_group_losses(views)


def _loss(subject: str, loss: LossView, *, planned: bool) -> str:
    what = "would be given up" if planned else "is lost"
    end = "its end is not known" if loss.end_offset is None else f"ends at {loss.end_offset}"
    left = {each.group: each.messages_max for each in loss.losses}
    who = [f"{group} ({most_lost(left.get(group))})" for group in loss.unread_by]
    unread = f"; not read to its end by {', '.join(who)}" if who else ""
    return f"partition {loss.partition_id} of {subject} {what}: {end}{unread}"


def most_lost(*numbers: int | None) -> str:
    """Return how many messages a group loses at most, in words; None stands for a partition where
    it is not known.
    """
    known = [number for number in numbers if number is not None]
    unknown = len(numbers) - len(known)
    if not known:
        return "an unknown number of messages"
    also = f", and an unknown number on {counted(unknown, 'partition')}" if unknown else ""
    return f"at most {counted(sum(known), 'message')}{also}"


def _show_group_losses(views: list[OperationView], *, errors: bool = False) -> None:
    """Show the total that each group would lose by planned operations."""
    left: dict[tuple[str, str], list[int | None]] = {}
    for view in views:
        for loss in view.losses:
            for each in loss.losses:
                left.setdefault((view.subject, each.group), []).append(each.messages_max)
    for (subject, group), numbers in sorted(left.items()):
        show_line(f"{group} of {subject} would lose {most_lost(*numbers)}", errors=errors)


def _show_children(view: OperationView, what: str) -> None:
    title = f"{view.kind} of {view.subject}: {what}, seals partitions {_ids(view.sealed)}"
    grows = view.kind is OperationKind.GROW
    rows = [
        (
            child.partition_id or None,
            child.name,
            *((child.queue,) if grows else ()),
            f"[{child.range_start}, {child.range_end})",
            child.broker_group,
            _ids(child.parents),
        )
        for child in view.children
    ]
    queue = ("queue#",) if grows else ()
    columns = ("id#", "opens", *queue, "logical", "broker group", "parents")
    show_table(make_table(title, columns, rows))
    if view.reordered:
        show_line(f"declared as reordered: what is left in {_ids(view.reordered)}")


async def list_operations(meta: str, output: OutputFormat, subject: str) -> None:
    """Show the operations of a subject, the newest first, and the sealed partitions that groups
    have not fully acked.
    """
    async with open_admin(meta) as admin:
        operations = await admin.list_operations(subject)
        undrained = await admin.undrained(subject) if operations else []
    left = {view.operation_id: _of_sealed(view, undrained) for view in operations}
    if output is OutputFormat.JSON:
        show_json([{**asdict(view), "undrained": left[view.operation_id]} for view in operations])
        return
    rows = [
        (
            view.operation_id,
            view.kind,
            view.state,
            f"{sum(step.done for step in view.steps)} of {len(view.steps)}",
            _ids(view.sealed),
            _ids([child.partition_id for child in view.children]),
            "; ".join(filter(None, [view.problem, *map(_waits, left[view.operation_id])])) or None,
        )
        for view in operations
    ]
    columns = ("id#", "operation", "state", "steps", "seals", "opens", "waits for")
    title = f"operations on {subject}" if rows else f"no operations on {subject} yet"
    show_table(make_table(title, columns, rows))
    for part in undrained:
        if part.group is not None and part.failing is not None:
            for line in failing_lines(subject, part.group, part.partition_id, part.failing):
                show_line(line)


def _of_sealed(
    view: OperationView, undrained: Sequence[UndrainedPartition]
) -> list[UndrainedPartition]:
    """Return the undrained partitions that an operation has sealed."""
    return [part for part in undrained if part.partition_id in view.sealed]


def _waits(part: UndrainedPartition) -> str:
    if part.group is None:
        return f"partition {part.partition_id}: {part.problem}"
    at = f"{part.group}: partition {part.partition_id} at {part.offset} of {part.end_offset}"
    return at if part.failing is None else f"{at}, {part.failing.kind}"


def show_canceled(view: OperationView) -> None:
    """Show the state of an operation that was canceled."""
    show_line(f"{view.kind} of {view.subject}: {view.state}")
    if view.cordoned:
        show_line(_cordoned(view.cordoned))


def _ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))

"""`keylane subject` resize, split, merge, move, evacuate, operations, history: partitions changed, and what became of them.

The metaserver does the work, whether the command watches or not: an interrupted one is looked at again with
`keylane subject operations NAME`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.text import counted
from ..options import META_DEFAULT, MetaOption, OutputFormat, OutputOption, SubjectArgument
from ..screen import show_line
from .lineage import history

if TYPE_CHECKING:
    from ...protocol.operations import (
        BusySubject,
        OperationKind,
        OperationList,
        OperationView,
    )
    from ...rpc.client import MetaClient

PartitionArgument = Annotated[
    int, typer.Argument(metavar="PARTITION", help="Id of an open partition.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the plan, change nothing.")]
WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Show the progress until it is done.")
]
POLL_SECONDS = 0.1


def register(app: typer.Typer) -> None:
    """Add the commands to `keylane subject`."""
    app.command("resize")(resize)
    app.command("split")(split)
    app.command("merge")(merge)
    app.command("move")(move)
    app.command("evacuate")(evacuate)
    app.command("operations")(operations)
    app.command("cancel")(cancel)
    app.command("history")(history)


def resize(
    subject: SubjectArgument,
    partitions: Annotated[int, typer.Option(help="Physical partitions, 1 to 1024.")],
    *,
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Change the number of partitions; ranges that stay equal keep theirs, and no key loses its order."""
    from ...protocol.operations import OperationKind

    _reshape(
        meta,
        output,
        OperationKind.RESIZE,
        dry_run=dry_run,
        wait=wait,
        subject=subject,
        partitions=partitions,
    )


def split(
    partition: PartitionArgument,
    *,
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Make one partition two."""
    from ...protocol.operations import OperationKind

    _reshape(
        meta,
        output,
        OperationKind.SPLIT,
        dry_run=dry_run,
        wait=wait,
        partition_ids=(partition,),
    )


def merge(
    partitions: Annotated[
        list[int], typer.Argument(metavar="PARTITION...", help="Ids of neighbours.")
    ],
    *,
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Make neighbouring partitions one."""
    from ...protocol.operations import OperationKind

    _reshape(
        meta,
        output,
        OperationKind.MERGE,
        dry_run=dry_run,
        wait=wait,
        partition_ids=tuple(partitions),
    )


def move(
    partitions: Annotated[
        list[int], typer.Argument(metavar="PARTITION...", help="Ids of open partitions.")
    ],
    *,
    to: Annotated[str, typer.Option(metavar="GROUP", help="Broker group to move to.")],
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Continue partitions on another broker group."""
    from ...protocol.operations import OperationKind

    _reshape(
        meta,
        output,
        OperationKind.MOVE,
        dry_run=dry_run,
        wait=wait,
        partition_ids=tuple(partitions),
        broker_group=to,
    )


def evacuate(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Broker group to leave.")],
    *,
    without_source: Annotated[
        bool,
        typer.Option(
            "--without-source",
            help="Although it is silent: best_tried subjects go on, declared as reordered; "
            "strict and static ones are held until it is back.",
        ),
    ] = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="It never comes back, and its disk is lost: strict and static subjects go on as well, and what "
            "only it had is given up. See --dry-run first.",
        ),
    ] = False,
    dry_run: DryRunOption = False,
    wait: WaitOption = True,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """
    Continue all partitions of a broker group, of every subject, on others.

    It gets no new partitions from then on, also if the evacuation is canceled: keylane broker uncordon GROUP ends that.
    With --without-source the status is 1 if something of a subject stays there.
    """
    from ...protocol.operations import OperationKind

    _reshape(
        meta,
        output,
        OperationKind.EVACUATE,
        dry_run=dry_run,
        wait=wait,
        broker_group=group,
        without_source=without_source,
        accept_loss=accept_loss,
    )


def operations(
    subject: SubjectArgument,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the operations on a subject's partitions: how far, and what they wait for."""
    from ..screen import run

    run(output, _show_operations(meta, output, subject))


def cancel(
    operation: Annotated[int, typer.Argument(metavar="ID", help="Id of an operation.")],
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Undo an operation of which nothing is sealed yet; one that has begun to seal only goes forward."""
    from ..screen import run

    run(output, _cancel(meta, output, operation))


def _reshape(
    meta: str,
    output: OutputFormat,
    kind: OperationKind,
    *,
    dry_run: bool,
    wait: bool,
    **fields: object,
) -> None:
    from ...protocol.operations import Reshape
    from ..screen import run

    ask = Reshape(kind=kind, dry_run=dry_run, **fields)  # type: ignore[arg-type]
    busy: list[BusySubject] = []

    async def work() -> None:
        from ..connection import connect

        async with connect(meta) as (client, _network):
            answer = await client.reshape(ask)
            views = answer.operations
            busy.extend(answer.busy)
            if wait and not dry_run:
                views = [await _watch(client, one, output) for one in views]
        if output is OutputFormat.JSON:
            from ..screen import show_json

            show_json(views)
        else:
            _show_views(views, planned=dry_run)
        _show_left(answer, output)

    run(output, work())
    if busy:
        raise typer.Exit(1)


def _show_left(answer: OperationList, output: OutputFormat) -> None:
    """What stays on an evacuated broker group, and that it is cordoned; beside the JSON, not in it."""
    errors = output is OutputFormat.JSON
    for one in answer.busy:
        which = f"operation {one.operation_id}" if one.operation_id else "no operation"
        show_line(f"{one.subject}: not empty there ({which}): {one.problem}", errors=errors)
    if answer.cordoned:
        show_line(_cordoned(answer.cordoned), errors=errors)


def _cordoned(group: str) -> str:
    return f"{group} gets no new partitions until: keylane broker uncordon {group}"


async def _watch(client: MetaClient, view: OperationView, output: OutputFormat) -> OperationView:
    """Follow an operation until its route has changed, saying each new state and problem once."""
    import asyncio

    from ...protocol.errors import UnreachableError
    from ...protocol.operations import OperationState

    said = ("", "")
    while True:
        told = (view.state.value, view.problem)
        if output is OutputFormat.TABLE and told != said and view.operation_id:
            done = sum(step.done for step in view.steps)
            waits = f"; waits: {view.problem}" if view.problem else ""
            show_line(
                f"{view.subject}: {view.state}, {done} of {counted(len(view.steps), 'step')}{waits}",
            )
            said = told
        if view.state in {OperationState.DONE, OperationState.FENCE, OperationState.CANCELED}:
            return view
        await asyncio.sleep(POLL_SECONDS)
        try:
            found = (await client.operations(view.subject)).operations
        except UnreachableError as error:
            if said[1] != error.message:
                said = (said[0], error.message)
                if output is OutputFormat.TABLE:
                    show_line(f"{view.subject}: {error.message}")
            continue
        view = next((one for one in found if one.operation_id == view.operation_id), view)


def _show_views(views: list[OperationView], *, planned: bool) -> None:
    from ..screen import make_table, show_table

    if not any(one.sealed for one in views):
        show_line("nothing to do")
        return
    for view in views:
        if not view.sealed:
            continue
        what = "would be" if planned else view.state.value
        for loss in view.losses:
            end = (
                "its end is not known" if loss.end_offset is None else f"ends at {loss.end_offset}"
            )
            unread = (
                f"; not read to its end by {', '.join(loss.unread_by)}" if loss.unread_by else ""
            )
            show_line(f"partition {loss.partition_id} of {view.subject} is lost: {end}{unread}")
        if not view.children:
            show_line(
                f"{view.kind} of {view.subject}: {what}, waits no longer for {_ids(view.sealed)}"
            )
            continue
        title = f"{view.kind} of {view.subject}: {what}, seals {_ids(view.sealed)}"
        rows = [
            (
                one.partition_id or None,
                one.name,
                f"[{one.range_start}, {one.range_end})",
                one.broker_group,
                _ids(one.parents),
            )
            for one in view.children
        ]
        show_table(make_table(title, ("id#", "opens", "logical", "broker group", "parents"), rows))
        if view.reordered:
            show_line(f"declared as reordered: what is left in {_ids(view.reordered)}")


async def _show_operations(meta: str, output: OutputFormat, subject: str) -> None:
    from ...protocol.ids import check_name
    from ..connection import connect
    from ..screen import make_table, show_json, show_table

    check_name("subject", subject)
    async with connect(meta) as (client, _network):
        found = (await client.operations(subject)).operations
    if output is OutputFormat.JSON:
        show_json(found)
        return
    rows = [
        (
            one.operation_id,
            one.kind,
            one.state,
            f"{sum(step.done for step in one.steps)} of {len(one.steps)}",
            _ids(one.sealed),
            _ids(tuple(int(child.partition_id) for child in one.children)),
            one.problem or None,
        )
        for one in found
    ]
    columns = ("id#", "operation", "state", "steps", "sealed", "opened", "waits for")
    title = f"operations on {subject}" if rows else f"no operations on {subject} yet"
    show_table(make_table(title, columns, rows))


async def _cancel(meta: str, output: OutputFormat, operation_id: int) -> None:
    from ..connection import connect
    from ..screen import show_json

    async with connect(meta) as (client, _network):
        view = await client.cancel_operation(operation_id)
    if output is OutputFormat.JSON:
        show_json(view)
    else:
        show_line(f"{view.kind} of {view.subject}: {view.state}")
        if view.cordoned:
            show_line(_cordoned(view.cordoned))


def _ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))

"""Changes of partitions: resize, grow, split, move, evacuate."""

from __future__ import annotations

from ...admin import Admin, OperationView
from ...protocol.text import counted, listed
from .act import PLAN_LINES_MAX, Form


def operation_lines(view: OperationView, *, is_plan: bool) -> tuple[str, ...]:
    """Return what an operation does, a line for each partition."""
    if not view.children and not view.sealed:
        return (f"{view.subject}: there is nothing to change",)
    will = "would seal" if is_plan else "seals"
    opened = "would open" if is_plan else "opens"
    sealed = counted(len(view.sealed), "partition")
    lines = [
        f"{view.subject}: {will} {sealed} ({listed(view.sealed)}), and {opened} "
        + counted(len(view.children), "partition")
    ]
    lines += [
        f"logical partitions {each.range_start}–{each.range_end - 1} on {each.broker_group}"
        + (f", continuing {listed(each.parents)}" if each.parents else "")
        for each in view.children[:PLAN_LINES_MAX]
    ]
    if len(view.children) > PLAN_LINES_MAX:
        lines.append(f"and {len(view.children) - PLAN_LINES_MAX} more partitions")
    for loss in view.losses:
        who = ", ".join(
            f"{each.group} up to {each.messages_max}"
            if each.messages_max is not None
            else f"{each.group} an unknown number"
            for each in loss.losses
        )
        lines.append(f"partition {loss.partition_id} is given up; groups lose: {who or 'nothing'}")
    return tuple(lines)


def _told(view: OperationView, form: Form) -> tuple[str, ...]:
    lines = operation_lines(view, is_plan=form.dry_run)
    if view.operation_id and not form.dry_run:
        return (f"Operation {view.operation_id} has begun.", *lines)
    return lines


async def resize(admin: Admin, form: Form) -> tuple[str, ...]:
    """Change the number of open partitions."""
    partitions = form.number("partitions")
    return _told(await admin.resize(form["subject"], partitions, dry_run=form.dry_run), form)


async def grow(admin: Admin, form: Form) -> tuple[str, ...]:
    """Change the number of logic queues."""
    queues = form.number("queues")
    return _told(await admin.grow_subject(form["subject"], queues, dry_run=form.dry_run), form)


async def move(admin: Admin, form: Form) -> tuple[str, ...]:
    """Continue partitions on another broker group."""
    ids = form.numbers("partitions")
    return _told(await admin.move(ids, to=form["to"], dry_run=form.dry_run), form)


async def split(admin: Admin, form: Form) -> tuple[str, ...]:
    """Cut a partition in two."""
    return _told(await admin.split(form.number("partition"), dry_run=form.dry_run), form)


async def cancel_operation(admin: Admin, form: Form) -> str:
    """Cancel an operation."""
    return f"Operation {(await admin.cancel(form.number('id'))).operation_id} is canceled."


async def evacuate(admin: Admin, form: Form) -> tuple[str, ...]:
    """Continue all partitions of a broker group on others."""
    found = await admin.evacuate(
        form["broker"],
        without_source=bool(form["without_source"]),
        accept_loss=bool(form["accept_loss"]),
        dry_run=form.dry_run,
    )
    lines = [
        line for each in found.operations for line in operation_lines(each, is_plan=form.dry_run)
    ]
    lines += [f"{each.subject} stays: {each.problem}" for each in found.busy]
    lines = lines or ["It has no open partition: it only gets no new ones."]
    if not form.dry_run:
        begun = counted(len(found.operations), "operation has", "operations have")
        lines.insert(0, f"{begun} begun; {form['broker']} stays cordoned.")
    return tuple(lines)


async def cordon(admin: Admin, form: Form) -> str:
    """Place no new partitions on a broker group."""
    await admin.cordon(form["broker"])
    return f"{form['broker']} gets no new partitions."


async def uncordon(admin: Admin, form: Form) -> str:
    """Place new partitions on a broker group again."""
    await admin.uncordon(form["broker"])
    return f"{form['broker']} may get partitions again."

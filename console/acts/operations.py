"""Changes of partitions: resize, grow, split, move, evacuate."""

from __future__ import annotations

from ...admin import Admin, OperationList, OperationView
from ...protocol.text import counted, listed
from ..page import href
from .act import (
    BROKER,
    PLAN_LINES_MAX,
    SUBJECT,
    Act,
    ActResult,
    Field,
    Values,
    broker_page,
    flag,
    number_of,
    numbers_of,
    subject_page,
)


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


def _operation_done(view: OperationView) -> ActResult:
    lines = operation_lines(view, is_plan=False)
    if view.operation_id:
        lines = (f"Operation {view.operation_id} has begun.", *lines)
    return ActResult(lines, href("subjects", view.subject))


def _list_lines(listed_operations: OperationList, *, is_plan: bool) -> tuple[str, ...]:
    lines = [
        line
        for each in listed_operations.operations
        for line in operation_lines(each, is_plan=is_plan)
    ]
    lines += [f"{each.subject} stays: {each.problem}" for each in listed_operations.busy]
    return tuple(lines) or ("It has no open partition: it only gets no new ones.",)


async def _resize(admin: Admin, values: Values) -> ActResult:
    return _operation_done(await admin.resize(values["subject"], number_of(values, "partitions")))


async def _plan_resize(admin: Admin, values: Values) -> tuple[str, ...]:
    view = await admin.resize(values["subject"], number_of(values, "partitions"), dry_run=True)
    return operation_lines(view, is_plan=True)


async def _grow(admin: Admin, values: Values) -> ActResult:
    return _operation_done(await admin.grow_subject(values["subject"], number_of(values, "queues")))


async def _plan_grow(admin: Admin, values: Values) -> tuple[str, ...]:
    view = await admin.grow_subject(values["subject"], number_of(values, "queues"), dry_run=True)
    return operation_lines(view, is_plan=True)


async def _move(admin: Admin, values: Values) -> ActResult:
    ids = numbers_of(values, "partitions")
    return _operation_done(await admin.move(ids, to=values.get("to", "")))


async def _plan_move(admin: Admin, values: Values) -> tuple[str, ...]:
    ids = numbers_of(values, "partitions")
    return operation_lines(
        await admin.move(ids, to=values.get("to", ""), dry_run=True), is_plan=True
    )


async def _split(admin: Admin, values: Values) -> ActResult:
    return _operation_done(await admin.split(number_of(values, "partition")))


async def _plan_split(admin: Admin, values: Values) -> tuple[str, ...]:
    view = await admin.split(number_of(values, "partition"), dry_run=True)
    return operation_lines(view, is_plan=True)


async def _cancel_operation(admin: Admin, values: Values) -> ActResult:
    view = await admin.cancel(number_of(values, "id"))
    return ActResult(
        (f"Operation {view.operation_id} is canceled.",), href("subjects", view.subject)
    )


def _evacuation(values: Values) -> dict[str, bool]:
    return {
        "without_source": bool(values.get("without_source")),
        "accept_loss": bool(values.get("accept_loss")),
    }


async def _evacuate(admin: Admin, values: Values) -> ActResult:
    found = await admin.evacuate(values["broker"], **_evacuation(values))
    begun = counted(len(found.operations), "operation has", "operations have")
    return ActResult(
        (
            f"{begun} begun; {values['broker']} stays cordoned.",
            *_list_lines(found, is_plan=False),
        ),
        broker_page(values),
    )


async def _plan_evacuate(admin: Admin, values: Values) -> tuple[str, ...]:
    found = await admin.evacuate(values["broker"], **_evacuation(values), dry_run=True)
    return _list_lines(found, is_plan=True)


async def _cordon(admin: Admin, values: Values) -> ActResult:
    await admin.cordon(values["broker"])
    return ActResult((f"{values['broker']} gets no new partitions.",), broker_page(values))


async def _uncordon(admin: Admin, values: Values) -> ActResult:
    await admin.uncordon(values["broker"])
    return ActResult((f"{values['broker']} may get partitions again.",), broker_page(values))


ACTS: dict[str, Act] = {
    "resize": Act(
        title="Resize",
        button="Resize",
        lead="Change the number of open partitions while the subject is in use. Every key keeps "
        "its order, and partitions whose range stays the same are kept.",
        fields=(
            SUBJECT,
            Field(
                name="partitions", label="Partitions, 1 to 1024", kind="number", is_required=True
            ),
        ),
        command=lambda values: [
            "subject",
            "resize",
            values.get("subject", ""),
            "--partitions",
            values.get("partitions", ""),
        ],
        plan=_plan_resize,
        do=_resize,
        back=subject_page,
    ),
    "grow": Act(
        title="Grow",
        button="Grow",
        lead="Split the widest logic queues until there are so many. A queue keeps its number, its "
        "offsets and the first half of its range.",
        fields=(SUBJECT, Field(name="queues", label="Queues", kind="number", is_required=True)),
        command=lambda values: [
            "subject",
            "grow",
            values.get("subject", ""),
            "--queues",
            values.get("queues", ""),
        ],
        plan=_plan_grow,
        do=_grow,
        back=subject_page,
    ),
    "move": Act(
        title="Move partitions",
        button="Move",
        lead="Continue open partitions on another broker group. What is stored stays where it is, "
        "and is read first.",
        fields=(
            SUBJECT,
            Field(
                name="partitions",
                label="Ids of open partitions",
                is_required=True,
                help="Numbers with spaces between them.",
            ),
            Field(name="to", label="Broker group to move to", is_required=True),
        ),
        command=lambda values: [
            "subject",
            "move",
            *values.get("partitions", "").replace(",", " ").split(),
            "--broker-group",
            values.get("to", ""),
        ],
        plan=_plan_move,
        do=_move,
        back=subject_page,
    ),
    "split": Act(
        title="Split a partition",
        button="Split",
        lead="Cut an open partition in the middle of its range.",
        fields=(Field(name="partition", label="Partition", kind="fixed", is_required=True),),
        command=lambda values: ["subject", "split", values.get("partition", "")],
        plan=_plan_split,
        do=_split,
        back=lambda _values: href("subjects"),
    ),
    "operation-cancel": Act(
        title="Cancel an operation",
        button="Cancel the operation",
        lead="An operation that has not begun to seal partitions can be canceled; later it can "
        "only be completed.",
        fields=(Field(name="id", label="Operation", kind="fixed", is_required=True),),
        command=lambda values: ["subject", "cancel", values.get("id", "")],
        do=_cancel_operation,
        back=lambda _values: href("subjects"),
    ),
    "cordon": Act(
        title="Cordon",
        button="Cordon",
        lead="It gets no new partitions, and keeps those that it has.",
        fields=(BROKER,),
        command=lambda values: ["broker", "cordon", values.get("broker", "")],
        do=_cordon,
        back=broker_page,
    ),
    "uncordon": Act(
        title="Uncordon",
        button="Uncordon",
        lead="New partitions may be placed on it again.",
        fields=(BROKER,),
        command=lambda values: ["broker", "uncordon", values.get("broker", "")],
        do=_uncordon,
        back=broker_page,
    ),
    "evacuate": Act(
        title="Evacuate",
        button="Evacuate",
        lead="Continue all its partitions, of every subject, on other broker groups, and give it "
        "no new ones until it is uncordoned.",
        fields=(
            BROKER,
            Field(
                name="without_source",
                label="The broker does not answer",
                kind="check",
                help="best_tried subjects continue; strict ones wait for its return.",
            ),
            Field(
                name="accept_loss",
                label="Its disk is lost for good",
                kind="check",
                help="Messages that only it had are given up.",
            ),
        ),
        command=lambda values: [
            "broker",
            "evacuate",
            values.get("broker", ""),
            *flag(values, "without_source", "--without-source"),
            *flag(values, "accept_loss", "--accept-loss"),
            "--yes",
        ],
        plan=_plan_evacuate,
        do=_evacuate,
        typed="broker",
        back=broker_page,
    ),
}

"""Creation, settings and deletion of subjects."""

from __future__ import annotations

from collections.abc import Mapping

from ...admin import Admin
from ...protocol.text import counted
from ..page import href
from .act import SUBJECT, Act, ActResult, Field, Values, flag, number_of, option, subject_page


async def _create_subject(admin: Admin, values: Values) -> ActResult:
    name = values.get("subject", "")
    view = await admin.create_subject(
        name,
        partitions=number_of(values, "partitions", 2),
        order_strategy=values.get("order_strategy", "strict"),
        retention=values.get("retention", "acked"),
        static=bool(values.get("static")),
    )
    partitions = counted(len(view.route.partitions), "partition")
    return ActResult((f"Subject {name} has {partitions}.",), href("subjects", name))


async def _set_subject(admin: Admin, values: Values) -> ActResult:
    order, retention = _settings(values)
    change = await admin.set_subject(values["subject"], order_strategy=order, retention=retention)
    return ActResult(_change_lines(change.before, change.after), subject_page(values))


async def _plan_set_subject(admin: Admin, values: Values) -> tuple[str, ...]:
    order, retention = _settings(values)
    change = await admin.set_subject(
        values["subject"], order_strategy=order, retention=retention, dry_run=True
    )
    return _change_lines(change.before, change.after)


def _settings(values: Values) -> tuple[str | None, str | None]:
    return values.get("order_strategy") or None, values.get("retention") or None


def _change_lines(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    changes = [
        f"{name.replace('_', ' ')}: {before[name]} → {value}"
        for name, value in after.items()
        if before[name] != value
    ]
    return tuple(changes) or ("Nothing changes.",)


async def _delete_subject(admin: Admin, values: Values) -> ActResult:
    deletion = await admin.delete_subject(values["subject"], force=bool(values.get("force")))
    left = counted(deletion.left, "partition")
    return ActResult(
        (
            f"{values['subject']} is deleted."
            if not deletion.left
            else f"{values['subject']} is being deleted: brokers have yet to drop {left}.",
        ),
        href("subjects"),
    )


ACTS: dict[str, Act] = {
    "subject-create": Act(
        title="Create a subject",
        button="Create",
        lead="A subject is what producers send to and consumers subscribe to.",
        fields=(
            Field(name="subject", label="Name", is_required=True),
            Field(name="partitions", label="Partitions", kind="number", default="4"),
            Field(
                name="order_strategy",
                label="Order",
                kind="select",
                options=("strict", "best_tried"),
                help="strict waits for a partition as long as it takes; best_tried uses another "
                "after some seconds, and says so.",
            ),
            Field(
                name="retention",
                label="A message is kept until",
                kind="select",
                options=("acked", "time"),
                help="acked: every group has handled it. time: it has reached its age.",
            ),
            Field(name="static", label="A fixed number of logic queues", kind="check"),
        ),
        command=lambda values: [
            "subject",
            "create",
            values.get("subject", ""),
            *option(
                "--queues" if values.get("static") else "--partitions",
                values.get("partitions", ""),
                2,
            ),
            *flag(values, "static", "--static"),
            *option("--order-strategy", values.get("order_strategy", ""), "strict"),
            *option("--retention", values.get("retention", ""), "acked"),
        ],
        do=_create_subject,
        back=lambda _values: href("subjects"),
    ),
    "subject-set": Act(
        title="Settings",
        button="Change",
        lead="Every open partition is continued by one with the new settings; stored messages keep "
        "those under which they were stored.",
        fields=(
            SUBJECT,
            Field(
                name="order_strategy",
                label="Order",
                kind="select",
                options=("", "strict", "best_tried"),
            ),
            Field(
                name="retention",
                label="A message is kept until",
                kind="select",
                options=("", "acked", "time"),
            ),
        ),
        command=lambda values: [
            "subject",
            "set",
            values.get("subject", ""),
            *option("--order-strategy", values.get("order_strategy", "")),
            *option("--retention", values.get("retention", "")),
        ],
        plan=_plan_set_subject,
        do=_set_subject,
        back=subject_page,
    ),
    "subject-delete": Act(
        title="Delete a subject",
        button="Delete",
        lead="Its messages and its consumer groups are gone for good.",
        fields=(
            SUBJECT,
            Field(name="force", label="Even with live consumers, which end", kind="check"),
        ),
        command=lambda values: [
            "subject",
            "delete",
            values.get("subject", ""),
            *flag(values, "force", "--force"),
            "--yes",
        ],
        do=_delete_subject,
        typed="subject",
        back=subject_page,
    ),
}

"""Changes of consumer groups: creation, suspension, reset, failure policy, deletion."""

from __future__ import annotations

from datetime import UTC, datetime

from ...admin import Admin, GroupReset
from ...protocol.errors import InvalidRequestError
from ...protocol.reading.instants import parse_ago_ms
from ...protocol.text import parse_number
from ..shown import count
from .act import (
    GROUP,
    PLAN_LINES_MAX,
    SUBJECT,
    Act,
    ActResult,
    Field,
    Values,
    flag,
    group_page,
    number_of,
    option,
    subject_page,
)

CLIENT = Field(
    name="client",
    label="Only consumers of this name",
    help="Empty: the whole group.",
)


def reset_lines(reset: GroupReset) -> tuple[str, ...]:
    """Return where a reset sets the cursors."""
    lines = [
        f"partition {each.partition_id}: "
        + (f"{count(each.before)} → " if each.before is not None else "")
        + count(each.cursor)
        for each in reset.cursors[:PLAN_LINES_MAX]
    ]
    if len(reset.cursors) > PLAN_LINES_MAX:
        lines.append(f"and {len(reset.cursors) - PLAN_LINES_MAX} more partitions")
    back = sum(max(0, (each.before or 0) - each.cursor) for each in reset.cursors)
    ahead = sum(max(0, each.cursor - (each.before or 0)) for each in reset.cursors)
    if reset.cursors and reset.cursors[0].before is not None:
        lines.insert(0, f"{count(back)} messages are handled again, {count(ahead)} are skipped")
    return tuple(lines)


async def _create_group(admin: Admin, values: Values) -> ActResult:
    await admin.create_group(
        values["subject"],
        values.get("group", ""),
        start=values.get("start") or "earliest",
        consume_strategy=values.get("strategy", "exclusive"),
    )
    return ActResult((f"Group {values['group']} is created.",), group_page(values))


async def _suspend(admin: Admin, values: Values) -> ActResult:
    client = values.get("client") or None
    await admin.suspend_group(values["subject"], values["group"], client=client)
    who = f"Consumers named {client}" if client else f"The consumers of {values['group']}"
    return ActResult((f"{who} release their partitions, and get none.",), group_page(values))


async def _resume(admin: Admin, values: Values) -> ActResult:
    client = values.get("client") or None
    await admin.resume_group(values["subject"], values["group"], client=client)
    who = f"Consumers named {client}" if client else f"The consumers of {values['group']}"
    return ActResult((f"{who} get partitions again.",), group_page(values))


def _reset_arguments(values: Values) -> dict[str, object]:
    """Return the arguments of `Admin.reset_group`. Raises InvalidRequestError."""
    text = values.get("to", "").strip()
    arguments: dict[str, object] = {"live": bool(values.get("live"))}
    if values.get("partition", "").strip():
        arguments["partition_id"] = number_of(values, "partition")
    if text in {"earliest", "latest"}:
        return arguments | {"to": text}
    offset = parse_number(text)
    if offset is not None:
        return arguments | {"to": "offset", "offset": offset}
    ago_ms = parse_ago_ms(text)
    if ago_ms is not None:
        return arguments | {"to": "time", "at_ms": number_of(values, "now_ms") - ago_ms}
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(
            "reset to earliest, latest, a time ago such as -1h, an ISO 8601 time, or an offset of "
            f"a partition, not to {text!r:.60}"
        ) from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return arguments | {"to": "time", "at_ms": int(at.timestamp() * 1000)}


async def _plan_reset(admin: Admin, values: Values) -> tuple[str, ...]:
    arguments = {**_reset_arguments(values), "live": False, "dry_run": True}
    return reset_lines(
        await admin.reset_group(values["subject"], values["group"], **arguments)  # type: ignore[arg-type]
    )


async def _reset(admin: Admin, values: Values) -> ActResult:
    reset = await admin.reset_group(
        values["subject"],
        values["group"],
        **_reset_arguments(values),  # type: ignore[arg-type]
    )
    return ActResult(("The cursors are set.", *reset_lines(reset)), group_page(values))


def _reset_command(values: Values) -> list[str]:
    return [
        "group",
        "reset",
        values.get("subject", ""),
        values.get("group", ""),
        *option("--to", values.get("to", "")),
        *option("--partition", values.get("partition", "")),
        *flag(values, "live", "--live"),
        "--yes",
    ]


async def _cancel_reset(admin: Admin, values: Values) -> ActResult:
    await admin.cancel_reset(values["subject"], values["group"])
    return ActResult(
        ("The reset is canceled: consumers continue where they were.",), group_page(values)
    )


async def _set_group(admin: Admin, values: Values) -> ActResult:
    tries = values.get("tries_max", "").strip()
    await admin.set_group(
        values["subject"],
        values["group"],
        on_failure=values.get("on_failure") or None,
        on_full=values.get("on_full") or None,
        tries_max=number_of(values, "tries_max") if tries else None,
        forget=bool(values.get("forget")),
    )
    return ActResult(
        ("The policy is stored; consumers follow it within a heartbeat.",), group_page(values)
    )


async def _delete_group(admin: Admin, values: Values) -> ActResult:
    deletion = await admin.delete_group(
        values["subject"], values["group"], force=bool(values.get("force"))
    )
    text = "is deleted" if not deletion.left else "is being deleted"
    return ActResult((f"Group {values['group']} {text}.",), subject_page(values))


ACTS: dict[str, Act] = {
    "group-create": Act(
        title="Create a consumer group",
        button="Create",
        lead="It gets every message from where it starts, also those that are sent before its "
        "first consumer runs.",
        fields=(
            SUBJECT,
            Field(name="group", label="Name", is_required=True),
            Field(
                name="start",
                label="Starts at",
                default="earliest",
                help="earliest, latest, a time ago such as -1h, or an ISO 8601 time.",
            ),
            Field(
                name="strategy", label="Strategy", kind="select", options=("exclusive", "shared")
            ),
        ),
        command=lambda values: [
            "group",
            "create",
            values.get("subject", ""),
            values.get("group", ""),
            *option("--start", values.get("start", ""), "earliest"),
            *option("--strategy", values.get("strategy", ""), "exclusive"),
        ],
        do=_create_group,
        back=subject_page,
    ),
    "group-suspend": Act(
        title="Suspend",
        button="Suspend",
        lead="Consumers release their partitions, and get none until they are resumed. They stay "
        "open; later ones are suspended too.",
        fields=(SUBJECT, GROUP, CLIENT),
        command=lambda values: [
            "group",
            "suspend",
            values.get("subject", ""),
            values.get("group", ""),
            *option("--client", values.get("client", "")),
        ],
        do=_suspend,
        back=group_page,
    ),
    "group-resume": Act(
        title="Resume",
        button="Resume",
        lead="Undo a suspension with the same name.",
        fields=(SUBJECT, GROUP, CLIENT),
        command=lambda values: [
            "group",
            "resume",
            values.get("subject", ""),
            values.get("group", ""),
            *option("--client", values.get("client", "")),
        ],
        do=_resume,
        back=group_page,
    ),
    "group-reset": Act(
        title="Reset",
        button="Reset",
        lead="Set where the group reads on. Messages before the new place that were not handled "
        "are skipped; those after it are handled again.",
        fields=(
            SUBJECT,
            GROUP,
            Field(
                name="to",
                label="To",
                is_required=True,
                default="earliest",
                help="earliest, latest, a time ago such as -1h, an ISO 8601 time, or an offset of "
                "one partition.",
            ),
            Field(name="partition", label="Only this partition", kind="number"),
            Field(
                name="live",
                label="Also with live consumers, which hand over their partitions",
                kind="check",
            ),
        ),
        command=_reset_command,
        plan=_plan_reset,
        do=_reset,
        typed="group",
        back=group_page,
    ),
    "reset-cancel": Act(
        title="Cancel the reset",
        button="Cancel the reset",
        lead="A reset that still waits for consumers to hand over can be canceled.",
        fields=(SUBJECT, GROUP),
        command=lambda values: [
            "group",
            "reset",
            values.get("subject", ""),
            values.get("group", ""),
            "--cancel",
        ],
        do=_cancel_reset,
        back=group_page,
    ),
    "group-set": Act(
        title="Failure policy",
        button="Store",
        lead="What the group does with a message that keeps failing. It overrides the settings in "
        "the consumers' code.",
        fields=(
            SUBJECT,
            GROUP,
            Field(
                name="on_failure",
                label="After the last try",
                kind="select",
                options=("", "block", "park", "dead"),
                help="block: its key waits for ever. park: its key is set aside, in order. dead: "
                "only the message is.",
            ),
            Field(name="tries_max", label="Tries", kind="number"),
            Field(
                name="on_full",
                label="If no more can be parked",
                kind="select",
                options=("", "block", "dead"),
            ),
            Field(name="forget", label="First forget the stored policy", kind="check"),
        ),
        command=lambda values: [
            "group",
            "set",
            values.get("subject", ""),
            values.get("group", ""),
            *option("--on-failure", values.get("on_failure", "")),
            *option("--tries-max", values.get("tries_max", "")),
            *option("--on-full", values.get("on_full", "")),
            *flag(values, "forget", "--forget"),
        ],
        do=_set_group,
        back=group_page,
    ),
    "group-delete": Act(
        title="Delete a consumer group",
        button="Delete",
        lead="Its progress is gone for good. A later group of this name starts at the first "
        "message that is still stored.",
        fields=(
            SUBJECT,
            GROUP,
            Field(name="force", label="Even with live consumers, which end", kind="check"),
        ),
        command=lambda values: [
            "group",
            "delete",
            values.get("subject", ""),
            values.get("group", ""),
            *flag(values, "force", "--force"),
            "--yes",
        ],
        do=_delete_group,
        typed="group",
        back=group_page,
    ),
}

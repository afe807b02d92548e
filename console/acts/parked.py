"""Changes of what a group has parked: redrive, skip, edit."""

from __future__ import annotations

from ...admin import Admin
from ...protocol.errors import InvalidRequestError
from ...protocol.text import counted
from ..shown import parse_hex
from .act import GROUP, SUBJECT, Act, ActResult, Field, Values, flag, group_page, number_of, option


def _parked_page(values: Values) -> str:
    return f"{group_page(values)}/parked"


def _selection(values: Values) -> dict[str, object]:
    """Return the arguments of `Admin` that select parked keys. Raises InvalidRequestError."""
    selected: dict[str, object] = {}
    if values.get("key_hex"):
        selected["key"] = parse_hex(values["key_hex"])
    elif values.get("no_key"):
        selected["key"] = b""
    elif values.get("dead"):
        selected["dead"] = True
    if values.get("partition", "").strip():
        selected["partition_id"] = number_of(values, "partition")
    if values.get("error"):
        selected["error"] = values["error"]
    return selected


def _selection_words(values: Values) -> list[str]:
    words = [values.get("subject", ""), values.get("group", "")]
    if values.get("key_hex"):
        words += ["--key-hex", values["key_hex"]]
    elif values.get("no_key"):
        words.append("--no-key")
    elif values.get("dead"):
        words.append("--dead")
    words += option("--partition", values.get("partition", ""))
    words += option("--error", values.get("error", ""))
    return words


async def _redrive(admin: Admin, values: Values) -> ActResult:
    views = await admin.redrive(
        values["subject"],
        values["group"],
        all=bool(values.get("all")),
        **_selection(values),  # type: ignore[arg-type]
    )
    messages = counted(sum(each.messages for each in views), "message")
    return ActResult(
        (f"{counted(len(views), 'key')} with {messages} will be handled again.",),
        _parked_page(values),
    )


async def _skip(admin: Admin, values: Values) -> ActResult:
    is_all = bool(values.get("all_messages"))
    skipped = await admin.skip(
        values["subject"],
        values["group"],
        first=None if is_all else number_of(values, "first", 1),
        **_selection(values),  # type: ignore[arg-type]
    )
    return ActResult(
        (f"{counted(skipped, 'message')} skipped: no consumer will get them.",),
        _parked_page(values),
    )


def _skip_command(values: Values) -> list[str]:
    first = (
        ["--all-messages"]
        if values.get("all_messages")
        else option("--first", values.get("first", ""), 1)
    )
    return ["parked", "skip", *_selection_words(values), *first, "--yes"]


async def _present_value(admin: Admin, values: Values) -> dict[str, str]:
    parked = await admin.parked_message(
        values["subject"],
        values["group"],
        number_of(values, "partition"),
        number_of(values, "offset"),
    )
    if parked.message is None:
        return {}
    try:
        return {"value": parked.message.value.decode()}
    except UnicodeDecodeError:
        raise InvalidRequestError(
            "the value is no text: edit it with keylane parked edit --value-file"
        ) from None


async def _edit(admin: Admin, values: Values) -> ActResult:
    await admin.edit_parked(
        values["subject"],
        values["group"],
        number_of(values, "partition"),
        number_of(values, "offset"),
        value=values.get("value", "").replace("\r\n", "\n").encode(),
    )
    return ActResult(
        ("The message is edited; redrive its key to have it handled.",), _parked_page(values)
    )


SELECTED = (
    Field(name="key_hex", label="Key, in hexadecimal", kind="fixed"),
    Field(name="no_key", label="Without a key", kind="fixed"),
    Field(name="dead", label="Dead letters", kind="fixed"),
    Field(name="partition", label="Only on this partition", kind="number"),
    Field(name="error", label="Only with this in the last error"),
)


ACTS: dict[str, Act] = {
    "redrive": Act(
        title="Redrive",
        button="Redrive",
        lead="Have parked messages handled again, oldest first. The key stays in order.",
        fields=(
            SUBJECT,
            GROUP,
            *SELECTED,
            Field(name="all", label="Every parked key", kind="check"),
        ),
        command=lambda values: [
            "parked",
            "redrive",
            *_selection_words(values),
            *flag(values, "all", "--all-keys"),
            "--yes",
        ],
        do=_redrive,
        back=_parked_page,
    ),
    "skip": Act(
        title="Skip parked messages",
        button="Skip",
        lead="No consumer will get these messages. They stay stored until retention removes them.",
        fields=(
            SUBJECT,
            GROUP,
            *SELECTED,
            Field(
                name="first",
                label="How many of each key, from the oldest on",
                kind="number",
                default="1",
            ),
            Field(name="all_messages", label="All that are parked now", kind="check"),
        ),
        command=_skip_command,
        do=_skip,
        typed="group",
        back=_parked_page,
    ),
    "edit": Act(
        title="Edit a parked message",
        button="Edit",
        lead="Consumers get the new value. The original stays in the log, and the key stays.",
        fields=(
            SUBJECT,
            GROUP,
            Field(name="partition", label="Partition", kind="fixed", is_required=True),
            Field(name="offset", label="Offset", kind="fixed", is_required=True),
            Field(name="value", label="New value, as text", kind="area"),
        ),
        command=lambda values: [
            "parked",
            "edit",
            values.get("subject", ""),
            values.get("group", ""),
            "--partition",
            values.get("partition", ""),
            "--offset",
            values.get("offset", ""),
            *(option("--value", values.get("value", "")) or ["--value", ""]),
        ],
        do=_edit,
        prefill=_present_value,
        back=_parked_page,
    ),
}

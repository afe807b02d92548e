"""Changes of what a group has parked: redrive, skip, edit."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from ...admin import Admin, OperationView
from ...protocol.errors import (
    InvalidRequestError,
    KeylaneError,
    NotFoundError,
    PartitionUnknownError,
    Reason,
)
from ...protocol.operations import OperationState
from ...protocol.text import counted
from ..shown import parse_hex
from .act import Form, Values, group_page, option


def parked_page(values: Values) -> str:
    """Return the page of the group's parked keys."""
    return f"{group_page(values)}/parked"


def _selection(form: Form) -> dict[str, Any]:
    """Return the arguments of `Admin` that select parked keys. Raises InvalidRequestError."""
    selected: dict[str, Any] = {"error": form.optional("error")}
    if form["key_hex"]:
        selected["key"] = parse_hex(form["key_hex"])
    elif form["no_key"]:
        selected["key"] = b""
    elif form["dead"]:
        selected["key"] = None
    if form["partition"].strip():
        selected["partition_id"] = form.number("partition")
    return selected


@asynccontextmanager
async def naming_replaced(
    admin: Admin, subject: str, partition_id: int | None
) -> AsyncGenerator[None, None]:
    """Say of a partition on which nothing is parked any more that an operation has replaced it, if
    one has.
    """
    try:
        yield
    except (NotFoundError, PartitionUnknownError) as error:
        if partition_id is None:
            raise
        operations: list[OperationView] = []
        with suppress(KeylaneError):  # the first error says more
            operations = await admin.list_operations(subject)
        replaced = replaced_error(operations, partition_id)
        if replaced is None:
            raise
        raise replaced from error


def replaced_error(operations: Iterable[OperationView], partition_id: int) -> NotFoundError | None:
    """Return the error for a partition that one of these operations has replaced; None if none
    has.
    """
    for each in operations:
        if partition_id in each.sealed and each.state in {
            OperationState.FENCE,
            OperationState.DONE,
        }:
            error = NotFoundError(
                Reason.PARKED_KEY_UNKNOWN,
                f"partition {partition_id} was replaced by operation {each.operation_id} "
                f"({each.kind}), and what was parked there is parked on the partitions that "
                "continue it",
            )
            error.hint = "Choose the key again among the group's parked keys."
            return error
    return None


async def redrive(admin: Admin, form: Form) -> str:
    """Have parked keys handled again."""
    selected = _selection(form)
    async with naming_replaced(admin, form["subject"], selected.get("partition_id")):
        views = await admin.redrive(
            form["subject"], form["group"], all=bool(form["all"]), **selected
        )
    messages = counted(sum(each.messages for each in views), "message")
    return f"{counted(len(views), 'key')} with {messages} will be handled again."


async def skip(admin: Admin, form: Form) -> str:
    """Have no consumer get parked messages."""
    first = None if form["all_messages"] else form.number("first", 1)
    selected = _selection(form)
    async with naming_replaced(admin, form["subject"], selected.get("partition_id")):
        skipped = await admin.skip(form["subject"], form["group"], first=first, **selected)
    return f"{counted(skipped, 'message')} skipped: no consumer will get them."


def skip_words(values: Values) -> list[str]:
    """Return the option for how many messages of each key."""
    if values.get("all_messages"):
        return ["--all-messages"]
    return option("--first", values.get("first", ""), "1")


async def present_value(admin: Admin, form: Form) -> dict[str, str]:
    """Return the value of a parked message, for the form that edits it."""
    place = form.number("partition"), form.number("offset")
    async with naming_replaced(admin, form["subject"], place[0]):
        parked = await admin.parked_message(form["subject"], form["group"], *place)
    if parked.message is None:
        return {}
    try:
        text = parked.message.value.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\r" in text or "\0" in text:  # a browser sends others instead
        raise InvalidRequestError(
            "the value is no text that a form keeps as it is: edit it with keylane parked edit "
            "--value-file"
        )
    return {"value": text}


async def edit(admin: Admin, form: Form) -> str:
    """Replace the value of a parked message."""
    place = form.number("partition"), form.number("offset")
    value = form["value"].replace("\r\n", "\n").encode()
    async with naming_replaced(admin, form["subject"], place[0]):
        await admin.edit_parked(form["subject"], form["group"], *place, value=value)
    return "The message is edited; redrive its key to have it handled."

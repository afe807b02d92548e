"""`keylane parked` show, skip and edit: the parked messages of a consumer group."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, NotRequired, TypedDict

from ....admin import Admin, ParkedMessage
from ....protocol.errors import ConfigError, NotFoundError, Reason
from ....protocol.text import counted, format_time
from ...confirmation import (
    confirm,
    handling_interrupts,
    leave_interrupt,
    require_confirmation,
)
from ...connection import open_admin
from ...message_json import MessageFields, message_fields
from ...options import OutputFormat, parse_headers
from ...screen import end_without, make_table, show_data, show_line, show_row, show_table
from .keys import from_reachable, list_views
from .selection import (
    SELECTORS,
    EditOptions,
    FailureFields,
    MessageOptions,
    Selection,
    SkipOptions,
    failure_fields,
    failure_text,
    key_text,
)

if TYPE_CHECKING:
    from rich.table import Table


EDITOR_DEFAULT = "vi"


def edit_in_editor(value: bytes) -> bytes | None:
    """
    Let the user edit a value in $VISUAL or $EDITOR. Return None if it was not changed.

    Raises:
        ConfigError: the value is not text, or the editor cannot be started or fails.
    """
    try:
        original = value.decode()
    except UnicodeDecodeError:
        raise ConfigError(
            "the value is not text: edit a file, and pass it with --value-file"
        ) from None
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or EDITOR_DEFAULT
    with tempfile.TemporaryDirectory(prefix="keylane-") as folder:
        path = Path(folder) / "value"
        path.write_bytes(value)
        try:
            process = subprocess.run([*shlex.split(command), str(path)], check=False)
        except (OSError, ValueError) as cause:
            raise ConfigError(f"the editor {command!r} cannot be started: {cause}") from None
        if process.returncode:
            error = ConfigError(
                f"the editor exited with status {process.returncode}: nothing was changed"
            )
            error.hint = "Run the command again, or pass the new value with --value-file."
            raise error
        edited_value = path.read_bytes()
    # Editors add a line end to the last line, which may not have had one.
    if not original.endswith("\n"):
        edited_value = edited_value.removesuffix(b"\n")
    return None if edited_value == value else edited_value


COLUMNS = ("partition#", "offset#", "sent at", "key", "value")
FAILURE_COLUMNS = ("tries#", "failed at", "last failure")
VALUE_CHARS_SHOWN = 100
SKIPPED_SHOWN = 10
"""Maximum number of messages shown before asking for confirmation."""


async def show_parked(
    meta: str, output: OutputFormat, subject: str, group: str, selection: Selection, *, first: int
) -> None:
    """Show the oldest parked messages of each selected key. The exit status is 1 if a partition
    could not be asked. Raises NotFoundError.
    """
    if not (selection.is_limited or selection.among_dead):
        raise ConfigError(f"select messages: {SELECTORS}")
    async with open_admin(meta) as admin:
        messages, unread = await from_reachable(
            admin,
            subject,
            group,
            selection,
            lambda chosen: _messages(admin, subject, group, chosen, first),
        )
        total = 0
        if output is OutputFormat.TABLE and len(messages) >= first and not unread:
            views = await list_views(admin, subject, group, selection)
            total = sum(view.messages for view in views)
    if output is not OutputFormat.TABLE:
        for each in messages:
            show_row(output, _fields(each))
    elif messages or not unread:
        count = counted(len(messages), "message")
        if total > len(messages):
            count = f"the first {len(messages)} of {counted(total, 'message')}"
        show_table(message_table(f"{_selection_text(selection)}: {count}", messages))
    end_without(unread)


class SkipResult(TypedDict):
    """How many messages were skipped, and on which partitions, as JSON."""

    partition_ids: list[int]
    skipped: int


async def skip_parked(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    selection: Selection,
    options: SkipOptions,
) -> None:
    """
    Skip parked messages of each selected key, after asking for confirmation.

    Raises:
        NotFoundError
        ConfigError: no key is selected, or the key is parked on several partitions and no partition
            is named.
    """
    if not (selection.is_limited or selection.among_dead):
        raise ConfigError(f"select messages: {SELECTORS}")
    first = options.count
    of_one_key = selection.key is not None or selection.key_hex is not None
    async with open_admin(meta) as admin:
        views = await list_views(admin, subject, group, selection)
        if of_one_key and not selection.among_dead and len(views) > 1:
            ids = ", ".join(str(view.partition_id) for view in views)
            raise ConfigError(f"it is parked on partitions {ids}: pass --partition")
        preview_count = SKIPPED_SHOWN if first is None else min(first, SKIPPED_SHOWN)
        preview = await _messages(admin, subject, group, selection, preview_count)
        if not views:  # parked only after they were listed
            raise NotFoundError(Reason.PARKED_KEY_UNKNOWN)
        count = sum(view.messages if first is None else min(first, view.messages) for view in views)
        skipped = 0
        if count:
            description = f"{counted(count, 'message')} of {_selection_text(selection)}"
            question = f"Skip {description}, which no consumer of {group} will handle?"
            require_confirmation(question, yes=options.yes)
            if output is OutputFormat.TABLE:
                shown = f" (the first {len(preview)})" * (count > len(preview))
                show_table(message_table(f"to skip: {description}{shown}", preview))
            confirm(question, yes=options.yes)
            skipped = await admin.skip(subject, group, **selection.arguments, first=first)
    partition_ids = sorted({view.partition_id for view in views})
    if output is not OutputFormat.TABLE:
        show_data(output, SkipResult(partition_ids=partition_ids, skipped=skipped))
    else:
        partitions_text = (
            f"partition{'s' if len(partition_ids) > 1 else ''} {', '.join(map(str, partition_ids))}"
        )
        show_line(f"{partitions_text}: {counted(skipped, 'message')} skipped")


def _selection_text(selection: Selection) -> str:
    """Describe the selected messages in a few words."""
    key = selection.selected_key()
    if isinstance(key, EllipsisType):
        return "dead letters" if selection.among_dead else "the selected keys"
    return f"dead letters of {key_text(key)}" if selection.among_dead and key else key_text(key)


async def edit_parked(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    options: MessageOptions,
    edit: EditOptions,
) -> None:
    """
    Replace the value or the properties of a parked message and show it as consumers will get it.

    Raises:
        ConfigError: there is nothing to change, or no message is named.
        InputError: the file cannot be read.
        Any error of `Admin.edit_parked`.
    """
    new_value, properties = edit.new_value, parse_headers(edit.header or ()) or None
    arguments = options.arguments
    async with open_admin(meta) as admin:
        if edit.in_editor:
            original = await admin.parked_message(subject, group, **arguments)
            assert original.message is not None
            with handling_interrupts(leave_interrupt):
                new_value = await asyncio.to_thread(edit_in_editor, original.message.value)
            if new_value is None and properties is None:
                show_line("not changed")
                return
            # The oldest message of the key may have changed in the meantime.
            arguments = {"partition_id": original.partition_id, "offset": original.offset}
        edited = await admin.edit_parked(
            subject, group, **arguments, value=new_value, properties=properties
        )
    if output is not OutputFormat.TABLE:
        show_data(output, _fields(edited))
    else:
        show_table(message_table("consumers will get", [edited]))


async def _messages(
    admin: Admin, subject: str, group: str, selection: Selection, first: int
) -> list[ParkedMessage]:
    messages = admin.parked_messages(subject, group, **selection.arguments, first=first)
    return [message async for message in messages]


def message_table(title: str, messages: Sequence[ParkedMessage]) -> Table:
    """Build a table with one parked message per row. Unordered messages have failures of their own;
    for unreadable messages, the reason is shown.
    """
    has_failures = any(each.failure is not None for each in messages)
    columns = (*COLUMNS, *FAILURE_COLUMNS) if has_failures else COLUMNS
    rows = ((*_row(each), *_failure(each)) if has_failures else _row(each) for each in messages)
    return make_table(title, columns, rows)


def _row(each: ParkedMessage) -> tuple[object, ...]:
    message = each.message
    if message is None:
        return each.partition_id, each.offset, None, None, f"({each.problem})"
    value = message.value[: 4 * VALUE_CHARS_SHOWN].decode(errors="backslashreplace")
    if len(value) > VALUE_CHARS_SHOWN or len(message.value) > 4 * VALUE_CHARS_SHOWN:
        value = f"{value[:VALUE_CHARS_SHOWN]}…"
    sent = format_time(message.sent_at_ns // 1_000_000)
    return each.partition_id, each.offset, sent, key_text(message.key), value


def _failure(each: ParkedMessage) -> tuple[object, ...]:
    failure = each.failure
    if failure is None:
        return None, None, None
    return failure.attempts, format_time(failure.at_ms), failure_text(failure)


class ParkedMessageFields(MessageFields):
    """A parked message, as JSON; a message that cannot be read has a problem, and no value."""

    failure: NotRequired[FailureFields]
    since_ms: NotRequired[int]
    problem: NotRequired[str]


def _fields(each: ParkedMessage) -> dict[str, object]:
    optional = {
        "failure": failure_fields(each.failure),
        "since_ms": each.since_ms,
        "problem": each.problem or None,
    }
    message: Mapping[str, object] = (
        {"partition_id": each.partition_id, "offset": each.offset, "key": None}
        if each.message is None
        else message_fields(each.message)
    )
    return {**message, **{name: value for name, value in optional.items() if value is not None}}

"""`keylane parked` show, skip and edit: the parked messages of a consumer group.

Lets the user edit a value in an editor.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING

from ....admin import Admin, ParkedMessage
from ....protocol.errors import ConfigError, NotFoundError, Reason
from ....protocol.scheduled.deliver_at import shown
from ....protocol.text import counted
from ...connection import open_admin
from ...message_json import message_json
from ...options import OutputFormat, headers_of
from ...screen import json_text, make_table, show_json, show_line, show_table
from .keys import selected
from .selection import (
    Change,
    ParkedPlace,
    Selection,
    Skipping,
    confirm,
    failure_facts,
    failure_text,
    key_text,
)

if TYPE_CHECKING:
    from rich.table import Table


EDITOR_DEFAULT = "vi"


def edited_text(value: bytes) -> bytes | None:
    """
    Let the user edit a value in $VISUAL or $EDITOR; return None if it was not changed.

    Raises:
        ConfigError: the value is no text, or the editor cannot be started, or ended with an error.
    """
    try:
        before = value.decode()
    except UnicodeDecodeError:
        raise ConfigError(
            "the value is not text: edit a file, and give it as --value-file"
        ) from None
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or EDITOR_DEFAULT
    with tempfile.TemporaryDirectory(prefix="keylane-") as folder:
        path = Path(folder) / "value"
        path.write_bytes(value)
        try:
            done = subprocess.run([*shlex.split(command), str(path)], check=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the editor {command!r} cannot be started: {error}") from None
        if done.returncode:
            raise ConfigError(
                f"the editor ended with status {done.returncode}: nothing was changed"
            )
        after = path.read_bytes()
    # Editors add an end to the last line, which may have had none.
    if not before.endswith("\n"):
        after = after.removesuffix(b"\n")
    return None if after == value else after


COLUMNS = ("partition#", "offset#", "sent at", "key", "value")
FAILURE_COLUMNS = ("tries#", "failed at", "last failure")
OPTIONS = "--key, --key-hex, --no-key, --dead, --older-than, --error or --partition"
VALUE_CHARS_SHOWN = 100
SKIPPED_SHOWN = 10
"""Number of messages that are shown before the question."""


async def show_parked(
    meta: str, output: OutputFormat, subject: str, group: str, selection: Selection, *, first: int
) -> None:
    """Show the oldest parked messages of each selected key; raise NotFoundError."""
    if not (selection.is_limited or selection.among_dead):
        raise ConfigError(f"say which messages: {OPTIONS}")
    async with open_admin(meta) as admin:
        messages = await _messages(admin, subject, group, selection, first)
        all_count = 0
        if output is not OutputFormat.JSON and len(messages) >= first:
            views = await selected(admin, subject, group, selection)
            all_count = sum(view.messages for view in views)
    if output is OutputFormat.JSON:
        for each in messages:
            _print_json(each)
        return
    count = counted(len(messages), "message")
    if all_count > len(messages):
        count = f"the first {len(messages)} of {counted(all_count, 'message')}"
    show_table(message_table(f"{_whose(selection)}: {count}", messages))


async def skip_parked(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    selection: Selection,
    skipping: Skipping,
) -> None:
    """
    Skip parked messages of each selected key, after asking.

    Raises:
        NotFoundError
        ConfigError: no key is selected, or a key is parked on two partitions and none is named.
    """
    if not (selection.is_limited or selection.among_dead):
        raise ConfigError(f"say which messages: {OPTIONS}")
    first = skipping.count
    of_one_key = selection.key is not None or selection.key_hex is not None
    async with open_admin(meta) as admin:
        views = await selected(admin, subject, group, selection)
        if of_one_key and not selection.among_dead and len(views) > 1:
            ids = ", ".join(str(view.partition_id) for view in views)
            raise ConfigError(f"it is parked on partitions {ids}: say --partition")
        few = SKIPPED_SHOWN if first is None else min(first, SKIPPED_SHOWN)
        lost = await _messages(admin, subject, group, selection, few)
        if not views:  # it was parked since
            raise NotFoundError(Reason.PARKED_KEY_UNKNOWN)
        count = sum(view.messages if first is None else min(first, view.messages) for view in views)
        skipped = 0
        if count:
            what = f"{counted(count, 'message')} of {_whose(selection)}"
            if output is OutputFormat.TABLE:
                title = f"{what}: no consumer of {group} will handle"
                all_shown = count <= len(lost)
                show_table(message_table(f"{title} these" if all_shown else title, lost))
            confirm(f"Skip {what}?", yes=skipping.yes)
            skipped = await admin.skip(subject, group, **selection.arguments, first=first)
    numbers = sorted({view.partition_id for view in views})
    if output is OutputFormat.JSON:
        where = {"partition_id": numbers[0]} if len(numbers) == 1 else {"partition_ids": numbers}
        show_json({**where, "skipped": skipped})
    else:
        which = f"partition{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        show_line(f"{which}: {counted(skipped, 'message')} skipped")


def _whose(selection: Selection) -> str:
    """Return a name for the selected messages, for people."""
    key = selection.wanted_key()
    if isinstance(key, EllipsisType):
        return "dead letters" if selection.among_dead else "the selected keys"
    return f"dead letters of {key_text(key)}" if selection.among_dead and key else key_text(key)


async def edit_parked(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    place: ParkedPlace,
    change: Change,
) -> None:
    """
    Replace the value or the properties of a parked message, and show it as consumers will get it.

    Raises:
        ConfigError: nothing is to be changed, or no message is named.
        InputError: the file cannot be read.
        The errors of `Admin.edit_parked`.
    """
    new, properties = change.new_value, headers_of(change.header or ()) or None
    arguments = place.arguments
    async with open_admin(meta) as admin:
        if change.in_editor:
            before = await admin.parked_message(subject, group, **arguments)
            assert before.message is not None
            new = await asyncio.to_thread(edited_text, before.message.value)
            if new is None and properties is None:
                show_line("not changed")
                return
            # Its key may have another oldest message by now.
            arguments = {"partition_id": before.partition_id, "offset": before.offset}
        edited = await admin.edit_parked(
            subject, group, **arguments, value=new, properties=properties
        )
    if output is OutputFormat.JSON:
        _print_json(edited)
    else:
        show_table(message_table("consumers will get", [edited]))


async def _messages(
    admin: Admin, subject: str, group: str, selection: Selection, first: int
) -> list[ParkedMessage]:
    messages = admin.parked_messages(subject, group, **selection.arguments, first=first)
    return [message async for message in messages]


def message_table(title: str, messages: Sequence[ParkedMessage]) -> Table:
    """Return a table with a parked message in each row, with its own failure if it has no order; an
    unreadable message has the reason.
    """
    fails = any(each.failure is not None for each in messages)
    columns = (*COLUMNS, *FAILURE_COLUMNS) if fails else COLUMNS
    rows = ((*_row(each), *_failure(each)) if fails else _row(each) for each in messages)
    return make_table(title, columns, rows)


def _row(each: ParkedMessage) -> tuple[object, ...]:
    message = each.message
    if message is None:
        return each.partition_id, each.offset, None, None, f"({each.problem})"
    value = message.value[: 4 * VALUE_CHARS_SHOWN].decode(errors="backslashreplace")
    if len(value) > VALUE_CHARS_SHOWN or len(message.value) > 4 * VALUE_CHARS_SHOWN:
        value = f"{value[:VALUE_CHARS_SHOWN]}…"
    sent = shown(message.sent_at_ns // 1_000_000)
    return each.partition_id, each.offset, sent, key_text(message.key), value


def _failure(each: ParkedMessage) -> tuple[object, ...]:
    failure = each.failure
    if failure is None:
        return None, None, None
    return failure.attempts, shown(failure.at_ms), failure_text(failure)


def _print_json(each: ParkedMessage) -> None:
    facts_or_none = {"failure": failure_facts(each.failure), "since_ms": each.since_ms}
    failed = {name: value for name, value in facts_or_none.items() if value is not None}
    if each.message is None:
        facts = {"partition_id": each.partition_id, "offset": each.offset, "problem": each.problem}
        show_line(json_text(facts | failed))
    else:
        show_line(message_json(each.message, failed))

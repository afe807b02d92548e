"""Deletes subjects and consumer groups: starts the deletion, and shows its progress.

The metaserver does the work even if the command is interrupted; repeating the command shows the
progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...admin import Admin, GroupDeletion, SubjectDeletion
from ...protocol.errors import SubjectDeletedError, SubjectUnknownError
from ...protocol.text import counted
from ..confirmation import confirm
from ..connection import open_admin
from ..options import OutputFormat
from ..screen import show_data, show_line
from ..status import showing

POLL_SECONDS = 0.1
Deletion = SubjectDeletion | GroupDeletion


async def delete(
    meta: str,
    output: OutputFormat,
    label: str,
    request_deletion: Callable[[Admin, int], Awaitable[Deletion]],
    *,
    wait: bool,
    question: Callable[[Admin], Awaitable[str]] | None = None,
) -> None:
    """
    Start a deletion and show its progress until it is done.

    Args:
        label: the name of the subject or group in the output.
        request_deletion: calls the admin client. Its second argument is the id returned by the
            previous call, initially 0.
        wait: return only after the deletion is done.
        question: returns what the user has to confirm first; "" if there is nothing to confirm.

    Raises:
        ConfigError: a question must be confirmed, and standard input is not a terminal.
    """
    last_problem = ""
    async with open_admin(meta) as admin:
        if question is not None:
            with showing(f"waiting for {meta}"):
                text = await question(admin)
            if text:
                confirm(text, yes=False, required=True)
        with showing(f"waiting for {meta}"):
            view = await request_deletion(admin, 0)
        with showing(lambda: _progress_text(label, view)):
            while wait and view.left:
                if output is OutputFormat.TABLE and view.problem != last_problem:
                    last_problem = view.problem
                    show_line(_progress_text(label, view))
                await asyncio.sleep(POLL_SECONDS)
                view = await request_deletion(admin, _deleted_id(view))
    if output is not OutputFormat.TABLE:
        show_data(output, view)
    else:
        show_line(_progress_text(label, view))


async def subject_question(admin: Admin, subject: str) -> str:
    """Return the question whether a subject is to be deleted, with what is deleted; "" if it does
    not exist, or is being deleted already.
    """
    try:
        description, groups = await asyncio.gather(
            admin.describe_subject(subject), admin.list_groups(subject)
        )
    except (SubjectUnknownError, SubjectDeletedError):
        return ""
    counts = [
        each.next_offset - each.first_offset
        for each in description.partitions
        if each.next_offset is not None and each.first_offset is not None
    ]
    at_least = "at least " * (len(counts) < len(description.partitions))
    messages, group_count = counted(sum(counts), "message"), counted(len(groups), "consumer group")
    return f"Delete subject {subject} with {at_least}{messages} and {group_count}?"


def _deleted_id(view: Deletion) -> int:
    return view.group_id if isinstance(view, GroupDeletion) else view.subject_id


def _progress_text(label: str, view: Deletion) -> str:
    if not view.left:
        return f"{label}: deleted"
    waiting = f"; waits: {view.problem}" if view.problem else ""
    return f"{label}: being deleted, {counted(view.left, 'partition')} left{waiting}"

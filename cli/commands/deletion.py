"""Confirms deletions of subjects and consumer groups on a terminal, begins them, and follows them.

The metaserver does the work, whether the command watches or not; repeat the command to see how far
it is.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import typer

from ...admin import Admin, GroupDeletion, SubjectDeletion
from ...protocol.text import counted
from ..connection import open_admin
from ..options import OutputFormat
from ..screen import show_json, show_line

POLL_SECONDS = 0.1
Deletion = SubjectDeletion | GroupDeletion


def asks(*, yes: bool) -> bool:
    """Return True if `confirm` will ask: on a terminal, without --yes."""
    return not yes and sys.stdin.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal, and exit with status 1 if the answer is no; do not ask elsewhere."""
    if asks(yes=yes):
        typer.confirm(question, abort=True, err=True)


async def delete(
    meta: str,
    output: OutputFormat,
    what: str,
    ask: Callable[[Admin, int], Awaitable[Deletion]],
    *,
    wait: bool,
) -> None:
    """
    Begin a deletion, and show its progress until it is done.

    Args:
        what: the name of the subject or the group, for people.
        ask: calls an admin client; its second argument is the id in the answer of the earlier call,
            or 0 at first.
        wait: return only when the deletion is done.
    """
    shown = ""
    async with open_admin(meta) as admin:
        view = await ask(admin, 0)
        while wait and view.left:
            if output is OutputFormat.TABLE and view.problem != shown:
                shown = view.problem
                show_line(_progress(what, view))
            await asyncio.sleep(POLL_SECONDS)
            view = await ask(admin, _id_of(view))
    if output is OutputFormat.JSON:
        show_json(view)
    else:
        show_line(_progress(what, view))


def _id_of(view: Deletion) -> int:
    return view.group_id if isinstance(view, GroupDeletion) else view.subject_id


def _progress(what: str, view: Deletion) -> str:
    if not view.left:
        return f"{what}: deleted"
    waits = f"; waits: {view.problem}" if view.problem else ""
    return f"{what}: being deleted, {counted(view.left, 'partition')} left{waits}"

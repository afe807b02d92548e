"""`keylane outbox purge`: which rows are deleted is said first, and asked on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial

from ....outbox import RowChange, purge_failed, purge_waiting
from ....protocol.errors import ConfigError
from ...options import OutputFormat
from ...screen import show_line
from ..deletion import confirm
from .rows import rows_of, show_change

Purge = Callable[..., Awaitable[RowChange]]
"""Deletes rows; with `dry_run=True` it only counts them."""


async def purge(
    database_url: str,
    output: OutputFormat,
    *,
    subject: str | None,
    force: bool,
    prefix: str,
    yes: bool,
) -> None:
    """Delete failed and refused rows.  Raises ConfigError: `force` is said, which is for waiting
    rows.
    """
    if force:
        raise ConfigError(
            "--force is for --waiting: failed and refused rows are deleted without it"
        )

    delete = partial(purge_failed, database_url, subject=subject, prefix=prefix)
    of = f" of {subject}" if subject else ""
    await _told_and_done(delete, output, f"{of} in {prefix}", yes=yes)


async def purge_unsent(
    meta: str,
    database_url: str,
    output: OutputFormat,
    *,
    subject: str | None,
    force: bool,
    prefix: str,
    yes: bool,
) -> None:
    """
    Delete rows of a subject that were never sent.

    Raises:
        ConfigError: no subject is named, or no terminal can be asked and `yes` is not said.
        ConflictError: the subject exists.
    """
    if not subject:
        raise ConfigError("--waiting needs --subject: rows of one subject are deleted")
    if not (yes or sys.stdin.isatty()):
        raise ConfigError("--waiting deletes messages that were never sent: say --yes")

    delete = partial(purge_waiting, meta, database_url, subject=subject, force=force, prefix=prefix)
    await _told_and_done(delete, output, f" of {subject} in {prefix}", yes=yes)


async def _told_and_done(delete: Purge, output: OutputFormat, where: str, *, yes: bool) -> None:
    doomed = await delete(dry_run=True)
    if doomed.rows:
        told = f"{rows_of(doomed)}{where}"
        if not yes and sys.stdin.isatty():
            confirm(f"Delete {told}?", yes=yes)
        else:
            show_line(f"deleting {told}", errors=True)
    show_change(output, await delete(), "is deleted", "are deleted")

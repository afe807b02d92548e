"""`keylane outbox`: the rows in a user's database that are waiting, have failed or were refused."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from ...protocol.address import META_DEFAULT
from ...protocol.errors import ConfigError
from ...protocol.text import counted, format_seconds, key_digest, printable
from ..answer import expand_options
from ..completion import complete_subject
from ..groups import CommandGroup
from ..options import MetaOption, OutputFormat, OutputOption, YesOption
from ..parameters import Option
from ..screen import make_table, run, show_data, show_line, show_table

if TYPE_CHECKING:
    from ...outbox import OutboxStatus, RowChange

SUBJECT_COLUMNS = (
    *("subject", "waiting#", "recorded#", "failed#", "halted#", "refused#", "oldest"),
)
ROW_COLUMNS = ("row#", "subject", "key", "why")

outbox_app = CommandGroup()


@dataclass(frozen=True, slots=True)
class OutboxOptions:
    """The options that select an outbox and its rows."""

    database_url: Annotated[
        str,
        Option(
            "--database-url",
            envvar="KEYLANE_OUTBOX_DATABASE_URL",
            metavar="URL",
            help="sqlite:///FILE, postgresql+asyncpg://…, mysql+asyncmy://… or any URL of "
            "SQLAlchemy. Put a URL with a password into the variable, because ps shows arguments.",
        ),
    ]
    subject: Annotated[
        str | None,
        Option(metavar="SUBJECT", help="Only the rows of this subject.", complete=complete_subject),
    ] = None
    prefix: Annotated[str, Option(metavar="NAME", help="Prefix of the tables' names.")] = (
        "keylane_outbox"
    )
    output: OutputOption = OutputFormat.TABLE

    def check_sqlite_file(self) -> None:
        """Reject a missing SQLite file, because SQLite would create an empty database if the name
        was mistyped.
        """
        scheme, _, path = self.database_url.partition(":///")
        path = path.partition("?")[0]
        if scheme.partition("+")[0] != "sqlite" or path in ("", ":memory:"):
            return
        if not path.startswith("file:") and not Path(path).exists():
            raise click.BadParameter(f"--database-url: there is no file {path}")

    def call(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Bind a function of `keylane.outbox` to the selected rows."""
        return partial(function, self.database_url, subject=self.subject, prefix=self.prefix)


# ── outbox status ─────────────────────────────────────────────────────────────────────────────────
@outbox_app.add("status", shows=".commands.outbox_status:StatusFields")
@expand_options
def outbox_status(*, options: OutboxOptions) -> None:
    """Show how many rows wait, the age of the oldest, why rows failed or were refused, and which
    process sends.
    """
    from ...outbox import outbox_status as read_status
    from .outbox_status import status_fields

    async def work() -> None:
        status = await options.call(read_status)()
        if options.output is not OutputFormat.TABLE:
            show_data(options.output, status_fields(status))
        else:
            _show_status(status, options.prefix)

    options.check_sqlite_file()
    run(options.output, work())


def _show_status(status: OutboxStatus, prefix: str) -> None:
    rows = [
        (
            each.subject,
            each.waiting,
            each.recorded,
            each.failed,
            each.halted,
            each.refused,
            format_seconds(each.oldest_age_ms),
        )
        for each in status.subjects
    ]
    show_table(make_table(f"{prefix}: {counted(status.rows, 'row')}", SUBJECT_COLUMNS, rows))
    _show_row_list(
        counted(status.failed, "failed row"),
        [(row.id, row.subject, row.key, row.failure) for row in status.failed_rows],
    )
    _show_row_list(
        counted(status.refused, "refused row"),
        [(row.id, row.subject, row.key, row.refusal) for row in status.refused_rows],
    )
    if not status.owner and not any(each.waiting + each.recorded for each in status.subjects):
        show_line("nothing is to be sent: an open outbox takes the lease when a message waits")
    elif not status.owner:
        show_line("no process sends: the lease is free")
    elif status.lease_left_ms:
        show_line(f"{printable(status.owner)} sends")
    else:
        show_line(
            f"{printable(status.owner)} has the lease, which has expired: any outbox can take it"
        )


def _show_row_list(title: str, row_list: list[tuple[int, str, bytes, str]]) -> None:
    rows = [
        (row_id, name, key_digest(key), printable(reason)) for row_id, name, key, reason in row_list
    ]
    if rows:
        show_table(make_table(f"{title}, the first {len(rows)}", ROW_COLUMNS, rows))


# ── outbox redrive ────────────────────────────────────────────────────────────────────────────────
@outbox_app.add("redrive", shows="..outbox:RowChange")
@expand_options
def outbox_redrive(*, options: OutboxOptions) -> None:
    """Send failed and refused rows again; a failed row that was stored is then stored twice."""
    from ...outbox import redrive_failed

    async def work() -> None:
        change = await options.call(redrive_failed)()
        _show_change(options.output, change, "waits again", "wait again")

    options.check_sqlite_file()
    run(options.output, work())


def _count_text(change: RowChange) -> str:
    """Format counts such as "1 failed row and 2 refused rows"; "0 rows" if there are none."""
    parts = [
        counted(count, f"{state} row")
        for state in change.__struct_fields__
        if (count := getattr(change, state))
    ]
    return " and ".join(parts) or "0 rows"


def _show_change(
    output: OutputFormat, change: RowChange, singular_verb: str, plural_verb: str
) -> None:
    if output is not OutputFormat.TABLE:
        show_data(output, change)
    else:
        show_line(f"{_count_text(change)} {singular_verb if change.rows == 1 else plural_verb}")


# ── outbox purge ──────────────────────────────────────────────────────────────────────────────────
@outbox_app.add("purge", shows="..outbox:RowChange")
@expand_options
def outbox_purge(
    *,
    options: OutboxOptions,
    waiting: Annotated[
        bool,
        Option(
            "--waiting", help="Delete rows that were never sent, of a subject that does not exist."
        ),
    ] = False,
    force: Annotated[
        bool, Option("--force", help="With --waiting: even if the subject exists.")
    ] = False,
    meta: MetaOption = META_DEFAULT,
    yes: YesOption = False,
) -> None:
    """
    Delete failed and refused rows, which lets newer rows of the same keys be sent.

    With --waiting, delete the waiting and halted rows of a deleted subject, which were never sent.
    The command first shows what it will delete, and asks on a terminal; without a terminal,
    --waiting needs --yes.
    """
    options.check_sqlite_file()
    run(options.output, _purge(options, meta, waiting=waiting, force=force, yes=yes))


def _select_purge(
    options: OutboxOptions, meta: str, *, waiting: bool, force: bool, yes: bool
) -> Callable[..., Awaitable[RowChange]]:
    from ...outbox import purge_failed, purge_waiting

    if not waiting:
        if force:
            raise ConfigError(
                "--force is for --waiting: failed and refused rows are deleted without it"
            )
        return options.call(purge_failed)
    if not options.subject:
        raise ConfigError("--waiting needs --subject: rows of one subject are deleted")
    if not (yes or sys.stdin.isatty()):
        raise ConfigError("--waiting deletes messages that were never sent: pass --yes to confirm")
    return partial(options.call(partial(purge_waiting, meta)), force=force)


async def _purge(
    options: OutboxOptions, meta: str, *, waiting: bool, force: bool, yes: bool
) -> None:
    """Count and show the rows before deleting them, asking for confirmation on a terminal."""
    from ..confirmation import confirm, will_ask

    purge = _select_purge(options, meta, waiting=waiting, force=force, yes=yes)
    change = await purge(dry_run=True)
    if change.rows:
        subject = f" of {options.subject}" if options.subject else ""
        description = f"{_count_text(change)}{subject} in {options.prefix}"
        if will_ask(yes=yes):
            confirm(f"Delete {description}?", yes=yes)
        else:
            show_line(f"deleting {description}", errors=True)
    _show_change(options.output, await purge(), "is deleted", "are deleted")

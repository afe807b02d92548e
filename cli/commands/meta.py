"""`keylane meta`: checks, rebuilds, backs up and migrates the metaserver's database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from ...protocol.text import counted
from ..answer import CommonOptions, expand_options
from ..groups import CommandGroup
from ..options import OutputFormat, OutputOption
from ..parameters import Argument, Option
from ..screen import make_table, run, show_line, show_table

if TYPE_CHECKING:
    from ...admin import Verification

meta_app = CommandGroup()
DataOption = Annotated[Path | None, Option(metavar="DIR", help="Folder of the embedded database.")]
UrlOption = Annotated[
    str | None,
    Option(
        metavar="URL",
        help="postgresql+asyncpg://…, instead of the embedded one. Do not give a password here, "
        "where ps shows it: without this option and --data, KEYLANE_METASERVER_DATABASE_URL is "
        "used.",
    ),
]


@meta_app.add("verify", shows="..admin:Verification")
@expand_options
def meta_verify(*, common: CommonOptions) -> None:
    """Compare the database with the brokers; exit status 1 if a check finds a violation."""
    verification = common.ask(lambda admin: admin.verify(), _show_verification)
    if not verification.ok:
        raise click.exceptions.Exit(1)


def _show_verification(verification: Verification) -> None:
    """Show a line for each check, followed by the violations."""
    rows = [
        (
            check.code,
            check.name,
            counted(check.violations_total, "violation") if check.violations_total else "ok",
            check.claim,
        )
        for check in verification.checks
    ]
    verb = "agree" if verification.ok else "differ"
    title = f"the database and the brokers {verb}"
    show_table(make_table(title, ("check", "name", "result", "claim"), rows))
    for check in verification.checks:
        for violation in check.violations:
            show_line(f"{check.code} {check.name}: {violation}")
        hidden = check.violations_total - len(check.violations)
        if hidden:
            show_line(f"{check.code} {check.name}: … and {hidden} more")


@meta_app.add("rebuild", shows=".commands.metaserver_database:RebuiltFields")
def meta_rebuild(
    *,
    broker: Annotated[
        list[str],
        Option(metavar="HOST:PORT", help="Address of a broker; repeat it for each broker."),
    ],
    data: DataOption = None,
    database_url: UrlOption = None,
    complete: Annotated[
        bool,
        Option(
            "--complete",
            help="These are all brokers: finish the creation of unused subjects, of which some "
            "partitions are on none of them.",
        ),
    ] = False,
    gone: Annotated[
        list[str] | None,
        Option(metavar="GROUP", help="A broker group that is lost; repeat it for each lost group."),
    ] = None,
    lose_unread: Annotated[
        bool,
        Option(
            "--lose-unread",
            help="Give up messages on lost broker groups that consumer groups may not have read.",
        ),
    ] = False,
    access_from: Annotated[
        str | None,
        Option(
            metavar="BACKUP|DIR|URL",
            envvar="KEYLANE_ACCESS_FROM",
            help="Take tokens, grants and quotas, which brokers do not store, from a file of "
            "keylane meta backup, or from another database: its folder or its URL.",
        ),
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Fill an empty database with what the brokers store: routes, groups, tokens. Then start the
    metaserver.
    """
    from .metaserver_database import rebuild

    options = {"complete": complete, "gone": gone or [], "lose_unread": lose_unread}
    rebuilding = rebuild(
        data, database_url, output, brokers=broker, options=options, access_from=access_from
    )
    run(output, rebuilding)


@meta_app.add("backup", shows="..metaserver.backup.file:BackupHead")
def meta_backup(
    *,
    file: Annotated[Path, Argument(metavar="FILE", help="New file.")],
    data: DataOption = None,
    database_url: UrlOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Write a consistent backup of the database to a file; metaservers may keep running."""
    from .metaserver_database import backup

    run(output, backup(data, database_url, file, output))


@meta_app.add("restore", shows=".commands.metaserver_database:RestoredDatabase")
def meta_restore(
    *,
    file: Annotated[Path, Argument(metavar="FILE", help="File of keylane meta backup.")],
    data: DataOption = None,
    database_url: UrlOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Fill an empty database, SQLite or PostgreSQL, from a backup. Then start the metaserver."""
    from .metaserver_database import restore

    run(output, restore(data, database_url, file, output))


@meta_app.add("migrate", shows=".commands.metaserver_database:MigratedDatabase")
def meta_migrate(
    data: DataOption = None,
    database_url: UrlOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Bring the database's schema up to date. A metaserver does the same when it starts."""
    from .metaserver_database import migrate

    run(output, migrate(data, database_url, output))

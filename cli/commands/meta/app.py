"""`keylane meta`: the options and help of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...answer import Answer, expanded
from ...options import OutputFormat, OutputOption

meta_app = typer.Typer(no_args_is_help=True, help="Look after the metaserver's database.")
DataOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the embedded database.")
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="postgresql+asyncpg://…, instead of the embedded one.  A password does not belong "
        "here, where ps shows it: "
        "without this option and --data, KEYLANE_METASERVER_DATABASE_URL counts.",
    ),
]


@meta_app.command("verify")
@expanded
def meta_verify(*, answer: Answer) -> None:
    """Compare the database with the brokers; exit status 1 if a check finds a violation."""
    from .verify import verify_cluster

    answer.run(verify_cluster)


@meta_app.command("rebuild")
def meta_rebuild(
    *,
    broker: Annotated[
        list[str], typer.Option(metavar="HOST:PORT", help="A broker; repeat it for every one.")
    ],
    data: DataOption = None,
    database_url: UrlOption = None,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="These are all brokers: finish the creation of unused subjects "
            "of which some partitions are on none of them.",
        ),
    ] = False,
    gone: Annotated[
        list[str] | None,
        typer.Option(metavar="GROUP", help="A broker group that is gone; repeat it for every one."),
    ] = None,
    lose_unread: Annotated[
        bool,
        typer.Option(
            "--lose-unread",
            help="Give up messages on gone broker groups that consumer groups may not have read.",
        ),
    ] = False,
    access_from: Annotated[
        str | None,
        typer.Option(
            metavar="BACKUP|DIR|URL",
            envvar="KEYLANE_ACCESS_FROM",
            help="Take tokens, grants and quotas, which brokers do not keep, from a file of "
            "keylane meta backup, or from "
            "another database: its folder or its URL.",
        ),
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Fill an empty database with what the brokers keep: routes, groups, tokens.  Then start the
    metaserver.
    """
    from ...screen import run
    from .database import rebuild

    options = {"complete": complete, "gone": gone or [], "lose_unread": lose_unread}
    rebuilding = rebuild(
        data, database_url, output, brokers=broker, options=options, access_from=access_from
    )
    run(output, rebuilding)


@meta_app.command("backup")
def meta_backup(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file.")],
    data: DataOption = None,
    database_url: UrlOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Write all rows of the database to a file, as of one instant; metaservers may run
    meanwhile.
    """
    from ...screen import run
    from .backup import backup

    run(output, backup(data, database_url, file, output))


@meta_app.command("restore")
def meta_restore(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Written by keylane meta backup.")],
    data: DataOption = None,
    database_url: UrlOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Fill an empty database, SQLite or PostgreSQL, from a backup.  Then start the metaserver."""
    from ...screen import run
    from .backup import restore

    run(output, restore(data, database_url, file, output))


@meta_app.command("migrate")
def meta_migrate(
    data: DataOption = None,
    database_url: UrlOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Bring the database's schema up to date.  A metaserver does the same when it starts."""
    from ...screen import run
    from .database import migrate

    run(output, migrate(data, database_url, output))

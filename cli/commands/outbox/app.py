"""`keylane outbox`: the options and help of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...options import META_DEFAULT, MetaOption, OutputFormat, OutputOption, YesOption

outbox_app = typer.Typer(
    no_args_is_help=True, help="Look at the outbox in a user's database, and at what is not sent."
)


def _check_file(url: str) -> None:
    """Refuse the file of SQLite that is missing: SQLite would make an empty one, of a misspelt name
    too.
    """
    scheme, _, path = url.partition(":///")
    path = path.partition("?")[0]
    if scheme.partition("+")[0] != "sqlite" or path in ("", ":memory:") or path.startswith("file:"):
        return
    if not Path(path).exists():
        raise typer.BadParameter(f"--database-url: there is no file {path}")


DatabaseOption = Annotated[
    str,
    typer.Option(
        "--database-url",
        envvar="KEYLANE_OUTBOX_DATABASE_URL",
        metavar="URL",
        help="sqlite:///FILE, postgresql+asyncpg://…, mysql+asyncmy://… or any URL of SQLAlchemy; "
        "one with a password rather "
        "in the variable, because ps shows arguments.",
    ),
]
PrefixOption = Annotated[
    str, typer.Option(metavar="NAME", help="The first letters of the names of the tables.")
]
SubjectOption = Annotated[
    str | None, typer.Option(metavar="SUBJECT", help="Only the rows of this subject.")
]
PREFIX = "keylane_outbox"


@outbox_app.command("status")
def outbox_status(
    *,
    database_url: DatabaseOption,
    subject: SubjectOption = None,
    prefix: PrefixOption = PREFIX,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show how many rows wait, the oldest age, failed and refused rows with the reason, and which
    process sends.
    """
    from ...screen import run
    from .rows import show_status

    _check_file(database_url)
    run(output, show_status(database_url, output, subject=subject, prefix=prefix))


@outbox_app.command("redrive")
def outbox_redrive(
    *,
    database_url: DatabaseOption,
    subject: SubjectOption = None,
    prefix: PrefixOption = PREFIX,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Send failed and refused rows again; a failed row that was stored is then stored twice."""
    from ...screen import run
    from .rows import redrive

    _check_file(database_url)
    run(output, redrive(database_url, output, subject=subject, prefix=prefix))


@outbox_app.command("purge")
def outbox_purge(
    *,
    database_url: DatabaseOption,
    subject: SubjectOption = None,
    waiting: Annotated[
        bool,
        typer.Option("--waiting", help="Rows never sent, of a subject that does not exist."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --waiting: also of a subject that exists.")
    ] = False,
    meta: MetaOption = META_DEFAULT,
    prefix: PrefixOption = PREFIX,
    yes: YesOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """
    Delete failed and refused rows, and let newer rows of the keys of failed ones be sent.

    With --waiting delete the rows of a deleted subject that were never sent: waiting and halted
    ones.  It says first what is deleted, and asks on a terminal; elsewhere --waiting needs --yes.
    """
    from ...screen import run
    from .purging import purge, purge_unsent

    _check_file(database_url)
    if waiting:
        run(
            output,
            purge_unsent(
                meta,
                database_url,
                output,
                subject=subject,
                force=force,
                prefix=prefix,
                yes=yes,
            ),
        )
    else:
        run(
            output,
            purge(database_url, output, subject=subject, force=force, prefix=prefix, yes=yes),
        )

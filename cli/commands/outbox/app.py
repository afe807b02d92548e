"""`keylane outbox`: the options and help of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ...options import OutputFormat, OutputOption

outbox_app = typer.Typer(
    no_args_is_help=True, help="Look at the outbox in a user's database, and at its failed rows."
)
DatabaseOption = Annotated[
    str,
    typer.Option(
        "--database-url",
        envvar="KEYLANE_OUTBOX_DATABASE_URL",
        metavar="URL",
        help="sqlite:///FILE, postgresql+asyncpg://…, mysql+asyncmy://… or any URL of SQLAlchemy.",
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
    """Show how many rows wait, the oldest age, failed rows with the reason, and which process sends."""
    from ...screen import run
    from .rows import show_status

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

    run(output, redrive(database_url, output, subject=subject, prefix=prefix))


@outbox_app.command("purge")
def outbox_purge(
    *,
    database_url: DatabaseOption,
    subject: SubjectOption = None,
    prefix: PrefixOption = PREFIX,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Delete failed and refused rows, and let newer rows of the keys of failed ones be sent."""
    from ...screen import run
    from .rows import purge

    run(output, purge(database_url, output, subject=subject, prefix=prefix))

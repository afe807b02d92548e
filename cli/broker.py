"""`keylane broker`: look at a broker, and into its data folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import OutputFormat, OutputOption

broker_app = typer.Typer(no_args_is_help=True, help="Look at brokers and into their data folders.")

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Data folder of a broker that does not run now.")
]


@broker_app.command("verify")
def broker_verify(folder: FolderArgument, output: OutputOption = OutputFormat.TABLE) -> None:
    """Check every byte of a data folder, and change none.  Exit status 1 if anything is wrong."""
    from .broker_folder import verify_folder

    verify_folder(folder, output)


@broker_app.command("dump")
def broker_dump(
    folder: FolderArgument,
    *,
    partition: Annotated[int | None, typer.Option(help="Only this partition, by id.")] = None,
    start: Annotated[
        int, typer.Option("--from", help="First log position; with --partition, first offset.")
    ] = 0,
    limit: Annotated[int, typer.Option(help="How many records.")] = 100,
    messages: Annotated[
        bool, typer.Option("--messages", help="Show keys and values as well.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Print the records of a data folder, oldest first."""
    from .broker_folder import dump_folder

    dump_folder(folder, output, partition=partition, start=start, limit=limit, messages=messages)


@broker_app.command("health")
def broker_health(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the broker.")],
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show whether a broker takes writes, and why not.  Exit status 1 if it does not."""
    from .broker_health import show_health
    from .screen import run

    run(output, show_health(address, output))

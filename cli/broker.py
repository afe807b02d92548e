"""`keylane broker`: look at a broker, and into its data folder."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import OutputFormat, OutputOption

broker_app = typer.Typer(no_args_is_help=True, help="Look at brokers and into their data folders.")


@broker_app.command("health")
def broker_health(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the broker.")],
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show whether a broker takes writes, and why not.  Exit status 1 if it does not."""
    from .broker_health import show_health
    from .screen import run

    run(output, show_health(address, output))

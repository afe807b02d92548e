"""`keylane broker health`: whether a broker takes writes."""

from __future__ import annotations

import typer

from ....admin import Admin
from ...options import OutputFormat
from ...screen import make_table, show_json, show_table


async def show_health(address: str, output: OutputFormat) -> None:
    """
    Show a broker's health; exit status 1 if it is not ready: it takes no writes, or is refused by the metaserver.

    Raises:
        ConfigError, NotSentError
        InvalidRequestError: another program than a broker answers there.
    """
    async with Admin(address) as admin:  # it asks no metaserver
        health = await admin.broker_health(address)
    if output is OutputFormat.JSON:
        show_json(health)
    else:
        title = "takes writes" if health.ready else f"not ready: {health.reason}"
        rows = [(name.replace("_", " "), value) for name, value in sorted(health.details.items())]
        show_table(make_table(f"broker at {address}: {title}", ("", "now#"), rows))
    if not health.ready:
        raise typer.Exit(1)

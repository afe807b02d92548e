"""`keylane broker health`: shows whether a broker accepts writes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import typer

from ....protocol.address import addresses_of
from ....protocol.control import Health
from ....protocol.endpoints import READY
from ....protocol.errors import ConfigError, ForeignServerError
from ....protocol.scheduled.deliver_at import shown
from ....rpc.http_network import client_network
from ....rpc.metaservers import of_program
from ...options import OutputFormat
from ...screen import make_table, show_json, show_table

TIMEOUT_MS = 5_000
TIMES = {"next_ms": "next at"}
"""Fields that are times in milliseconds since 1970, with their names in a table."""


async def show_health(address: str, output: OutputFormat) -> None:
    """
    Show a broker's health; the exit status is 1 if it accepts no writes, or the metaserver refuses
    it.

    Raises:
        ConfigError, NotSentError
        ForeignServerError, InvalidRequestError: the program that answers is no broker.
    """
    health = await _ask_health(address)
    if output is OutputFormat.JSON:
        show_json(health)
    else:
        title = "takes writes" if health.ready else f"not ready: {health.reason}"
        rows = health_rows(health.details)
        show_table(make_table(f"broker at {address}: {title}", ("", "now"), rows))
    if not health.ready:
        raise typer.Exit(1)


def health_rows(details: Mapping[str, object]) -> list[tuple[str, str | None]]:
    """Return the rows of a table: one for each value, for each value of a group, and for each
    element of a list.
    """
    rows: list[tuple[str, str | None]] = []
    for name, value in sorted(details.items()):
        label = name.replace("_", " ")
        if isinstance(value, Mapping) and value:
            for part, each in value.items():
                known = TIMES.get(str(part))
                rows.append((f"{label}: {known or str(part).replace('_', ' ')}", _cell(part, each)))
        elif isinstance(value, list | tuple) and value:
            rows += [(label, shown_value(each)) for each in value]
        else:
            rows.append((label, shown_value(value)))
    return rows


def _cell(name: object, value: object) -> str | None:
    if name in TIMES and isinstance(value, int):
        return shown(value)
    return shown_value(value) or None


def shown_value(value: object) -> str | None:
    """Return a JSON value as a cell of a table, in words and numbers; None is shown as a dash."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        named = [_named(str(name), each) for name, each in value.items()]
        return ", ".join(named) or "none"
    if isinstance(value, list | tuple):
        return "; ".join(shown_value(each) or "-" for each in value) or "none"
    return None if value is None else str(value)


def _named(name: str, value: object) -> str:
    if name in TIMES and isinstance(value, int):
        return f"{TIMES[name]}: {shown(value)}"
    return f"{TIMES.get(name, name.replace('_', ' '))}: {shown_value(value) or '-'}"


async def _ask_health(address: str) -> Health:
    """Ask the broker itself, which needs neither a token nor a metaserver."""
    addresses = addresses_of(address)
    if len(addresses) > 1:
        raise ConfigError(f"give the address of one broker, not {address!r:.80}")
    network = client_network()
    try:
        text, _date = await network.text(
            addresses[0], READY.path, timeout_ms=TIMEOUT_MS, statuses=(200, 503)
        )
    finally:
        await network.close()
    try:
        health = msgspec.json.decode(text, type=Health)
    except msgspec.MsgspecError as error:
        raise ForeignServerError(
            f"{address} answered GET {READY.path}, but not as a keylane server: {error}",
            address=address,
        ) from error
    return of_program("broker", addresses[0], health)

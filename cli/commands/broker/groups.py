"""`keylane broker` list, cordon, uncordon, accept: broker groups as the metaserver knows them.

`keylane broker health`: shows whether a broker accepts writes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import typer

from ....protocol.address import addresses_of
from ....protocol.control import Health
from ....protocol.endpoints import READY
from ....protocol.errors import ConfigError, ForeignServerError
from ....protocol.membership.views import BrokerView, RefusedBroker
from ....protocol.scheduled.deliver_at import shown
from ....rpc.http_network import client_network
from ....rpc.metaservers import check_program
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table


async def list_brokers(meta: str, output: OutputFormat) -> None:
    """Show every broker group that has ever reported itself."""
    async with open_admin(meta) as admin:
        listed = await admin.list_brokers()
    if output is OutputFormat.JSON:
        show_json(listed.brokers)
        for refused in listed.refused:
            show_line(_refused(refused), errors=True)
        return
    rows = [
        (
            broker.broker_group,
            broker.address,
            broker.state,
            _new_partitions(broker),
        )
        for broker in listed.brokers
    ]
    title = "broker groups" if rows else "no broker has reported itself yet"
    show_table(make_table(title, ("broker group", "address", "state", "new partitions"), rows))
    for refused in listed.refused:
        show_line(_refused(refused))


def _refused(broker: RefusedBroker) -> str:
    advice = f"; {broker.advice}" if broker.advice else ""
    return f"{broker.broker_group} at {broker.address} is refused: {broker.problem}{advice}"


def _new_partitions(broker: BrokerView) -> str:
    if broker.gets_partitions:
        return "gets some"
    return "gets none: cordoned" if broker.cordoned else "gets none"


def _given_up(copy: RefusedBroker) -> str:
    return (
        f"its log ends at position {copy.log_end}; at the group's last report it ended at "
        f"{copy.known_log_end}: messages that were stored between the two are given up"
    )


def show_cordon(view: BrokerView) -> None:
    """Show whether a broker group gets new partitions."""
    new = "no" if view.cordoned else "its share of"
    show_line(f"{view.broker_group} gets {new} new partitions")


def show_accepted(accepted: RefusedBroker, *, dry_run: bool) -> None:
    """Show that a broker serves with an outdated data folder, and what is given up."""
    what = "would continue" if dry_run else "continues"
    show_line(
        f"{accepted.broker_group} {what} with the data folder at {accepted.address}, which was "
        "refused:"
    )
    show_line(accepted.problem)
    show_line(_given_up(accepted))


async def show_outdated(meta: str, *, group: str, address: str) -> None:
    """Show what would be given up if an outdated data folder were accepted, before the question;
    change nothing.
    """
    async with open_admin(meta) as admin:
        copy = await admin.accept_folder(group, address=address, dry_run=True)
    show_line(f"{copy.problem}; {_given_up(copy)}", errors=True)


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
    return check_program("broker", addresses[0], health)

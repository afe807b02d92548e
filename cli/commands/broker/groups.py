"""`keylane broker` list, cordon, uncordon and accept, which query the metaserver, and health, which
queries the broker.
"""

from __future__ import annotations

from collections.abc import Mapping

import click

from ....protocol.address import parse_addresses
from ....protocol.control import Health
from ....protocol.errors import ConfigError
from ....protocol.membership.views import BrokerView, RefusedBroker
from ....protocol.text import format_time
from ....rpc.http_network import client_network
from ....rpc.metaservers import check_program
from ...connection import open_admin
from ...health import fetch_health
from ...options import OutputFormat
from ...screen import make_table, show_data, show_line, show_table


async def list_brokers(meta: str, output: OutputFormat) -> None:
    """Show every broker group that has ever sent a report."""
    async with open_admin(meta) as admin:
        broker_list = await admin.list_brokers()
    if output is not OutputFormat.TABLE:
        show_data(output, broker_list.brokers)
        for refused in broker_list.refused:
            show_line(_refused_text(refused), errors=True)
        return
    rows = [
        (
            broker.broker_group,
            broker.address,
            broker.state,
            _new_partitions_text(broker),
            broker.folders_text,
        )
        for broker in broker_list.brokers
    ]
    title = "broker groups" if rows else "no broker has reported itself yet"
    columns = ("broker group", "address", "state", "new partitions", "data folders")
    show_table(make_table(title, columns, rows))
    for refused in broker_list.refused:
        show_line(_refused_text(refused))


def _refused_text(broker: RefusedBroker) -> str:
    advice = f"; {broker.advice}" if broker.advice else ""
    return f"{broker.broker_group} at {broker.address} is refused: {broker.problem}{advice}"


def _new_partitions_text(broker: BrokerView) -> str:
    if broker.gets_partitions:
        return "gets some"
    return "gets none: cordoned" if broker.cordoned else "gets none"


def _loss_text(copy: RefusedBroker) -> str:
    return (
        f"its log ends at position {copy.log_end}; at the group's last report it ended at "
        f"{copy.known_log_end}: messages that were stored between the two are given up"
    )


def show_cordon(view: BrokerView) -> None:
    """Show whether a broker group gets new partitions."""
    amount = "no" if view.cordoned else "its share of"
    show_line(f"{view.broker_group} gets {amount} new partitions")


def show_accepted(accepted: RefusedBroker, *, dry_run: bool) -> None:
    """Show that a broker may serve an outdated data folder, and which messages are given up."""
    verb = "would continue" if dry_run else "continues"
    show_line(
        f"{accepted.broker_group} {verb} with the data folder at {accepted.address}, which was "
        "refused:"
    )
    show_line(accepted.problem)
    show_line(_loss_text(accepted))


async def show_outdated(meta: str, *, group: str, address: str) -> None:
    """Show, before the user confirms, what accepting an outdated data folder would give up."""
    async with open_admin(meta) as admin:
        copy = await admin.accept_folder(group, address=address, dry_run=True)
    show_line(f"{copy.problem}; {_loss_text(copy)}", errors=True)


TIME_LABELS = {"next_ms": "next at"}
"""Maps each field that contains a time in milliseconds since 1970 to its label in a table."""


async def show_health(address: str, output: OutputFormat) -> None:
    """
    Show a broker's health. Exit with status 1 if it accepts no writes or the metaserver refuses it.

    Raises:
        ConfigError, NotSentError
        ForeignServerError, InvalidRequestError: the server at the address is not a broker.
    """
    health = await fetch_broker_health(address)
    if output is not OutputFormat.TABLE:
        show_data(output, health)
    else:
        title = "takes writes" if health.ready else f"not ready: {health.reason}"
        rows = health_rows(health.details)
        show_table(make_table(f"broker at {address}: {title}", ("", "now"), rows))
    if not health.ready:
        raise click.exceptions.Exit(1)


def health_rows(details: Mapping[str, object]) -> list[tuple[str, str | None]]:
    """Return table rows of a label and a value. Mappings and lists become one row per element."""
    rows: list[tuple[str, str | None]] = []
    for name, value in sorted(details.items()):
        label = name.replace("_", " ")
        if isinstance(value, Mapping) and value:
            for key, element in value.items():
                key_label = TIME_LABELS.get(str(key), str(key).replace("_", " "))
                rows.append((f"{label}: {key_label}", _format_cell(key, element)))
        elif isinstance(value, list | tuple) and value:
            rows += [(label, format_value(each)) for each in value]
        else:
            rows.append((label, format_value(value)))
    return rows


def _format_cell(name: object, value: object) -> str | None:
    if name in TIME_LABELS and isinstance(value, int):
        return format_time(value)
    return format_value(value) or None


def format_value(value: object) -> str | None:
    """Format a JSON value as a table cell, in words and numbers. None is shown as a dash."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(_format_field(str(name), each) for name, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return "; ".join(format_value(each) or "-" for each in value) or "none"
    return None if value is None else str(value)


def _format_field(name: str, value: object) -> str:
    if name in TIME_LABELS and isinstance(value, int):
        return f"{TIME_LABELS[name]}: {format_time(value)}"
    return f"{TIME_LABELS.get(name, name.replace('_', ' '))}: {format_value(value) or '-'}"


async def fetch_broker_health(address: str) -> Health:
    """Fetch the health from the broker itself, which needs neither a token nor a metaserver."""
    addresses = parse_addresses(address)
    if len(addresses) > 1:
        raise ConfigError(f"give the address of one broker, not {address!r:.80}")
    network = client_network()
    try:
        health = await fetch_health(network, addresses[0])
    finally:
        await network.close()
    return check_program("broker", addresses[0], health)

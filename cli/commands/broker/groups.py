"""`keylane broker list`, `cordon`, `uncordon`, `accept`: broker groups as the metaserver sees them."""

from __future__ import annotations

import msgspec

from ....protocol.control import AcceptFolder, BrokerView, RefusedBroker
from ....protocol.ids import check_name
from ....protocol.operations import Cordon
from ...connection import connect
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table


async def list_brokers(meta: str, form: OutputFormat) -> None:
    """Show every broker group that ever reported itself."""
    async with connect(meta) as (client, _network):
        health = await client.health()
    found = msgspec.convert(health.details.get("brokers", []), list[BrokerView])
    refused = msgspec.convert(health.details.get("refused", []), list[RefusedBroker])
    if form is OutputFormat.JSON:
        show_json(found)
        for one in refused:
            show_line(f"{one.broker_group} at {one.address}: {one.problem}", errors=True)
        return
    rows = [
        (
            one.broker_group,
            one.address,
            "available" if one.available else f"silent for {one.silent_ms / 1000:.0f} s",
            "gets none" if one.cordoned else "gets some",
        )
        for one in found
    ]
    title = "broker groups" if rows else "no broker has reported itself yet"
    show_table(make_table(title, ("broker group", "address", "state", "new partitions"), rows))
    for one in refused:
        show_line(f"{one.broker_group} at {one.address} is refused: {one.problem}")


async def cordon(meta: str, form: OutputFormat, *, group: str, cordoned: bool) -> None:
    """Keep a broker group from new partitions, or let it have some again, and say so."""
    check_name("broker group", group)
    async with connect(meta) as (client, _network):
        view = await client.cordon(group, Cordon(cordoned=cordoned))
    if form is OutputFormat.JSON:
        show_json(view)
        return
    show_line(f"{group} gets {'no' if view.cordoned else 'its share of'} new partitions")


async def accept(meta: str, form: OutputFormat, *, group: str, address: str, dry_run: bool) -> None:
    """Go on with a copy of a broker group's data folder that is behind, and say what that gives up."""
    check_name("broker group", group)
    async with connect(meta) as (client, _network):
        found = await client.accept_folder(group, AcceptFolder(address=address, dry_run=dry_run))
    if form is OutputFormat.JSON:
        show_json(found)
        return
    what = "would go on" if dry_run else "goes on"
    show_line(f"{group} {what} with the data folder at {found.address}, which was refused:")
    show_line(found.problem)
    show_line(
        f"its log ends at position {found.log_end}; at the group's last report it was "
        f"{found.known_log_end}: what was stored between them is given up"
    )

"""`keylane broker` list, cordon, uncordon, accept: broker groups as the metaserver sees them."""

from __future__ import annotations

from ....protocol.membership.broker_views import BrokerView, RefusedBroker
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table


async def list_brokers(meta: str, output: OutputFormat) -> None:
    """Show every broker group that ever reported itself."""
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


async def cordon(meta: str, output: OutputFormat, *, group: str, cordoned: bool) -> None:
    """Keep a broker group from new partitions, or let it have some again, and say so."""
    async with open_admin(meta) as admin:
        view = await (admin.cordon(group) if cordoned else admin.uncordon(group))
    if output is OutputFormat.JSON:
        show_json(view)
        return
    show_line(f"{group} gets {'no' if view.cordoned else 'its share of'} new partitions")


async def accept(
    meta: str, output: OutputFormat, *, group: str, address: str, dry_run: bool
) -> None:
    """Let a broker serve whose data folder is behind, and say what that gives up."""
    async with open_admin(meta) as admin:
        accepted = await admin.accept_folder(group, address=address, dry_run=dry_run)
    if output is OutputFormat.JSON:
        show_json(accepted)
        return
    what = "would continue" if dry_run else "continues"
    show_line(f"{group} {what} with the data folder at {accepted.address}, which was refused:")
    show_line(accepted.problem)
    show_line(_given_up(accepted))


def _given_up(copy: RefusedBroker) -> str:
    return (
        f"its log ends at position {copy.log_end}; at the group's last report it ended at "
        f"{copy.known_log_end}: what was stored between them is given up"
    )


async def show_behind(meta: str, *, group: str, address: str) -> None:
    """Show what would be given up if a data folder that is behind was accepted, for the question;
    changes nothing.
    """
    async with open_admin(meta) as admin:
        copy = await admin.accept_folder(group, address=address, dry_run=True)
    show_line(f"{copy.problem}; {_given_up(copy)}", errors=True)

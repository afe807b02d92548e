"""`keylane broker` list, cordon, uncordon, accept: broker groups as the metaserver knows them."""

from __future__ import annotations

from ....protocol.membership.views import BrokerView, RefusedBroker
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

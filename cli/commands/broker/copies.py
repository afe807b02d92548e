"""`keylane broker copies`: which copies of a data folder acks wait for, as a metaserver stores it,
and how far each copy is behind, as the broker says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from ....admin import Admin, CopySet, HandedOver, Health
from ....protocol.errors import ConfigError, KeylaneError, NotSentError
from ....protocol.text import counted, listed
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import make_table, show_data, show_line, show_table
from ...status import showing
from .groups import fetch_broker_health


class CopyView(Struct, frozen=True, kw_only=True):
    """A copy of the data folder of a broker group."""

    copy_id: str
    in_set: bool
    """True if acks wait for it."""
    bytes_behind: int | None = None
    """How many bytes of the broker's durable log it lacks; None if the broker does not know it, or
    cannot be asked.
    """
    machine: str = ""
    zone: str = ""
    shared_machine: str = ""
    """A sentence with whom it shares its machine; "" if with none, or that is allowed."""


class CopiesView(Struct, frozen=True, kw_only=True):
    """The copies of the data folder of a broker group."""

    broker_group: str
    wanted: int
    """How many data folders the group is to have, with the broker's own."""
    least: int
    """How many of them must have a message before it is acked."""
    acks_wait_for: int
    """How many copies are in the set."""
    copies: tuple[CopyView, ...]
    """The copies of the set, and those that have asked the broker in the last minute."""
    promoted: str
    """The copy that was promoted last; "" once a broker has asked which copies count since."""
    term: int
    """How often a copy was promoted."""
    version: int
    """How often the set was changed."""
    may_share_machine: bool
    """True if copies on one machine may count."""
    machine: str
    """The machine of the broker."""
    zone: str
    quarantine: str
    """The reason why no copy takes the broker's place, and the set does not change; "" if there is
    none.
    """
    broker_problem: str
    """The reason why the broker could not be asked; "" if it was."""


async def show_copies(
    meta: str,
    output: OutputFormat,
    *,
    group: str,
    wanted: int | None,
    least: int | None = None,
    allow_one_machine: bool | None = None,
    end_quarantine: bool = False,
) -> None:
    """
    Show the copies of a broker group, after setting how many folders there are to be, and whether
    copies on one machine may count, or ending a quarantine, if these are given.

    Raises:
        ConfigError: `least` is given without `wanted`.
        NotFoundError, InvalidRequestError
    """
    if least is not None and wanted is None:
        raise ConfigError("--least goes with --wanted")
    with showing(f"waiting for {meta}"):
        async with open_admin(meta) as admin:
            stored = await admin.copies(group)
            if wanted is not None or allow_one_machine is not None or end_quarantine:
                stored = await admin.set_copies(
                    group,
                    wanted or stored.wanted,
                    least=least if wanted else stored.least,
                    may_share_machine=allow_one_machine,
                    end_quarantine=end_quarantine,
                )
            details, problem = await _ask_broker(admin, group)
    view = join_copies(group, stored, details, problem)
    if output is not OutputFormat.TABLE:
        show_data(output, view)
        return
    title = title_of(view)
    if view.copies:
        columns = ("copy", "in the set", "bytes behind#", "zone", "machine")
        show_table(make_table(title, columns, rows_of(view)))
    else:
        show_line(title)
    for line in advice_lines(view):
        show_line(line)


def show_set(stored: CopySet) -> None:
    """Show which copies acks wait for."""
    show_line(f"acks wait for {listed(stored.members)}")


def show_handed_over(done: HandedOver) -> None:
    """Show which copy has the broker's place."""
    show_line(
        f"copy {done.copy_id} has the place of the broker of group {done.broker_group}, which took "
        f"no messages for {done.paused_ms} ms before that; the broker becomes a copy if it runs "
        "with failover"
    )


async def _ask_broker(admin: Admin, group: str) -> tuple[Mapping[str, Any], str]:
    """Return what the broker of a group says of itself, and the reason why it says nothing."""
    try:
        for broker in (await admin.list_brokers()).brokers:
            if broker.broker_group == group:
                health = await fetch_broker_health(broker.address)
                return check_group(health, group, broker.address), ""
        raise NotSentError(f"no metaserver knows the broker of group {group}")
    except KeylaneError as error:
        return {}, error.message


def check_group(health: Health, group: str, address: str) -> Mapping[str, Any]:
    """Return the details of a health. Raises NotSentError if it is not that of the broker."""
    found = health.details.get("broker_group")
    if found != group:
        raise NotSentError(f"the broker at {address} is one of group {found}, not of {group}")
    return health.details


def join_copies(
    group: str, stored: CopySet, details: Mapping[str, Any], problem: str = ""
) -> CopiesView:
    """
    Join what a metaserver and the broker know: first the copies of the set, then the others.

    Args:
        details: those of the broker's health.
    """
    known = details.get("copies", {})
    others = sorted(known.keys() - set(stored.members))
    return CopiesView(
        broker_group=group,
        wanted=stored.wanted,
        least=stored.least,
        acks_wait_for=len(stored.members),
        copies=tuple(
            msgspec.convert(
                {**known.get(each, {}), "copy_id": each, "in_set": each in stored.members}, CopyView
            )
            for each in (*sorted(stored.members), *others)
        ),
        promoted=stored.promoted,
        term=stored.term,
        version=stored.version,
        may_share_machine=stored.may_share_machine,
        machine=details.get("machine", ""),
        zone=details.get("zone", ""),
        quarantine=stored.quarantine,
        broker_problem=problem,
    )


def title_of(view: CopiesView) -> str:
    """Return how many folders there are to be, and how many copies acks wait for."""
    waits_for = counted(view.acks_wait_for, "copy", "copies") if view.acks_wait_for else "no copy"
    folders = counted(view.wanted, "data folder")
    least = f", of which {view.least} must have a message" if view.least > 1 else ""
    zone = f" in zone {view.zone}" if view.zone else ""
    where = f"; the broker is on machine {view.machine}{zone}" if view.machine else ""
    return f"{view.broker_group} is to have {folders}{least}; acks wait for {waits_for}{where}"


def rows_of(view: CopiesView) -> list[tuple[str | None, ...]]:
    """Return a table row for each copy."""
    return [
        (
            each.copy_id,
            "yes" if each.in_set else "no",
            _lag(each, view),
            each.zone or None,
            each.machine or None,
        )
        for each in view.copies
    ]


def _lag(copy: CopyView, view: CopiesView) -> str | None:
    if copy.bytes_behind is not None:
        return str(copy.bytes_behind)
    return None if view.broker_problem else "not heard lately"


def advice_lines(view: CopiesView) -> list[str]:
    """Return what an operator should know or do."""
    lines: list[str] = []
    if view.quarantine:
        lines.append(
            "No copy takes the broker's place, and the set does not change, until the broker "
            f"serves and all copies that it counts follow it: {view.quarantine}. If one of them is "
            "gone for good, and none has taken the broker's place unnoticed: keylane broker copies "
            f"{view.broker_group} --end-quarantine"
        )
    if view.broker_problem:
        lines.append(
            "The broker cannot be asked how far its copies are behind, so only the set is shown: "
            f"{view.broker_problem}"
        )
    is_quiet = not (view.promoted or view.quarantine)
    if view.broker_problem and view.acks_wait_for and is_quiet:
        lines.append(
            "A copy of the set takes the broker's place by itself if it runs with failover; the "
            "log of its follower says what keeps it from that."
        )
    if view.promoted and view.broker_problem:
        lines.append(
            f"The copy {view.promoted} was promoted. If no broker serves it yet, start one on its "
            f"folder, with --group {view.broker_group}."
        )
    lines += [
        f"{sentence[:1].upper()}{sentence[1:]}."
        for each in view.copies
        if (sentence := each.shared_machine)
    ]
    if any(each.shared_machine for each in view.copies):
        lines.append(
            "Run a follower on another machine; or let copies on one machine count: keylane broker "
            f"copies {view.broker_group} --allow-one-machine"
        )
    if missing := max(0, view.wanted - 1 - view.acks_wait_for):
        lines.append(
            f"Acks wait for fewer copies than wanted: {counted(missing, 'copy', 'copies')} too "
            "few. Does a follower run (keylane broker run --group "
            f"{view.broker_group} --follow true)? Is its copy behind? A copy joins when it has "
            "everything; one that was too late joins again after 1 to 20 s, the longer the more "
            "often it was."
        )
    if 1 + view.acks_wait_for < view.least:
        lines.append(
            f"Nothing is acked until {view.least} data folders have everything. If fewer are to "
            f"do: keylane broker copies {view.broker_group} --wanted {view.wanted} "
            f"--least {1 + view.acks_wait_for}"
        )
    return lines

"""Plans which broker groups hand over to a copy on another host, so that no host serves many more
broker groups than another. Pure.

    A host serves at most one broker group more than another that has a copy of one of its groups,
    directly or over a third host.

Invariants
    A broker group is handed over at most once, to a copy of its set.
    Nothing is planned while a set lacks a copy: a hand-over makes a copy of the broker before, and
    that one has to join again first.
    The same input always results in the same plan. A plan for the result of a plan is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...protocol.control import Health
from ...protocol.ids import BrokerGroup
from ...protocol.operations import BalanceHandOver


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMaster:
    """A broker group that is served."""

    broker_group: BrokerGroup
    host: str
    """The host that serves it."""
    copies: Mapping[str, str]
    """By host, the copy of the set there. Copies whose host is not known are left out."""
    is_complete: bool = True
    """True if as many data folders as wanted have everything."""


def place_master(
    broker_group: BrokerGroup, address: str, health: Health, *, is_complete: bool
) -> PlacedMaster:
    """Return where a broker group is served, and where its copies are, as its broker says."""
    copies: Mapping[str, Mapping[str, object]] = health.details.get("copies", {})
    return PlacedMaster(
        broker_group=broker_group,
        host=_host(health.details) or address.rpartition(":")[0],
        copies={
            host: copy_id
            for copy_id, view in sorted(copies.items())
            if view.get("in_set") and (host := _host(view))
        },
        is_complete=is_complete,
    )


def _host(place: Mapping[str, object]) -> str:
    """Return the name of the host that a broker or a copy says it is on; "" if it does not."""
    return str(place.get("machine", ""))


def plan_masters(masters: Iterable[PlacedMaster]) -> list[BalanceHandOver]:
    """Return the hand-overs that balance the hosts, the first one first."""
    by_group = {master.broker_group: master for master in masters}
    if not all(master.is_complete for master in by_group.values()):
        return []
    places = {group: by_group[group].host for group in sorted(by_group)}
    hosts = {host for each in by_group.values() for host in (each.host, *each.copies)}
    loads = Counter(dict.fromkeys(sorted(hosts), 0))
    loads.update(places.values())
    reasons: dict[BrokerGroup, str] = {}
    while steps := _find_steps(by_group, places, loads):
        source, target = places[steps[0][0]], steps[-1][1]
        reason = f"{source} serves {loads[source]} broker groups, {target} {loads[target]}"
        loads[source] -= 1
        loads[target] += 1
        for group, host in steps:
            places[group] = host
            reasons.setdefault(group, reason)
    return [
        BalanceHandOver(
            broker_group=group,
            copy_id=by_group[group].copies[places[group]],
            source=by_group[group].host,
            target=places[group],
            reason=reason,
        )
        for group, reason in reasons.items()
        if places[group] != by_group[group].host
    ]


def _find_steps(
    masters: Mapping[BrokerGroup, PlacedMaster],
    places: Mapping[BrokerGroup, str],
    loads: Counter[str],
) -> list[tuple[BrokerGroup, str]]:
    """Return the fewest hand-overs, each a broker group with its next host, after which a host
    serves one group less, and another one that serves at least two less than it one more. Empty if
    there are none.
    """
    for source, load in sorted(loads.items(), key=lambda each: (-each[1], each[0])):
        reached: dict[str, list[tuple[BrokerGroup, str]]] = {source: []}
        waiting = [source]
        for host in waiting:
            for group, place in places.items():
                if place != host:
                    continue
                master = masters[group]
                nexts = {*master.copies, master.host} - reached.keys()
                for target in sorted(nexts, key=lambda each: (loads[each], each)):
                    reached[target] = [*reached[host], (group, target)]
                    waiting.append(target)
        targets = [host for host in reached if loads[host] <= load - 2]
        if targets:
            return reached[min(targets, key=lambda each: (len(reached[each]), loads[each], each))]
    return []

"""Decides which copies may count by where they run. Pure.

    places of the broker and its copies ─▶ sharing: copies on a machine with the broker or another
                                        ─▶ best, improved: first no shared machine, then most zones

Invariants
    A copy whose machine is not known shares it with no other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Site(NamedTuple):
    """Where the process runs that has a data folder; "" if it does not say."""

    machine: str = ""
    zone: str = ""


NOWHERE = Site()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a broker and its copies run."""

    broker: Site = NOWHERE
    copies: Mapping[str, Site] = field(default_factory=dict)
    """By copy, where it runs."""
    may_share_machine: bool = False
    """True if copies on one machine may count."""

    def neighbour(self, copy_id: str, members: Collection[str]) -> str:
        """Return with which folder a copy shares its machine, for display: that of the broker, or
        of a member; "" if with none.
        """
        machine = self.copies.get(copy_id, NOWHERE).machine
        if not machine:
            return ""
        if machine == self.broker.machine:
            return "the broker"
        for each in sorted(members):
            if each != copy_id and self.copies.get(each, NOWHERE).machine == machine:
                return f"the copy {each}"
        return ""

    def sharing(self, members: Collection[str]) -> frozenset[str]:
        """Return the members without which no two folders would be on one machine."""
        ordered = sorted(members)
        return frozenset(
            each for index, each in enumerate(ordered) if self.neighbour(each, ordered[:index])
        )

    def best(self, candidates: Collection[str], members: frozenset[str]) -> str | None:
        """Return the candidate that had best be added to the members; None if none may be."""
        allowed = [each for each in candidates if self._may_join(each, members)]
        return min(allowed, key=lambda each: (self._cost(members | {each}), each), default=None)

    def improved(self, members: frozenset[str], candidates: Collection[str]) -> frozenset[str]:
        """Return the members, with one of them replaced if a candidate has a better place. While a
        member has not said where it runs, they are left as they are.
        """
        best = members
        if not members <= self.copies.keys():
            return best
        for leaving in sorted(members):
            others = members - {leaving}
            joining = self.best(candidates, others)
            if joining is not None and self._cost(others | {joining}) < self._cost(best):
                best = others | {joining}
        return best

    def _may_join(self, copy_id: str, members: frozenset[str]) -> bool:
        return self.may_share_machine or not self.neighbour(copy_id, members)

    def _cost(self, members: frozenset[str]) -> tuple[int, int]:
        """Return how many folders share a machine, and how many share a zone: the fewer, the
        better.
        """
        zones = {self.broker.zone, *(self.copies.get(each, NOWHERE).zone for each in members)}
        return len(self.sharing(members)), 1 + len(members) - len(zones)

"""Units that an index has no room for: the log has them, so they wait in memory, where readers find them.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .interface import FIND_UNITS_MAX, Unit


class End(NamedTuple):
    """The end of a partition."""

    next_offset: int
    position: int
    last_ms: int


class WaitingUnits:
    """One thread adds, many read; what was written is forgotten with the whole object."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Unit]] = []
        self.new: set[int] = set()
        """Partitions of which the index has nothing yet."""
        self._of: dict[int, list[Unit]] = {}

    def add(self, rows: Sequence[tuple[int, Unit]], new: set[int]) -> None:
        """They follow what is here."""
        self.rows += rows
        self.new |= new
        for partition_id, unit in rows:
            self._of.setdefault(partition_id, []).append(unit)

    def of(self, partition_id: int) -> Sequence[Unit]:
        """A partition's units."""
        return self._of.get(partition_id, ())

    def ids(self) -> list[int]:
        """Partitions that have units here."""
        return list(self._of)

    def end(self, partition_id: int) -> End | None:
        """The end of a partition that has units here."""
        units = self._of.get(partition_id)
        if not units:
            return None
        return End(units[-1].next_offset, units[-1].position, units[-1].appended_at_ms)


def more(
    found: list[Unit], units: Sequence[Unit], offset: int, *, end: int, bytes_max: int
) -> None:
    """Add the units from the one that holds `offset` on to what a `find` has, within its limits."""
    left = bytes_max - sum(unit.length for unit in found)
    for unit in units:
        if unit.next_offset <= offset:
            continue
        if unit.base_offset >= end or (found and unit.length > left):
            return
        if len(found) == FIND_UNITS_MAX:
            return
        found.append(unit)
        left -= unit.length

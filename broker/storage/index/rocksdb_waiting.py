"""Units that a full disk keeps out of the index. They wait in memory, where readers find them.
Pure.
"""

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
    """The waiting units. One thread adds, and many read. When the units are written, the object is
    replaced.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, Unit]] = []
        self.new: set[int] = set()
        """The partitions of which the index has no unit."""
        self._of: dict[int, list[Unit]] = {}

    def add(self, rows: Sequence[tuple[int, Unit]], new: set[int]) -> None:
        """Add units; each must come after those already waiting for its partition."""
        self.rows += rows
        self.new |= new
        for partition_id, unit in rows:
            self._of.setdefault(partition_id, []).append(unit)

    def of(self, partition_id: int) -> Sequence[Unit]:
        """Return the waiting units of a partition."""
        return self._of.get(partition_id, ())

    def ids(self) -> list[int]:
        """Return the partitions that have waiting units."""
        return list(self._of)

    def end(self, partition_id: int) -> End | None:
        """Return the end of a partition that has waiting units, or None for other partitions."""
        units = self._of.get(partition_id)
        if not units:
            return None
        return End(units[-1].next_offset, units[-1].position, units[-1].appended_at_ms)


def more(
    batches: list[Unit], units: Sequence[Unit], offset: int, *, end: int, bytes_max: int
) -> None:
    """Extend the result of a `find` with the waiting `units`, from the unit that contains `offset`
    on, within the limits of the call.
    """
    left = bytes_max - sum(unit.length for unit in batches)
    for unit in units:
        if unit.next_offset <= offset:
            continue
        if unit.base_offset >= end or (batches and unit.length > left):
            return
        if len(batches) == FIND_UNITS_MAX:
            return
        batches.append(unit)
        left -= unit.length

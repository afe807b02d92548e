"""Units that could not be written because the disk was full. They are kept in memory, where readers
find them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .interface import FIND_UNITS_MAX, Unit


class End(NamedTuple):
    """The end of a partition in the index."""

    next_offset: int
    position: int
    last_ms: int


class WaitingUnits:
    """The units that wait for space on the disk. One thread adds units; many threads may read. The
    object is replaced once the units have been written.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, Unit]] = []
        self.new: set[int] = set()
        """The partitions that do not have any units in the tables."""
        self._by_partition: dict[int, list[Unit]] = {}

    def add(self, rows: Sequence[tuple[int, Unit]], new_partitions: set[int]) -> None:
        """Add units. Each must come after those of its partition that are already waiting."""
        self.rows += rows
        self.new |= new_partitions
        for partition_id, unit in rows:
            self._by_partition.setdefault(partition_id, []).append(unit)

    def units_of(self, partition_id: int) -> Sequence[Unit]:
        """Return the waiting units of a partition."""
        return self._by_partition.get(partition_id, ())

    def ids(self) -> list[int]:
        """Return the partitions that have waiting units."""
        return list(self._by_partition)

    def end(self, partition_id: int) -> End | None:
        """Return the end of a partition, or None if it has no waiting units."""
        units = self._by_partition.get(partition_id)
        if not units:
            return None
        return End(units[-1].next_offset, units[-1].position, units[-1].appended_at_ms)


def extend_with_waiting(
    units: list[Unit], waiting_units: Sequence[Unit], offset: int, *, end: int, bytes_max: int
) -> None:
    """Extend the result of `ConsumeQueues.find` with waiting units of the partition. They begin
    with the one that contains `offset`, and are within the limits of the call.
    """
    remaining_bytes = bytes_max - sum(unit.length for unit in units)
    for unit in waiting_units:
        if unit.next_offset <= offset:
            continue
        if unit.base_offset >= end or (units and unit.length > remaining_bytes):
            return
        if len(units) == FIND_UNITS_MAX:
            return
        units.append(unit)
        remaining_bytes -= unit.length

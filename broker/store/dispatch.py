"""Fills the index from the log at a start: it gets a unit for each batch, whole or lost. Pure.

The index has no gaps, because offsets have none. A lost batch has its own unit if its header is
known, or else a unit that points at the damage. A read of such a unit fails with the position of
the damage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...protocol.record import HEADER_BYTES, Header, Kind
from ..storage.index.interface import Unit, unit_of
from ..storage.log.holes import Hole

DISPATCH_UNITS = 4096
KNOWN_MAX = 200_000


class Target(Protocol):
    """The part of an index that a dispatch needs."""

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """See `ConsumeQueues.bounds`."""
        ...

    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        """See `ConsumeQueues.dispatch`."""
        ...


class Dispatch:
    """Dispatches the batches at or above position `start` that the index does not have."""

    def __init__(self, queues: Target, *, start: int) -> None:
        self._queues = queues
        self._start = start
        self._units: list[tuple[int, Unit]] = []
        self._ends: dict[int, tuple[int, int]] = {}
        """Partition id → next offset and position. The index is asked for a partition that is
        missing here.
        """
        self._hole = 0

    def record(self, header: Header) -> None:
        """Dispatch a batch, whole or lost, by its header."""
        if header.kind != Kind.MESSAGES or header.position < self._start:
            return
        unit = unit_of(header)
        partition_id = header.partition_id
        expected, position = self._end_of(partition_id, unit)
        if unit.base_offset < expected:
            return
        if unit.base_offset > expected:
            filler_position = max(position, min(self._hole, unit.position))
            missing = unit.base_offset - expected
            filler = Unit(expected, missing, filler_position, HEADER_BYTES, unit.appended_at_ms)
            self._units.append((partition_id, filler))
        self._units.append((partition_id, unit))
        self._ends[partition_id] = unit.next_offset, unit.end_position
        if len(self._units) >= DISPATCH_UNITS:
            self.flush()

    def _end_of(self, partition_id: int, unit: Unit) -> tuple[int, int]:
        known = self._ends.get(partition_id)
        if known is None:
            bounds = self._queues.bounds(partition_id)
            known = (unit.base_offset if bounds is None else bounds[1]), self._start
        return known

    def hole(self, hole: Hole) -> None:
        """Dispatch the known lost batches of a hole."""
        self._hole = hole.start
        for header, _body in hole.traces:
            self.record(header)

    def flush(self) -> None:
        """Pass all remaining units to the index."""
        self._queues.dispatch(self._units)
        self._units = []
        if len(self._ends) > KNOWN_MAX:
            self._ends.clear()

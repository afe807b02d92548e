"""Both indexes behind one interface, and a plain list with the answers that they must give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.index.file import FileConsumeQueues
from keylane.broker.storage.index.interface import FIND_UNITS_MAX, ConsumeQueues, Unit
from keylane.broker.storage.index.rocksdb import RocksConsumeQueues
from keylane.protocol.control import TimeBound

KINDS = ("file", "rocksdb")
ALL = 1 << 60


def opener(kind: str, folder: Path) -> Callable[[], ConsumeQueues]:
    """Opens the index of this kind in a folder, again and again."""
    if kind == "rocksdb":
        return lambda: RocksConsumeQueues(str(folder / "rocksdb"))
    return lambda: FileConsumeQueues(RealFiles(folder))


class ListIndex:
    """Units of partitions in lists."""

    def __init__(self) -> None:
        self.units: dict[int, list[Unit]] = {}
        self.first: dict[int, int] = {}
        self.next: dict[int, int] = {}
        self.position = 0

    def add(self, partition_id: int, count: int, length: int, at_ms: int) -> Unit:
        """Add the next batch of a partition, as it is dispatched."""
        known = self.units.setdefault(partition_id, [])
        self.first.setdefault(partition_id, 0)
        base = self.next.setdefault(partition_id, 0)
        unit = Unit(base, count, self.position, length, at_ms)
        last = known[-1].appended_at_ms if known else at_ms
        known.append(unit._replace(appended_at_ms=max(at_ms, last)))
        self.next[partition_id] = unit.next_offset
        self.position = unit.end_position
        return unit

    def live(self, partition_id: int) -> list[Unit]:
        """The units that are kept."""
        first = self.first.get(partition_id, 0)
        return [unit for unit in self.units.get(partition_id, []) if unit.base_offset >= first]

    def find(self, partition_id: int, offset: int, *, end: int, bytes_max: int) -> list[Unit]:
        units: list[Unit] = []
        if offset < self.first.get(partition_id, 0):
            return units
        left = bytes_max
        for unit in self.live(partition_id):
            if unit.next_offset <= offset:
                continue
            if unit.base_offset >= end or (units and unit.length > left):
                break
            units.append(unit)
            left -= unit.length
            if len(units) == FIND_UNITS_MAX:
                break
        return units

    def find_by_time(self, partition_id: int, at_ms: int, bound: TimeBound) -> Unit | None:
        live = self.live(partition_id)
        if bound is TimeBound.LOWER:
            return next((unit for unit in live if unit.appended_at_ms >= at_ms), None)
        return next((unit for unit in reversed(live) if unit.appended_at_ms <= at_ms), None)

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        if partition_id not in self.next:
            return None
        return self.first[partition_id], self.next[partition_id]

    def retain(self, position: int) -> dict[int, int]:
        """Forget batches below a position; the first offsets that changed."""
        changed = {}
        for partition_id in self.next:
            kept = [unit for unit in self.live(partition_id) if unit.position >= position]
            first = kept[0].base_offset if kept else self.next[partition_id]
            if first != self.first[partition_id]:
                self.first[partition_id] = changed[partition_id] = first
        return changed

    def truncate(self, position: int) -> None:
        """Forget batches at or after a position."""
        for partition_id, known in list(self.units.items()):
            live = self.live(partition_id)
            if not live or live[-1].position < position:
                continue
            known[:] = [unit for unit in live if unit.position < position]
            self.next[partition_id] = known[-1].next_offset if known else self.first[partition_id]
            if not known and not self.first[partition_id]:
                del self.units[partition_id], self.first[partition_id], self.next[partition_id]
        self.position = position

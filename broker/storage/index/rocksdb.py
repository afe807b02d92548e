"""Consume queues in RocksDB, for brokers with very many partitions. The library does the disk I/O.

    dispatch ─▶ one atomic batch: the units, their partitions' ends, the log position
    checkpoint ─▶ one sync of the write-ahead log
    the disk is full ─▶ units wait in memory ─▶ space is free again ─▶ the database is reopened,
        and the units are written

The tables are in rocksdb_tables.py, and the units in memory are in rocksdb_waiting.py.

Invariants
    Units, bounds and position change together, in one write batch.
    The write-ahead log is enabled, and synced only at a checkpoint. So a checkpoint costs one sync
    and creates no small tables. After a crash, only the units since the last checkpoint are
    dispatched again.

The ends of many partitions are read with one multi-get. Units are read with an iterator, because
the key of a unit is only known from the unit before it.

Compare RocketMQ's RocksDB consume queue. It disables the write-ahead log, so after a crash it
dispatches again from the last flush of its tables. Its multi-get is one lookup per unit (RocksDB
issue #10432).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

from rocksdict import WriteBatch

from ....protocol.control import TimeBound
from ....protocol.errors import CorruptIndexError, DiskFullError, StorageError
from ..fail_points import ignore_fail_point
from .interface import FIND_UNITS_MAX, Unit, gap_error
from .rocksdb_tables import (
    KEY,
    UNIT_VALUE,
    RocksTables,
    current_unit,
    find_first,
    library_errors,
    unit_at,
)
from .rocksdb_waiting import End, WaitingUnits, extend_with_waiting

log = logging.getLogger("keylane.broker")

ENDS_MAX = 1 << 16
"""The maximum number of partitions whose ends are cached for `dispatch`."""
RETAIN_PARTITIONS = 2_000
"""The number of partitions that are handled in one step of `retain`."""
DELETE_UNITS_MAX = 64
"""The maximum number of units that are deleted one by one. More units are deleted as a range, which
makes reads slightly slower.
"""


class RocksConsumeQueues:
    """The `ConsumeQueues` in RocksDB. `path` is a folder that contains only the database."""

    dispatches_in_memory = False

    def __init__(
        self,
        path: str,
        *,
        read_only: bool = False,
        reach: Callable[[str], None] = ignore_fail_point,
    ) -> None:
        self._tables = RocksTables(path, read_only=read_only, reach=reach)
        self._ends: dict[int, End] = {}
        self._waiting_units = WaitingUnits()
        self._lock = threading.Lock()
        """Held while `dispatch` or `checkpoint` writes the position."""

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._tables.lock.shared(), library_errors():
            yield

    @property
    def position(self) -> int:
        """See `ConsumeQueues.position`."""
        with self._reading():
            return self._tables.position()

    # ── writing ───────────────────────────────────────────────────────────────────────────────────
    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        """See `ConsumeQueues.dispatch`."""
        if not units:
            return
        with library_errors():
            ends = self._load_ends({partition_id for partition_id, _ in units})
        new_partitions = {partition_id for partition_id, end in ends.items() if end is None}
        rows = []
        for partition_id, unit in units:
            end = ends[partition_id]
            appended_at_ms = unit.appended_at_ms
            if end is not None:
                if unit.base_offset != end.next_offset:
                    raise gap_error(partition_id, unit, end.next_offset)
                appended_at_ms = max(appended_at_ms, end.last_ms)
            is_raised = appended_at_ms != unit.appended_at_ms
            rows.append(
                (partition_id, unit._replace(appended_at_ms=appended_at_ms) if is_raised else unit)
            )
            ends[partition_id] = End(unit.next_offset, unit.position, appended_at_ms)
        try:
            self._write_waiting()
            self._write(rows, new_partitions)
        except DiskFullError:
            self._waiting_units.add(rows, new_partitions)
            raise
        finally:
            if len(self._ends) + len(ends) > ENDS_MAX:
                self._ends.clear()
            self._ends.update((key, end) for key, end in ends.items() if end is not None)

    def _write_waiting(self) -> None:
        """Write the units that are waiting because the disk was full."""
        if self._tables.needs_reopen:
            self._tables.reopen()
        waiting_units = self._waiting_units
        if waiting_units.rows:
            self._write(waiting_units.rows, waiting_units.new)
            self._waiting_units = WaitingUnits()

    def _write(self, rows: Sequence[tuple[int, Unit]], new_partitions: set[int]) -> None:
        """Write units, their partitions' ends and the log position in one batch."""
        tables = self._tables
        batch = WriteBatch(raw_mode=True)
        has_first = set()
        ends = {}
        for partition_id, unit in rows:
            base_offset, count, position, length, appended_at_ms = unit
            if partition_id in new_partitions and partition_id not in has_first:
                has_first.add(partition_id)
                tables.put_first(batch, partition_id, base_offset, position)
            value = UNIT_VALUE.pack(position, appended_at_ms, length, count)
            batch.put(KEY.pack(partition_id, base_offset), value)
            ends[partition_id] = End(base_offset + count, position, appended_at_ms)
        for partition_id, end in ends.items():
            tables.put_end(batch, partition_id, end)
        tables.put_position(batch, rows[-1][1].end_position)
        with self._lock, library_errors():
            tables.write(batch)

    def _load_ends(self, partition_ids: set[int]) -> dict[int, End | None]:
        """Return the ends of partitions, from the cache or the tables. They are None for new
        partitions.
        """
        cached_ends = self._ends
        ends: dict[int, End | None] = {
            partition_id: cached_ends.get(partition_id) or self._waiting_units.end(partition_id)
            for partition_id in partition_ids
        }
        missing_ids = [partition_id for partition_id, end in ends.items() if end is None]
        if missing_ids:
            ends.update(zip(missing_ids, self._tables.ends(missing_ids), strict=True))
        return ends

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def find(self, partition_id: int, offset: int, *, end: int, bytes_max: int) -> list[Unit]:
        """See `ConsumeQueues.find`."""
        # Read this before the tables, so that units which are written in the meantime are in both.
        waiting_units = self._waiting_units.units_of(partition_id)
        units: list[Unit] = []
        with self._reading():
            bounds = self._tables.bounds(partition_id)
            if bounds is not None and bounds[0] <= offset < bounds[1]:
                self._find(units, partition_id, (offset, end), bounds[1], bytes_max)
        if waiting_units:
            next_offset = units[-1].next_offset if units else offset
            if bounds is None or next_offset >= bounds[1]:
                extend_with_waiting(units, waiting_units, next_offset, end=end, bytes_max=bytes_max)
        return units

    def _find(
        self,
        found: list[Unit],
        partition_id: int,
        offsets: tuple[int, int],
        partition_end: int,
        bytes_max: int,
    ) -> None:
        """Add units from the tables to `found`, for the offsets from `offsets[0]` to
        `offsets[1]`.
        """
        units = self._tables.units()
        unit = unit_at(units, partition_id, offsets[0])
        remaining_bytes = bytes_max
        while unit.base_offset < offsets[1] and (not found or unit.length <= remaining_bytes):
            found.append(unit)
            remaining_bytes -= unit.length
            # Do not step beyond the last unit: the iterator would scan deleted keys.
            if len(found) == FIND_UNITS_MAX or unit.next_offset >= partition_end:
                break
            units.next()
            if not units.valid():
                break
            unit = current_unit(units)
            if unit.base_offset != found[-1].next_offset:
                break
        units.status()

    def find_by_time(self, partition_id: int, at_ms: int, bound: TimeBound) -> Unit | None:
        """See `ConsumeQueues.find_by_time`."""
        waiting_units = self._waiting_units.units_of(partition_id)
        if bound is TimeBound.UPPER:
            newest_unit = next(
                (unit for unit in reversed(waiting_units) if unit.appended_at_ms <= at_ms), None
            )
            return newest_unit or self._find_by_time(partition_id, at_ms, bound)
        stored_unit = self._find_by_time(partition_id, at_ms, bound)
        return stored_unit or next(
            (unit for unit in waiting_units if unit.appended_at_ms >= at_ms), None
        )

    def _find_by_time(self, partition_id: int, at_ms: int, bound: TimeBound) -> Unit | None:
        """Look up a unit in the tables, like `find_by_time`."""
        with self._reading():
            before_bounds = self._tables.bounds(partition_id)
            units = self._tables.units()
            after_bounds = self._tables.bounds(partition_id)
            if before_bounds is None or after_bounds is None or after_bounds[0] >= before_bounds[1]:
                return None
            # The iterator sees the rows as of its creation. They reach at least from the later
            # first offset to the earlier end.
            first, end = bounds = after_bounds[0], before_bounds[1]
            if bound is TimeBound.LOWER:
                low = find_first(units, partition_id, bounds, at_ms=at_ms)
                return unit_at(units, partition_id, low) if low < end else None
            low = find_first(units, partition_id, bounds, at_ms=at_ms + 1)
            return unit_at(units, partition_id, low - 1) if low > first else None

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """See `ConsumeQueues.bounds`."""
        waiting_units = self._waiting_units.units_of(partition_id)
        with self._reading():
            bounds = self._tables.bounds(partition_id)
        if not waiting_units:
            return bounds
        return (bounds or waiting_units[0])[0], max(
            waiting_units[-1].next_offset, bounds[1] if bounds else 0
        )

    def partitions(self) -> list[int]:
        """See `ConsumeQueues.partitions`."""
        with self._reading():
            ids = [partition_id for partition_id, *_ in self._tables.all_bounds()]
        return sorted({*ids, *self._waiting_units.ids()})

    # ── forgetting ────────────────────────────────────────────────────────────────────────────────
    def first_offsets_at(self, position: int) -> Iterator[list[tuple[int, int]]]:
        """See `ConsumeQueues.first_offsets_at`."""
        start: int | None = 0
        while start is not None:
            with self._reading():
                changes, start = self._find_first_offset_changes(start, position)
            yield _changed_firsts(changes)

    def retain(
        self, position: int, *, dropped: Container[int] = ()
    ) -> Iterator[list[tuple[int, int]]]:
        """See `ConsumeQueues.retain`."""
        self._write_waiting()
        if dropped:
            yield from self._forget_bounds(dropped)
        start: int | None = 0
        while start is not None:
            with library_errors():
                changes, start = self._find_first_offset_changes(start, position)
                batch = WriteBatch(raw_mode=True)
                for partition_id, first, new_first, new_position in changes:
                    self._delete(batch, partition_id, first, new_first)
                    self._tables.put_first(batch, partition_id, new_first, new_position)
                self._tables.write(batch)
            yield _changed_firsts(changes)

    def _forget_bounds(self, dropped: Container[int]) -> Iterator[list[tuple[int, int]]]:
        """Delete the bounds of dropped partitions that have no units."""
        start: int | None = 0
        while start is not None:
            with library_errors():
                batch = WriteBatch(raw_mode=True)
                rows, start = self._tables.all_bounds(start), None
                for index, (partition_id, first, _, end) in enumerate(rows):
                    if index == RETAIN_PARTITIONS:
                        start = partition_id
                        break
                    if first == end.next_offset and partition_id in dropped:
                        self._tables.delete_bounds(batch, partition_id)
                        self._ends.pop(partition_id, None)
                self._tables.write(batch)
            yield []

    def _find_first_offset_changes(
        self, start: int, position: int
    ) -> tuple[list[tuple[int, int, int, int]], int | None]:
        """
        Examine the next partitions from id `start` on.

        Returns:
            For each partition that has units below `position`, its id, its first offset, its first
            offset without these units, and the log position of the latter; and the id at which to
            continue, or None.
        """
        changes: list[tuple[int, int, int, int]] = []
        for index, row in enumerate(self._tables.all_bounds(start)):
            partition_id, first, first_position, end = row
            if index == RETAIN_PARTITIONS:
                return changes, partition_id
            if first_position >= position or first == end.next_offset:
                continue
            new_first, new_position = end.next_offset, position
            if end.position >= position:
                units = self._tables.units()
                bounds = (first, end.next_offset)
                new_first = find_first(units, partition_id, bounds, position=position)
                new_position = unit_at(units, partition_id, new_first).position
            changes.append((partition_id, first, new_first, new_position))
        return changes, None

    def _delete(self, batch: WriteBatch, partition_id: int, first: int, end: int) -> None:
        """Delete the units with base offsets in `[first, end)`."""
        if first == end:
            return
        keys = []
        units = self._tables.units()
        units.seek(KEY.pack(partition_id, first))
        last = KEY.pack(partition_id, end)
        while units.valid() and (key := units.key()) < last:
            keys.append(key)
            if len(keys) > DELETE_UNITS_MAX:
                batch.delete_range(keys[0], last)
                return
            units.next()
        units.status()
        for key in keys:
            batch.delete(key)

    def truncate(self, position: int) -> None:
        """See `ConsumeQueues.truncate`."""
        self._ends.clear()
        with library_errors():
            if not position:
                self._tables.clear()
                return
            batch = WriteBatch(raw_mode=True)
            for partition_id, first, first_position, end in self._tables.all_bounds():
                # New units may be dispatched below the first position, where retention would not
                # find them.
                if first_position > position:
                    self._tables.put_first(batch, partition_id, first, position)
                if end.position >= position and first < end.next_offset:
                    self._truncate_partition(batch, partition_id, first, end, position)
            if self._tables.position() > position:
                self._tables.put_position(batch, position)
            self._tables.write(batch)

    def _truncate_partition(
        self, batch: WriteBatch, partition_id: int, first: int, end: End, position: int
    ) -> None:
        """Delete a partition's units at or above `position`, and correct its end."""
        units = self._tables.units()
        bounds = (first, end.next_offset)
        truncate_offset = find_first(units, partition_id, bounds, position=position)
        if truncate_offset == first and not first:
            self._tables.delete_bounds(batch, partition_id)
        elif truncate_offset < end.next_offset:
            new_end = End(first, 0, 0)
            if truncate_offset > first:
                last = unit_at(units, partition_id, truncate_offset - 1)
                new_end = End(truncate_offset, last.position, last.appended_at_ms)
            self._tables.put_end(batch, partition_id, new_end)
        self._delete(batch, partition_id, truncate_offset, end.next_offset)

    # ── durability ────────────────────────────────────────────────────────────────────────────────
    def recover(self, position: int, *, first_position: int = 0) -> int:
        """See `ConsumeQueues.recover`."""
        try:
            known = self.position
            if known < first_position:
                known = 0
            if known > position:
                self.truncate(position)
        except CorruptIndexError as error:
            log.warning("the RocksDB index is rebuilt from the log: %s", error.message)
            known = 0
        if not known:
            self.truncate(0)
        return min(known, position)

    def checkpoint(self, position: int) -> None:
        """See `ConsumeQueues.checkpoint`."""
        if self._waiting_units.rows:
            raise DiskFullError("units of the index wait for free disk space")
        with self._reading():
            with self._lock:
                if self._tables.position() < position:
                    batch = WriteBatch(raw_mode=True)
                    self._tables.put_position(batch, position)
                    self._tables.write(batch)
            self._tables.sync()

    def flush(self) -> None:
        """See `ConsumeQueues.flush`."""
        self.checkpoint(0)

    def close(self) -> None:
        """See `ConsumeQueues.close`."""
        try:
            with library_errors():
                self._tables.flush()
        except StorageError as error:
            log.warning("cannot write the index: %s", error.message)
        self.close_unflushed()

    def close_unflushed(self) -> None:
        """See `ConsumeQueues.close_unflushed`."""
        self._tables.close()


def _changed_firsts(behind: list[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
    """Return (partition id, new first offset) for the partitions whose first offset changes."""
    return [(partition_id, new) for partition_id, first, new, _ in behind if new > first]

"""Consume queues as one file of fixed units per partition.  Disk, through `Files`.

    index/{partition id}.units      32 bytes per batch, little-endian
    ┌─────────────────┬──────────────┬────────────────────┬────────────┬───────────┐
    │ base_offset  u64│ position  u64│ appended_at_ms  i64│ length  u32│ count  u32│
    └─────────────────┴──────────────┴────────────────────┴────────────┴───────────┘

The newest units of a partition are in memory until there are FLUSH_UNITS of them.  No checksum and no sync: readers
compare a unit with the record it points at, and the file is rebuilt from the log.
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from ...protocol.errors import CorruptLogError, StorageError
from .consume_queue import Unit
from .files import Files

log = logging.getLogger("keylane.broker")

FOLDER = "index"
SUFFIX = ".units"
UNIT_BYTES = 32
FLUSH_UNITS = 128
"""4 KiB: what a partition keeps in memory at most."""
BLOCK_UNITS = 128
_UNIT = struct.Struct("<QQqII")
assert _UNIT.size == UNIT_BYTES


class _Queue:
    """The units of one partition: `flushed` of them in the file, the others in `tail`."""

    __slots__ = ("path", "state")

    def __init__(self, partition_id: int) -> None:
        self.path = f"{FOLDER}/{partition_id}{SUFFIX}"
        self.state: tuple[int, bytearray] = (0, bytearray())
        """Replaced as one value, so that readers in other threads never see half of a flush."""


class FileConsumeQueues:
    """See `ConsumeQueues` for the contract."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._queues: dict[int, _Queue] = {}
        files.make_folder(FOLDER)
        for name in files.list(FOLDER):
            number = name.removesuffix(SUFFIX)
            if number != name and number.isdecimal():
                queue = self._queue(int(number))
                size = files.size(queue.path) or 0
                queue.state = (size // UNIT_BYTES, bytearray())

    def _queue(self, partition_id: int) -> _Queue:
        queue = self._queues.get(partition_id)
        if queue is None:
            queue = self._queues[partition_id] = _Queue(partition_id)
        return queue

    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        """See `ConsumeQueues.dispatch`."""
        for partition_id, unit in units:
            queue = self._queues.get(partition_id) or self._queue(partition_id)
            tail = queue.state[1]
            tail += _UNIT.pack(
                unit.base_offset,
                unit.position,
                unit.appended_at_ms,
                unit.length,
                unit.message_count,
            )
            if len(tail) >= FLUSH_UNITS * UNIT_BYTES:
                try:
                    self._flush(queue)
                except StorageError as error:
                    # The log has it; the units stay in memory and are written with the next ones.
                    log.warning("%s", error.message)

    def _flush(self, queue: _Queue) -> None:
        flushed, tail = queue.state
        if not tail:
            return
        file = self._files.open_append(queue.path)
        try:
            if file.size != flushed * UNIT_BYTES:
                file.truncate(flushed * UNIT_BYTES)
            file.append([tail])
        finally:
            file.close()
        queue.state = (flushed + len(tail) // UNIT_BYTES, bytearray())

    def find(self, partition_id: int, offset: int, *, end: int, bytes_max: int) -> list[Unit]:
        """See `ConsumeQueues.find`."""
        queue = self._queues.get(partition_id)
        if queue is None:
            return []
        flushed, tail = queue.state
        found: list[Unit] = []
        left = bytes_max
        for unit in self._from(queue.path, flushed, tail, offset):
            if unit.base_offset >= end or (found and unit.length > left):
                break
            found.append(unit)
            left -= unit.length
        return found

    def _from(self, path: str, flushed: int, tail: bytearray, offset: int) -> Iterator[Unit]:
        """Units from the one that holds `offset` on."""
        if not tail or _unit(tail, 0).base_offset > offset:
            block = self._block_of(path, flushed, offset)
            while block * BLOCK_UNITS < flushed:
                units = self._block(path, flushed, block)
                yield from (unit for unit in units if unit.next_offset > offset)
                block += 1
        count = len(tail) // UNIT_BYTES
        index = bisect_right(range(count), offset, key=lambda i: _unit(tail, i).next_offset)
        yield from (_unit(tail, i) for i in range(index, count))

    def _block_of(self, path: str, flushed: int, offset: int) -> int:
        def first_offset(block: int) -> int:
            data = self._files.pread(path, block * BLOCK_UNITS * UNIT_BYTES, UNIT_BYTES)
            if len(data) < UNIT_BYTES:
                raise _lost(path)
            return _unit(data, 0).base_offset

        blocks = range((flushed + BLOCK_UNITS - 1) // BLOCK_UNITS)
        return max(bisect_right(blocks, offset, key=first_offset) - 1, 0)

    def _block(self, path: str, flushed: int, block: int) -> list[Unit]:
        first = block * BLOCK_UNITS
        count = min(BLOCK_UNITS, flushed - first)
        data = self._files.pread(path, first * UNIT_BYTES, count * UNIT_BYTES)
        if len(data) < count * UNIT_BYTES:
            raise _lost(path)
        return [_unit(data, index) for index in range(count)]

    def truncate(self, position: int) -> None:
        """See `ConsumeQueues.truncate`."""
        for partition_id, queue in list(self._queues.items()):
            flushed, tail = queue.state
            assert not tail, "truncate comes before the first dispatch"
            kept = self._units_before(queue.path, flushed, position) if position else 0
            if kept == flushed and kept:
                continue
            if kept:
                file = self._files.open_append(queue.path)
                try:
                    file.truncate(kept * UNIT_BYTES)
                finally:
                    file.close()
                queue.state = (kept, bytearray())
            else:
                if self._files.size(queue.path) is not None:
                    self._files.remove(queue.path)
                del self._queues[partition_id]

    def _units_before(self, path: str, count: int, position: int) -> int:
        def position_of(index: int) -> int:
            data = self._files.pread(path, index * UNIT_BYTES, UNIT_BYTES)
            return _unit(data, 0).position if len(data) == UNIT_BYTES else position

        return bisect_left(range(count), position, key=position_of)

    def recover(self, position: int) -> int:
        """See `ConsumeQueues.recover`: nothing here is synced, so it is rebuilt."""
        self.truncate(0)
        return 0

    def checkpoint(self, position: int) -> None:
        """See `ConsumeQueues.checkpoint`."""

    def flush(self) -> None:
        """See `ConsumeQueues.flush`."""
        for queue in self._queues.values():
            self._flush(queue)

    def close(self) -> None:
        """See `ConsumeQueues.close`."""
        self.flush()


def _unit(data: bytes | bytearray, index: int) -> Unit:
    base_offset, position, appended_at_ms, length, count = _UNIT.unpack_from(
        data, index * UNIT_BYTES
    )
    return Unit(base_offset, count, position, length, appended_at_ms)


def _lost(path: str) -> CorruptLogError:
    return CorruptLogError(
        f"the index file {path} is shorter than it was; start the broker again to rebuild it",
        path=path,
    )

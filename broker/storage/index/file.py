"""Consume queues in files that all partitions share. Disk, through `Files`.

    dispatch ─▶ tail in memory ─▶ a block of 127 units ─▶ index/….blocks          file_blocks.py
    checkpoint ─▶ sync of the blocks ─▶ a frame with the changes of every partition
        ─▶ index/journal-…

A lookup bisects the partition's blocks in memory and reads one block. Units that were dispatched
after the last checkpoint are not durable; a start dispatches them again from the log.

Source: RocketMQ's file per queue costs a descriptor, a map and a sync per queue (its issues #202,
#7318, #5091).
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence

from ....protocol.control import TimeBound
from ....protocol.errors import StorageError
from ..append_file import Buffer
from ..files import Files
from .file_blocks import FOLDER, BlockFiles, encode_block
from .file_journal import Journal, encode_part
from .file_queue import NO_BLOCKS, Queue, State, tail_units
from .file_units import BLOCK_UNITS, UNIT_BYTES, UNITS_BYTES, first_where, pack_unit, unit_at
from .interface import FIND_UNITS_MAX, Unit, misfit

log = logging.getLogger("keylane.broker")

RETAIN_PARTITIONS = 500
"""The number of partitions in a step of `retain`."""


class FileConsumeQueues:
    """A `ConsumeQueues` in files; the protocol has the contract."""

    def __init__(self, files: Files) -> None:
        files.make_folder(FOLDER)
        self._blocks = BlockFiles(files)
        self._journal = Journal(files)
        self._queues, self._position, self._blocks.end = self._journal.load()
        self._guard = threading.Lock()
        """A lock that is held while dispatch changes the state, and while checkpoint copies it."""
        self._checkpoints = threading.Lock()
        self._saved = self._position
        """The position of the last checkpoint."""
        self._renew = False
        """True if the next frame must have every partition, not only those in `_changed`."""
        self._changed: set[int] = set()
        """The partitions that have changed since the last frame of the journal."""
        self._first_block: int | None = None
        """The number of the first block to keep: earlier ones are removed after the next
        checkpoint.
        """

    @property
    def position(self) -> int:
        """See `ConsumeQueues.position`."""
        return self._position

    @property
    def dispatches_in_memory(self) -> bool:
        """See `ConsumeQueues.dispatches_in_memory`."""
        return not self._guard.locked()

    # ── writing ───────────────────────────────────────────────────────────────────────────────────
    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        """See `ConsumeQueues.dispatch`."""
        if not units:
            return
        queues = self._queues
        if len(units) > 1:
            self._check(units)  # all of them, before the first is added
        with self._guard:
            for partition_id, unit in units:
                base_offset, count, position, length, at_ms = unit
                queue = queues.get(partition_id)
                if queue is None:
                    queue = queues[partition_id] = Queue(base_offset)
                if base_offset != queue.next:
                    raise misfit(partition_id, unit, queue.next)
                at_ms = max(at_ms, queue.last_ms)
                tail = queue.state[2]
                tail += pack_unit(base_offset, position, at_ms, length, count)
                queue.next = base_offset + count
                queue.last_ms = at_ms
                self._changed.add(partition_id)
                if len(tail) >= UNITS_BYTES:
                    self._fold(partition_id, queue)
            last = units[-1][1]
            self._position = max(self._position, last.position + last.length)

    def _check(self, units: Sequence[tuple[int, Unit]]) -> None:
        following: dict[int, int] = {}
        for partition_id, unit in units:
            expected = following.get(partition_id)
            if expected is None:
                queue = self._queues.get(partition_id)
                expected = unit.base_offset if queue is None else queue.next
            if unit.base_offset != expected:
                raise misfit(partition_id, unit, expected)
            following[partition_id] = unit.base_offset + unit.message_count

    def _fold(self, partition_id: int, queue: Queue) -> None:
        """Turn a tail that is long enough into blocks."""
        while len(queue.state[2]) >= UNITS_BYTES:
            try:
                number = self._blocks.write(
                    encode_block(partition_id, queue.state[2][:UNITS_BYTES])
                )
            except StorageError as error:
                # The log has the batches. The units stay in memory and are written with the next
                # ones.
                log.warning("%s", error.message)
                return
            queue.add_block(number, UNITS_BYTES)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def find(self, partition_id: int, offset: int, *, end: int, bytes_max: int) -> list[Unit]:
        """See `ConsumeQueues.find`."""
        queue = self._queues.get(partition_id)
        batches: list[Unit] = []
        if queue is None or offset < queue.first:
            return batches
        left = bytes_max
        for unit in self._from(partition_id, queue, offset):
            if unit.base_offset >= end or (batches and unit.length > left):
                break
            batches.append(unit)
            left -= unit.length
            if len(batches) == FIND_UNITS_MAX:
                break
        return batches

    def _from(self, partition_id: int, queue: Queue, offset: int) -> Iterator[Unit]:
        """Yield units from the unit that contains `offset` on."""
        blocks, count, tail = queue.state
        if count and not (tail and unit_at(tail, 0).base_offset <= offset):
            block = max(bisect_right(blocks.offsets, offset, 0, count) - 1, 0)
            while block < count:
                data = self._blocks.read(blocks.numbers[block], partition_id)
                first = first_where(data, lambda unit: unit.next_offset > offset)
                for index in range(first, BLOCK_UNITS):
                    yield unit_at(data, index)
                block += 1
        yield from tail_units(tail, first_where(tail, lambda unit: unit.next_offset > offset))

    def by_time(self, partition_id: int, at_ms: int, bound: TimeBound) -> Unit | None:
        """See `ConsumeQueues.by_time`."""
        queue = self._queues.get(partition_id)
        if queue is None:
            return None
        first = queue.first
        state = queue.state
        if bound is TimeBound.LOWER:
            unit = self._first_at(partition_id, state, at_ms)
            if unit is not None and unit.base_offset < first:
                # Times never fall, so the first unit that is not forgotten has this time or a later
                # one.
                unit = next(self._from(partition_id, queue, first), None)
            return unit
        unit = self._last_at(partition_id, state, at_ms)
        return unit if unit is not None and unit.base_offset >= first else None

    def _first_at(self, partition_id: int, state: State, at_ms: int) -> Unit | None:
        """Return the first unit with this time or a later one."""
        blocks, count, tail = state
        block = bisect_left(blocks.times, at_ms, 0, count)
        if block:
            data = self._blocks.read(blocks.numbers[block - 1], partition_id)
            index = first_where(data, lambda unit: unit.appended_at_ms >= at_ms)
            if index < BLOCK_UNITS:
                return unit_at(data, index)
        if block < count:
            return unit_at(self._blocks.read(blocks.numbers[block], partition_id), 0)
        index = first_where(tail, lambda unit: unit.appended_at_ms >= at_ms)
        return unit_at(tail, index) if (index + 1) * UNIT_BYTES <= len(tail) else None

    def _last_at(self, partition_id: int, state: State, at_ms: int) -> Unit | None:
        """Return the last unit with this time or an earlier one."""
        blocks, count, tail = state
        index = first_where(tail, lambda unit: unit.appended_at_ms > at_ms)
        if index:
            return unit_at(tail, index - 1)
        block = bisect_right(blocks.times, at_ms, 0, count)
        if not block:
            return None
        data = self._blocks.read(blocks.numbers[block - 1], partition_id)
        return unit_at(data, first_where(data, lambda unit: unit.appended_at_ms > at_ms) - 1)

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """See `ConsumeQueues.bounds`."""
        queue = self._queues.get(partition_id)
        return None if queue is None else (queue.first, queue.next)

    def partitions(self) -> list[int]:
        """See `ConsumeQueues.partitions`."""
        return sorted(self._queues)

    # ── forgetting ────────────────────────────────────────────────────────────────────────────────
    def firsts_behind(self, position: int) -> Iterator[list[tuple[int, int]]]:
        """See `ConsumeQueues.firsts_behind`."""
        ids = self.partitions()
        for start in range(0, len(ids), RETAIN_PARTITIONS):
            rising = []
            for partition_id in ids[start : start + RETAIN_PARTITIONS]:
                queue = self._queues.get(partition_id)
                if queue is None:
                    continue  # forgotten meanwhile
                first = self._first_behind(partition_id, queue, position)
                if first > queue.first:
                    rising.append((partition_id, first))
            yield rising

    def retain(
        self, position: int, *, dropped: Container[int] = ()
    ) -> Iterator[list[tuple[int, int]]]:
        """See `ConsumeQueues.retain`."""
        ids = self.partitions()
        for start in range(0, len(ids), RETAIN_PARTITIONS):
            changed = []
            for partition_id in ids[start : start + RETAIN_PARTITIONS]:
                queue = self._queues[partition_id]
                # The journal must not name its blocks any more: they are removed.
                if partition_id in dropped and queue.first == queue.next and not queue.rewrite:
                    with self._guard:
                        del self._queues[partition_id]
                        self._changed.discard(partition_id)
                    continue
                first = self._first_behind(partition_id, queue, position)
                if first > queue.first:
                    with self._guard:
                        self._drop_before(queue, first)
                        self._changed.add(partition_id)
                    changed.append((partition_id, first))
            yield changed
        numbers = [queue.state[0].numbers[0] for queue in self._queues.values() if queue.state[1]]
        self._first_block = min(numbers, default=self._blocks.end)

    def _first_behind(self, partition_id: int, queue: Queue, position: int) -> int:
        """Return the base offset of the first unit at or above this position or, if there is none,
        the next offset.
        """
        blocks, count, tail = queue.state
        block = bisect_left(blocks.positions, position, 0, count)
        if block:
            data = self._blocks.read(blocks.numbers[block - 1], partition_id)
            index = first_where(data, lambda unit: unit.position >= position)
            if index < BLOCK_UNITS:
                return unit_at(data, index).base_offset
        if block < count:
            return blocks.offsets[block]
        index = first_where(tail, lambda unit: unit.position >= position)
        if (index + 1) * UNIT_BYTES <= len(tail):
            return unit_at(tail, index).base_offset
        return queue.next

    @staticmethod
    def _drop_before(queue: Queue, first: int) -> None:
        queue.first = first
        blocks, count, tail = queue.state
        block = bisect_right(blocks.offsets, first, 0, count) - 1
        if count and (not tail or first < unit_at(tail, 0).base_offset) and first < queue.next:
            if block:
                queue.replace(blocks.part(block, count), tail)
            return
        index = first_where(tail, lambda unit: unit.base_offset >= first)
        queue.replace(NO_BLOCKS, tail[index * UNIT_BYTES :])

    def truncate(self, position: int) -> None:
        """See `ConsumeQueues.truncate`."""
        if not position:
            self._queues.clear()
            self._changed.clear()
            self._journal.forget()
            self._blocks.cut(0)
            self._position = self._saved = 0
            return
        for partition_id, queue in list(self._queues.items()):
            self._cut(partition_id, queue, position)
        self._position = min(self._position, position)

    def _cut(self, partition_id: int, queue: Queue, position: int) -> None:
        blocks, count, tail = queue.state
        data: bytes | bytearray = tail
        kept = first_where(data, lambda unit: unit.position >= position)
        if kept * UNIT_BYTES == len(data) and (kept or not count):
            return
        while not kept and count:
            # Those units of the last block that are kept become the tail.
            count -= 1
            data = self._blocks.read(blocks.numbers[count], partition_id)
            kept = first_where(data, lambda unit: unit.position >= position)
            if kept == BLOCK_UNITS and count + 1 == queue.state[1] and not tail:
                return
        queue.replace(blocks.part(0, count), bytearray(data[: kept * UNIT_BYTES]))
        queue.set_end(unit_at(data, kept - 1) if kept else None)
        self._renew = True
        if not kept and not queue.first:
            del self._queues[partition_id]

    # ── durability ────────────────────────────────────────────────────────────────────────────────
    def recover(self, position: int, *, first_position: int = 0) -> int:
        """See `ConsumeQueues.recover`."""
        known = self._position
        if known < first_position or not self._blocks.has(self._block_numbers()):
            known = 0
        if known > position:
            try:
                self.truncate(position)
            except StorageError as error:
                log.warning("%s", error.message)
                known = 0
        if not known:
            self.truncate(0)
        return min(known, position)

    def _block_numbers(self) -> Iterator[int]:
        for queue in self._queues.values():
            yield from queue.state[0].numbers

    def checkpoint(self, position: int) -> None:
        """See `ConsumeQueues.checkpoint`."""
        with self._checkpoints:
            with self._guard:
                self._position = position = max(position, self._position)
                whole = self._renew or self._journal.renew
                if position == self._saved and not self._changed and not whole:
                    return
                parts: list[Buffer] = []
                for partition_id in self._queues if whole else self._changed:
                    queue = self._queues[partition_id]
                    parts += encode_part(partition_id, queue, whole=whole or queue.rewrite)
                    queue.kept()
                self._changed.clear()
                end, first_block = self._blocks.end, self._first_block
                self._renew = True
            self._blocks.sync()
            self._journal.write(parts, position=position, end=end, whole=whole)
            self._renew = False
            self._saved = position
            if first_block is not None:
                self._blocks.drop(first_block)

    def flush(self) -> None:
        """See `ConsumeQueues.flush`."""
        self.checkpoint(0)

    def close(self) -> None:
        """See `ConsumeQueues.close`."""
        try:
            self.flush()
        except StorageError as error:
            log.warning("cannot write the index: %s", error.message)
        self.leave()

    def leave(self) -> None:
        """See `ConsumeQueues.leave`."""
        self._journal.close()
        self._blocks.close()

"""Consume queues in files that all partitions share. Does disk I/O through `Files`.

    dispatch ─▶ tail in memory ─▶ a block of 127 units ─▶ index/….blocks          file_blocks.py
    checkpoint ─▶ sync of the blocks ─▶ a frame with the changes of every partition
        ─▶ index/journal-…

A lookup bisects the first units of the partition's blocks, which are in memory, and reads one
block. Units that were dispatched after the last checkpoint are not durable; they are dispatched
again from the log when the broker starts.

RocketMQ, in contrast, has a file per queue, which costs a descriptor, a mapping and a sync per
queue (its issues #202, #7318, #5091).
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
from .file_units import BLOCK_UNITS, UNIT_BYTES, UNITS_BYTES, find_first, pack_unit, unit_at
from .interface import FIND_UNITS_MAX, Unit, gap_error

log = logging.getLogger("keylane.broker")

RETAIN_PARTITIONS = 500
"""The number of partitions that are handled in one step of `retain`."""


class FileConsumeQueues:
    """The `ConsumeQueues` in files."""

    def __init__(self, files: Files) -> None:
        files.make_folder(FOLDER)
        self._blocks = BlockFiles(files)
        self._journal = Journal(files)
        self._queues, self._position, self._blocks.end = self._journal.load()
        self._lock = threading.Lock()
        """Held while `dispatch` changes the state and while `checkpoint` copies it."""
        self._checkpoint_lock = threading.Lock()
        self._checkpoint_position = self._position
        """The position of the last checkpoint."""
        self._full_frame_due = False
        """True if the next frame must contain all partitions, not only those in `_changed_ids`."""
        self._changed_ids: set[int] = set()
        """The partitions that have changed since the journal's last frame."""
        self._first_block: int | None = None
        """The number of the first block to keep. The next checkpoint removes earlier ones."""

    @property
    def position(self) -> int:
        """See `ConsumeQueues.position`."""
        return self._position

    @property
    def dispatches_in_memory(self) -> bool:
        """See `ConsumeQueues.dispatches_in_memory`."""
        return not self._lock.locked()

    # ── writing ───────────────────────────────────────────────────────────────────────────────────
    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        """See `ConsumeQueues.dispatch`."""
        if not units:
            return
        queues = self._queues
        if len(units) > 1:
            self._check_contiguous(units)  # checks all of them before the first is added
        with self._lock:
            for partition_id, unit in units:
                base_offset, count, position, length, appended_at_ms = unit
                queue = queues.get(partition_id)
                if queue is None:
                    queue = queues[partition_id] = Queue(base_offset)
                if base_offset != queue.next_offset:
                    raise gap_error(partition_id, unit, queue.next_offset)
                appended_at_ms = max(appended_at_ms, queue.last_ms)
                tail = queue.state[2]
                tail += pack_unit(base_offset, position, appended_at_ms, length, count)
                queue.next_offset = base_offset + count
                queue.last_ms = appended_at_ms
                self._changed_ids.add(partition_id)
                if len(tail) >= UNITS_BYTES:
                    self._write_blocks(partition_id, queue)
            last_units = units[-1][1]
            self._position = max(self._position, last_units.position + last_units.length)

    def _check_contiguous(self, units: Sequence[tuple[int, Unit]]) -> None:
        """Raise CorruptLogError if a unit does not begin at its partition's next offset."""
        next_offsets: dict[int, int] = {}
        for partition_id, unit in units:
            expected_offset = next_offsets.get(partition_id)
            if expected_offset is None:
                queue = self._queues.get(partition_id)
                expected_offset = unit.base_offset if queue is None else queue.next_offset
            if unit.base_offset != expected_offset:
                raise gap_error(partition_id, unit, expected_offset)
            next_offsets[partition_id] = unit.base_offset + unit.message_count

    def _write_blocks(self, partition_id: int, queue: Queue) -> None:
        """Write the full blocks at the beginning of the tail."""
        while len(queue.state[2]) >= UNITS_BYTES:
            try:
                number = self._blocks.write(
                    encode_block(partition_id, queue.state[2][:UNITS_BYTES])
                )
            except StorageError as error:
                # The log has these batches. The units stay in memory until the next attempt.
                log.warning("%s", error.message)
                return
            queue.add_block(number, UNITS_BYTES)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def find(self, partition_id: int, offset: int, *, end: int, bytes_max: int) -> list[Unit]:
        """See `ConsumeQueues.find`."""
        queue = self._queues.get(partition_id)
        units: list[Unit] = []
        if queue is None or offset < queue.first_offset:
            return units
        remaining_bytes = bytes_max
        for unit in self._units_from(partition_id, queue, offset):
            if unit.base_offset >= end or (units and unit.length > remaining_bytes):
                break
            units.append(unit)
            remaining_bytes -= unit.length
            if len(units) == FIND_UNITS_MAX:
                break
        return units

    def _units_from(self, partition_id: int, queue: Queue, offset: int) -> Iterator[Unit]:
        """Yield the units of a partition, beginning with the unit that contains `offset`."""
        blocks, count, tail = queue.state
        if count and not (tail and unit_at(tail, 0).base_offset <= offset):
            block = max(bisect_right(blocks.offsets, offset, 0, count) - 1, 0)
            while block < count:
                data = self._blocks.read(blocks.numbers[block], partition_id)
                first = find_first(data, lambda unit: unit.next_offset > offset)
                for index in range(first, BLOCK_UNITS):
                    yield unit_at(data, index)
                block += 1
        yield from tail_units(tail, find_first(tail, lambda unit: unit.next_offset > offset))

    def find_by_time(self, partition_id: int, at_ms: int, bound: TimeBound) -> Unit | None:
        """See `ConsumeQueues.find_by_time`."""
        queue = self._queues.get(partition_id)
        if queue is None:
            return None
        first = queue.first_offset
        state = queue.state
        if bound is TimeBound.LOWER:
            unit = self._find_first_at(partition_id, state, at_ms)
            if unit is not None and unit.base_offset < first:
                # Times never decrease, so the first unit that is not forgotten has this time or a
                # later one.
                unit = next(self._units_from(partition_id, queue, first), None)
            return unit
        unit = self._find_last_at(partition_id, state, at_ms)
        return unit if unit is not None and unit.base_offset >= first else None

    def _find_first_at(self, partition_id: int, state: State, at_ms: int) -> Unit | None:
        """Return the first unit that was stored at `at_ms` or later."""
        blocks, count, tail = state
        block = bisect_left(blocks.times, at_ms, 0, count)
        if block:
            data = self._blocks.read(blocks.numbers[block - 1], partition_id)
            index = find_first(data, lambda unit: unit.appended_at_ms >= at_ms)
            if index < BLOCK_UNITS:
                return unit_at(data, index)
        if block < count:
            return unit_at(self._blocks.read(blocks.numbers[block], partition_id), 0)
        index = find_first(tail, lambda unit: unit.appended_at_ms >= at_ms)
        return unit_at(tail, index) if (index + 1) * UNIT_BYTES <= len(tail) else None

    def _find_last_at(self, partition_id: int, state: State, at_ms: int) -> Unit | None:
        """Return the last unit that was stored at `at_ms` or earlier."""
        blocks, count, tail = state
        index = find_first(tail, lambda unit: unit.appended_at_ms > at_ms)
        if index:
            return unit_at(tail, index - 1)
        block = bisect_right(blocks.times, at_ms, 0, count)
        if not block:
            return None
        data = self._blocks.read(blocks.numbers[block - 1], partition_id)
        return unit_at(data, find_first(data, lambda unit: unit.appended_at_ms > at_ms) - 1)

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """See `ConsumeQueues.bounds`."""
        queue = self._queues.get(partition_id)
        return None if queue is None else (queue.first_offset, queue.next_offset)

    def partitions(self) -> list[int]:
        """See `ConsumeQueues.partitions`."""
        return sorted(self._queues)

    # ── forgetting ────────────────────────────────────────────────────────────────────────────────
    def first_offsets_at(self, position: int) -> Iterator[list[tuple[int, int]]]:
        """See `ConsumeQueues.first_offsets_at`."""
        ids = self.partitions()
        for start in range(0, len(ids), RETAIN_PARTITIONS):
            queues = (
                (each, self._queues.get(each)) for each in ids[start : start + RETAIN_PARTITIONS]
            )
            yield [
                (partition_id, first_offset)
                for partition_id, queue in queues
                if queue is not None  # otherwise it was forgotten in the meantime
                and (first_offset := self._find_first_offset_at(partition_id, queue, position))
                > queue.first_offset
            ]

    def retain(
        self, position: int, *, dropped: Container[int] = ()
    ) -> Iterator[list[tuple[int, int]]]:
        """See `ConsumeQueues.retain`."""
        ids = self.partitions()
        for start in range(0, len(ids), RETAIN_PARTITIONS):
            new_first_offsets = []
            for partition_id in ids[start : start + RETAIN_PARTITIONS]:
                queue = self._queues[partition_id]
                # Wait until the journal no longer refers to its blocks, which are being removed.
                if (
                    partition_id in dropped
                    and queue.first_offset == queue.next_offset
                    and not queue.must_rewrite
                ):
                    with self._lock:
                        del self._queues[partition_id]
                        self._changed_ids.discard(partition_id)
                    continue
                first = self._find_first_offset_at(partition_id, queue, position)
                if first > queue.first_offset:
                    with self._lock:
                        self._drop_before(queue, first)
                        self._changed_ids.add(partition_id)
                    new_first_offsets.append((partition_id, first))
            yield new_first_offsets
        first_blocks = [
            queue.state[0].numbers[0] for queue in self._queues.values() if queue.state[1]
        ]
        self._first_block = min(first_blocks, default=self._blocks.end)

    def _find_first_offset_at(self, partition_id: int, queue: Queue, position: int) -> int:
        """Return the base offset of the first unit at or above `position`, or the next offset if
        there is none.
        """
        blocks, count, tail = queue.state
        block = bisect_left(blocks.positions, position, 0, count)
        if block:
            data = self._blocks.read(blocks.numbers[block - 1], partition_id)
            index = find_first(data, lambda unit: unit.position >= position)
            if index < BLOCK_UNITS:
                return unit_at(data, index).base_offset
        if block < count:
            return blocks.offsets[block]
        index = find_first(tail, lambda unit: unit.position >= position)
        if (index + 1) * UNIT_BYTES <= len(tail):
            return unit_at(tail, index).base_offset
        return queue.next_offset

    @staticmethod
    def _drop_before(queue: Queue, first_offset: int) -> None:
        """Raise the first offset to `first_offset`, and forget all units before it."""
        queue.first_offset = first_offset
        blocks, count, tail = queue.state
        block = bisect_right(blocks.offsets, first_offset, 0, count) - 1
        if (
            count
            and (not tail or first_offset < unit_at(tail, 0).base_offset)
            and first_offset < queue.next_offset
        ):
            if block:
                queue.replace(blocks.slice(block, count), tail)
            return
        index = find_first(tail, lambda unit: unit.base_offset >= first_offset)
        queue.replace(NO_BLOCKS, tail[index * UNIT_BYTES :])

    def truncate(self, position: int) -> None:
        """See `ConsumeQueues.truncate`."""
        if not position:
            self._queues.clear()
            self._changed_ids.clear()
            self._journal.clear()
            self._blocks.cut(0)
            self._position = self._checkpoint_position = 0
            return
        for partition_id, queue in list(self._queues.items()):
            self._truncate_queue(partition_id, queue, position)
        self._position = min(self._position, position)

    def _truncate_queue(self, partition_id: int, queue: Queue, position: int) -> None:
        """Forget a partition's units at or above `position`."""
        blocks, count, tail = queue.state
        data: bytes | bytearray = tail
        remaining_count = find_first(data, lambda unit: unit.position >= position)
        if remaining_count * UNIT_BYTES == len(data) and (remaining_count or not count):
            return
        while not remaining_count and count:
            # The remaining units of the last block become the tail.
            count -= 1
            data = self._blocks.read(blocks.numbers[count], partition_id)
            remaining_count = find_first(data, lambda unit: unit.position >= position)
            if remaining_count == BLOCK_UNITS and count + 1 == queue.state[1] and not tail:
                return
        queue.replace(blocks.slice(0, count), bytearray(data[: remaining_count * UNIT_BYTES]))
        queue.set_end(unit_at(data, remaining_count - 1) if remaining_count else None)
        self._full_frame_due = True
        if not remaining_count and not queue.first_offset:
            del self._queues[partition_id]

    # ── durability ────────────────────────────────────────────────────────────────────────────────
    def recover(self, position: int, *, first_position: int = 0) -> int:
        """See `ConsumeQueues.recover`."""
        known_position = self._position
        if known_position < first_position or not self._blocks.contains(self._block_numbers()):
            known_position = 0
        if known_position > position:
            try:
                self.truncate(position)
            except StorageError as error:
                log.warning("%s", error.message)
                known_position = 0
        if not known_position:
            self.truncate(0)
        return min(known_position, position)

    def _block_numbers(self) -> Iterator[int]:
        for queue in self._queues.values():
            yield from queue.state[0].numbers

    def checkpoint(self, position: int) -> None:
        """See `ConsumeQueues.checkpoint`."""
        with self._checkpoint_lock:
            with self._lock:
                self._position = position = max(position, self._position)
                is_full = self._full_frame_due or self._journal.is_full_due
                if position == self._checkpoint_position and not self._changed_ids and not is_full:
                    return
                encoded_parts: list[Buffer] = []
                for partition_id in self._queues if is_full else self._changed_ids:
                    queue = self._queues[partition_id]
                    encoded_parts += encode_part(
                        partition_id, queue, full=is_full or queue.must_rewrite
                    )
                    queue.mark_saved()
                self._changed_ids.clear()
                end, first_block = self._blocks.end, self._first_block
                self._full_frame_due = True
            self._blocks.sync()
            self._journal.write(encoded_parts, position=position, end=end, full=is_full)
            self._full_frame_due = False
            self._checkpoint_position = position
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
        self.close_unflushed()

    def close_unflushed(self) -> None:
        """See `ConsumeQueues.close_unflushed`."""
        self._journal.close()
        self._blocks.close()

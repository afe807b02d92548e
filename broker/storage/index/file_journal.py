"""The journal of the file index: the state that is not in the blocks, with one frame per
checkpoint. Does disk I/O through `Files`.

    index/journal-0000000001
    frame  = magic u32 | crc32c u32 of the rest | size u64 of the parts | position u64 | end u64
             | parts
    part   = partition_id u64 | first u64 | next u64 | last_ms i64 | blocks u32 | tail bytes u32
             | flags u32 | 0 u32
             | first offsets, first times, first positions, numbers of the blocks: i64 each
             | units of the tail

    flags  FULL: the part replaces the partition. Otherwise its blocks are added to the partition's,
           and its tail is added to the partition's tail, or replaces it if the part has blocks

`position` is the log position up to which every batch is in the index; `end` is the number of the
next block. The first damaged frame ends the journal: a frame counts only once it is durable. The
first frame of a new journal contains all partitions; it is durable before the old journal is
removed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import crc32c

from ....protocol.errors import DataFolderError
from ....protocol.text import parse_number
from ..append_file import Buffer
from ..files import AppendFile, Files
from .file_blocks import FOLDER
from .file_queue import Blocks, Queue

PREFIX = f"{FOLDER}/journal-"
MAGIC = 0x314A494B
FULL = 1
GROWTH_BYTES_MAX = 8 << 20
"""A new journal is begun when the current one exceeds twice its first frame by this many bytes."""
_FRAME = struct.Struct("<IIQQQ")
_PART = struct.Struct("<QQQqIIII")


def encode_part(partition_id: int, queue: Queue, *, full: bool) -> Iterable[Buffer]:
    """Yield the part of a partition: its changes since the last frame or, if `full`, its whole
    state.
    """
    blocks, count, tail = queue.state
    start = 0 if full else queue.saved_blocks
    units = bytes(tail) if full or start < count else bytes(tail[queue.saved_tail_bytes :])
    yield _PART.pack(
        partition_id,
        queue.first_offset,
        queue.next_offset,
        queue.last_ms,
        count - start,
        len(units),
        FULL if full else 0,
        0,
    )
    if start < count:
        for column in blocks.columns():
            yield column[start:count].tobytes()
    if units:
        yield units


def _apply_parts(queues: dict[int, Queue], view: memoryview) -> None:
    """Apply the parts of a frame to the partitions."""
    position = 0
    while position < len(view):
        partition_id, first, next_offset, last_ms, count, size, flags, _ = _PART.unpack_from(
            view, position
        )
        position += _PART.size
        queue = queues.get(partition_id)
        if queue is None or flags & FULL:
            queue = queues[partition_id] = Queue(first)
        queue.first_offset = first
        queue.next_offset = next_offset
        queue.last_ms = last_ms
        blocks, block_count, tail = queue.state
        if count:
            if not block_count:
                blocks = Blocks()
            for column in blocks.columns():
                column.frombytes(view[position : position + 8 * count])
                position += 8 * count
            tail = bytearray()
        tail += view[position : position + size]
        position += size
        queue.state = (blocks, block_count + count, tail)


class Journal:
    """The journal of the index. Only one thread may use it at a time."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._number = 0
        self._file: AppendFile | None = None
        self._size = 0
        self._first_size = 0

    def _list_numbers(self) -> list[int]:
        names = (f"{FOLDER}/{name}" for name in self._files.list(FOLDER))
        return [
            int(name[len(PREFIX) :])
            for name in names
            if name.startswith(PREFIX) and parse_number(name[len(PREFIX) :]) is not None
        ]

    def load(self) -> tuple[dict[int, Queue], int, int]:
        """Return the partitions, the log position up to which they are complete, and the number of
        the next block. If there is no intact frame, they are empty, 0 and 0.
        """
        queues: dict[int, Queue] = {}
        numbers = self._list_numbers()
        position = end = 0
        for number in reversed(numbers):
            position, end = self._replay(number, queues)
            if self._size:
                self._number = number
                break
        if numbers and numbers[-1] != self._number:
            # The first frame of a newer journal is damaged. Neither journal may be extended, so
            # begin a new one.
            self._number = numbers[-1]
            self._size = 0
        for queue in queues.values():
            queue.mark_saved()
        return queues, position, end

    def _replay(self, number: int, queues: dict[int, Queue]) -> tuple[int, int]:
        """Apply the intact frames of a journal. Return the position and block end of the last
        one.
        """
        path = _path(number)
        size = self._files.size(path) or 0
        self._size = self._first_size = 0
        position = end = 0
        while True:
            head = self._files.pread(path, self._size, _FRAME.size)
            if len(head) < _FRAME.size:
                return position, end
            magic, crc, length, frame_position, frame_end = _FRAME.unpack(head)
            if magic != MAGIC:
                self._refuse_newer(path, head)
                return position, end
            if self._size + _FRAME.size + length > size:
                return position, end
            data = self._files.pread(path, self._size + _FRAME.size, length)
            if crc32c.crc32c(data, crc32c.crc32c(head[8:])) != crc:
                return position, end
            _apply_parts(queues, memoryview(data))
            position, end = frame_position, frame_end
            self._size += _FRAME.size + length
            self._first_size = self._first_size or self._size

    def _refuse_newer(self, path: str, head: bytes) -> None:
        """Raise DataFolderError if this is an intact frame of a newer format. One digit of the
        magic is the format.
        """
        magic, crc, length, *_ = _FRAME.unpack(head)
        version = (magic >> 24) - 0x30
        if magic & 0xFFFFFF != MAGIC & 0xFFFFFF or not 1 < version < 10:
            return
        data = self._files.pread(path, self._size + _FRAME.size, length)
        if crc32c.crc32c(data, crc32c.crc32c(head[8:])) == crc:
            raise DataFolderError(
                f"{self._files.name()}/{path} has format {version}, this broker writes format 1",
                path=path,
            )

    @property
    def is_full_due(self) -> bool:
        """True if the next frame must contain all partitions."""
        return not self._size or self._size > 2 * self._first_size + GROWTH_BYTES_MAX

    def write(self, parts: list[Buffer], *, position: int, end: int, full: bool) -> None:
        """
        Write a frame, durably. If `full`, the frame begins a new journal.

        Raises:
            StorageError: the frame was not written, so the next one must contain all partitions.
        """
        data = b"".join(parts)
        fields = struct.pack("<QQQ", len(data), position, end)
        crc = crc32c.crc32c(data, crc32c.crc32c(fields))
        frame = struct.pack("<II", MAGIC, crc) + fields
        size, self._size = self._size, 0
        if full:
            size = 0
            self.close()
            self._number += 1
        if self._file is None:
            self._file = self._files.open_append(_path(self._number))
        if self._file.size != size:
            self._file.truncate(size)
        self._file.append([frame, data])
        self._file.fdatasync()
        if full:
            self._files.sync_folder(FOLDER)
            for number in self._list_numbers():
                if number != self._number:
                    self._files.remove(_path(number))
            self._first_size = len(frame) + len(data)
        self._size = size + len(frame) + len(data)

    def clear(self) -> None:
        """Remove all journals, durably."""
        self.close()
        self._size = 0
        for number in self._list_numbers():
            self._files.remove(_path(number))
        self._files.sync_folder(FOLDER)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _path(number: int) -> str:
    return f"{PREFIX}{number:010d}"

"""Blocks of units, 4 KiB each, in files that all partitions share. Does disk I/O through `Files`.

    index/00000000000000000000.blocks   index/00000000000000016384.blocks   …
        each named by its first block
    block = magic u32 | crc32c u32 of the rest | partition_id u64 | count u32 | 12 bytes of 0
            | 127 units of 32 bytes
    ┌─────────────────┬──────────────┬────────────────────┬────────────┬───────────┐
    │ base_offset  u64│ position  u64│ appended_at_ms  i64│ length  u32│ count  u32│  little-endian
    └─────────────────┴──────────────┴────────────────────┴────────────┴───────────┘

Blocks of all partitions are numbered together and share the files, so ten thousand partitions need
only one sync and a few descriptors. All units of a block belong to one partition, so one read
returns 127 units.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import crc32c

from ....protocol.errors import CorruptIndexError, StorageError
from ..files import AppendFile, Files, file_numbers
from .file_units import BLOCK_UNITS, UNITS_BYTES

FOLDER = "index"
SUFFIX = ".blocks"
BLOCK_BYTES = 4096
FILE_BLOCKS = 16_384
"""The number of blocks in a file, which makes a file 64 MiB large."""
MAGIC = 0x314B494B
_HEADER = struct.Struct("<IIQI12x")
_AFTER_CRC = struct.Struct("<QI12x")
assert _HEADER.size + UNITS_BYTES == BLOCK_BYTES


def encode_block(partition_id: int, units: bytes | bytearray) -> bytes:
    """Encode a full block for writing."""
    assert len(units) == UNITS_BYTES
    content = _AFTER_CRC.pack(partition_id, BLOCK_UNITS) + units
    return struct.pack("<II", MAGIC, crc32c.crc32c(content)) + content


def block_path(number: int) -> str:
    """Return the path of the file that contains this block."""
    return f"{FOLDER}/{number // FILE_BLOCKS * FILE_BLOCKS:020d}{SUFFIX}"


class BlockFiles:
    """The block files. One thread writes, one syncs, and many read."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.end = 0
        """The number of the next block."""
        self._open_files: dict[str, AppendFile] = {}
        """Maps paths to files: the last file, and those written since the last sync."""
        self._folder_unsynced = False
        """True if a file was created since the last sync."""
        self._sync_failure = ""
        """The text of the error of a failed sync; "" if no sync has failed."""

    def bases(self) -> list[int]:
        """Return the sorted numbers of the first blocks of the files on the disk."""
        return file_numbers(self._files.list(FOLDER), digits=20, suffix=SUFFIX)

    def write(self, block: bytes) -> int:
        """
        Write a block and return its number. The next sync makes the block durable.

        Raises:
            StorageError: the block was not written.
        """
        number = self.end
        path = block_path(number)
        file = self._open_files.get(path)
        if file is None:
            file = self._open_files[path] = self._files.open_append(path)
            self._folder_unsynced = True
        start = number % FILE_BLOCKS * BLOCK_BYTES
        if file.size != start:
            file.truncate(start)
        file.append([block])
        self.end += 1
        return number

    def read(self, number: int, partition_id: int) -> bytes:
        """
        Return the units of a block.

        Raises:
            CorruptIndexError: the block is damaged or missing, or belongs to another partition.
        """
        path = block_path(number)
        try:
            data = self._files.pread(path, number % FILE_BLOCKS * BLOCK_BYTES, BLOCK_BYTES)
        except StorageError as error:
            raise _damaged(path, number, error.message) from error
        if len(data) < BLOCK_BYTES:
            raise _damaged(path, number, "it is missing")
        magic, crc, owner, count = _HEADER.unpack_from(data)
        if magic != MAGIC or crc32c.crc32c(memoryview(data)[8:]) != crc:
            raise _damaged(path, number, "wrong checksum")
        if owner != partition_id or count != BLOCK_UNITS:
            raise _damaged(path, number, f"it belongs to partition {owner}")
        return data[_HEADER.size :]

    def sync(self) -> None:
        """
        Make all written blocks durable.

        Raises:
            FlushFailedError: blocks may have been lost; every later call raises StorageError.
        """
        if self._sync_failure:
            raise StorageError(self._sync_failure)
        # A block that is written during the sync may not be durable, so close only files that were
        # already full.
        current = block_path(self.end)
        files = list(self._open_files.items())
        try:
            for _, file in files:
                file.fdatasync()
            if self._folder_unsynced:
                self._folder_unsynced = False
                self._files.sync_folder(FOLDER)
        except StorageError as error:
            self._sync_failure = error.message
            raise
        for path, file in files:
            if path != current:
                del self._open_files[path]
                file.close()

    def contains(self, numbers: Iterable[int]) -> bool:
        """Return True if the block files contain all of these blocks, judging by the files'
        sizes.
        """
        last: dict[int, int] = {}
        for number in numbers:
            base = number - number % FILE_BLOCKS
            last[base] = max(last.get(base, 0), number)
        return all(
            (self._files.size(block_path(base)) or 0) >= (number - base + 1) * BLOCK_BYTES
            for base, number in last.items()
        )

    def cut(self, end: int) -> None:
        """Remove the blocks from number `end` on."""
        self.close()
        for base in self.bases():
            if base >= end:
                self._files.remove(block_path(base))
        self.end = end

    def drop(self, number: int) -> None:
        """Remove the files all of whose blocks come before this number."""
        for base in self.bases():
            if base + FILE_BLOCKS <= number and block_path(base) not in self._open_files:
                self._files.remove(block_path(base))

    def close(self) -> None:
        """Close the files."""
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()


def _damaged(path: str, number: int, reason: str) -> CorruptIndexError:
    return CorruptIndexError(
        f"block {number} of the index file {path} is damaged: {reason}",
        path=path,
    )

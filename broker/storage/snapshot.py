"""Snapshots of the broker's state. When the broker starts, it restores the newest one and replays
only the log that follows it. Does disk I/O through `Files`.

    snapshot/0000000007.snap      full: all partitions; incremental: those changed since the
                                  previous snapshot; little-endian

     0       4         8       12         16     17      18        20         24
     ┌───────┬─────────┬───────┬──────────┬──────┬───────┬─────────┬──────────┐
     │ magic │ own crc │version│ chunks   │ kind │ clean │ unused  │ extra    │
     ├───────┴─────────┼───────┴──────────┼──────┴───────┴─────────┴──────────┘
  24 │ position     u64│ file bytes    u64│ 40  extra: msgpack, `extra` bytes long, and its crc u32
     └─────────────────┴──────────────────┘
    chunk:  crc u32 of the rest │ count u32 │ bytes u32 │ ids u64×count │ lengths u32×count │
        images

Invariants
    A file is replaced atomically and durably; a damaged file counts as missing.
    A snapshot at position p contains the effects of all records below p. It may contain effects of
    later durable records; replaying these records again has no effect. The newest two full
    snapshots are kept, each with the incremental ones that follow it.
"""

from __future__ import annotations

import logging
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import crc32c
import msgspec

from ...protocol.errors import DataFolderError, StorageError
from .append_file import Buffer
from .files import Files, file_numbers, replace_file

log = logging.getLogger("keylane.broker")

FOLDER = "snapshot"
SUFFIX = ".snap"
MAGIC = 0x4E534C4B
VERSION, VERSION_WITH_SCHEDULED = 1, 2
FULL, INCREMENTAL = 1, 2
INCREMENTAL_MAX = 100
"""The maximum number of incremental snapshots after a full one. It limits the number of files that
must be opened when the broker starts.
"""
_HEAD = struct.Struct("<IIIIBBHIQQ")
_CHUNK = struct.Struct("<III")
_U32 = struct.Struct("<I")


class Extra(msgspec.Struct, array_like=True):
    """The part of the state that does not belong to hosted partitions; see `BrokerState`."""

    orphans: dict[int, int] = {}
    problems: list[str] = []
    retained: int = 0
    """The log position for which first offsets were last corrected. They are correct if the log
    begins there or earlier.
    """
    damaged: list[int] = []
    """The ids of partitions that have lost messages."""
    dropped: list[tuple[list[tuple[int, int]], dict[str, int]]] = []
    """The bodies of the DROPPED records of all dropped partitions."""
    has_scheduled: bool = False
    """True if a copy of the scheduled messages was saved before this snapshot, which a broker that
    does not know SCHEDULED records must not miss.
    """

    def pack(self) -> bytes:
        """Return the bytes that are stored in the file. Trailing fields with default values are
        omitted.
        """
        optional: tuple[object, ...] = (self.retained,) if self.retained else ()
        if self.damaged:
            optional = (self.retained, self.damaged)
        if self.dropped:
            optional = (self.retained, self.damaged, self.dropped)
        if self.has_scheduled:
            optional = (self.retained, self.damaged, self.dropped, True)
        return msgspec.msgpack.encode((self.orphans, self.problems, *optional))


@dataclass(slots=True)
class LoadedSnapshot:
    """A snapshot that was read. If there was none, the position is 0 and `extra` is None."""

    position: int = 0
    clean: bool = False
    """True if the snapshot was written during a clean shutdown, when the log ended at
    `position`.
    """
    extra: Extra | None = None


def encode_chunk(images: Sequence[tuple[int, bytes]]) -> bytes:
    """Return a chunk of a snapshot file with the given (partition id, image) pairs."""
    ids = array("Q", [number for number, _ in images])
    lengths = array("I", [len(image) for _, image in images])
    body = b"".join((ids.tobytes(), lengths.tobytes(), *(image for _, image in images)))
    head = struct.pack("<II", len(images), len(body))
    return b"".join((_U32.pack(crc32c.crc32c(body, crc32c.crc32c(head))), head, body))


def _encode_header(
    chunks: Sequence[bytes], *, kind: int, clean: bool, position: int, extra: Extra
) -> bytes:
    packed = extra.pack()
    size = _HEAD.size + len(packed) + 4 + sum(map(len, chunks))
    version = VERSION_WITH_SCHEDULED if extra.has_scheduled else VERSION
    encoded_fields = _HEAD.pack(
        MAGIC, 0, version, len(chunks), kind, clean, 0, len(packed), position, size
    )[8:]
    start = struct.pack("<II", MAGIC, crc32c.crc32c(encoded_fields))
    return b"".join((start, encoded_fields, packed, _U32.pack(crc32c.crc32c(packed))))


class _DamagedError(Exception):
    pass


class Snapshots:
    """The snapshot files of a folder. They may be used by only one thread at a time."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._kinds: dict[int, int] = {}
        """Maps the numbers of the files whose headers are intact to their kinds."""
        self._next_number = 1
        self._full_bytes = 0
        self._incremental_bytes = 0

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def load(self, on_image: Callable[[int, bytes], None]) -> LoadedSnapshot:
        """
        Read the newest snapshot, and call `on_image(partition_id, image)` for each of its images.
        Later images of a partition replace earlier ones.

        Raises:
            DataFolderError: a newer broker wrote a snapshot.
        """
        numbers = self._list_numbers()
        self._next_number = max(numbers, default=0) + 1
        headers = {number: self._read_header(number) for number in numbers}
        self._kinds = {
            number: header[0] for number, header in headers.items() if header is not None
        }
        for full in [number for number in reversed(numbers) if self._kinds.get(number) == FULL]:
            chain = [full]
            while self._kinds.get(chain[-1] + 1) == INCREMENTAL:
                chain.append(chain[-1] + 1)
            snapshot = self._load_chain(chain, on_image)
            if snapshot is not None:
                return snapshot
        if numbers:
            log.warning("every snapshot is damaged; rebuilding the state from the log")
        return LoadedSnapshot()

    def _load_chain(
        self, chain: list[int], on_image: Callable[[int, bytes], None]
    ) -> LoadedSnapshot | None:
        """Read a full snapshot and the incremental ones that follow it, up to the first damaged
        file. Return the last one, or None if the full one is damaged.
        """
        newest_snapshot = None
        for number in chain:
            try:
                snapshot = self._read(number, on_image)
            except (_DamagedError, StorageError) as error:
                log.warning("the snapshot %s is damaged: %s", _path(number), error)
                self._kinds.pop(number, None)
                break
            size = self._files.size(_path(number)) or 0
            if newest_snapshot is None:
                self._full_bytes = size
                self._incremental_bytes = 0
            else:
                self._incremental_bytes += size
            newest_snapshot = snapshot
        return newest_snapshot

    def _list_numbers(self) -> list[int]:
        return file_numbers(self._files.list(FOLDER), digits=10, suffix=SUFFIX)

    def _read_header(self, number: int) -> tuple[int, ...] | None:
        """Return the kind, clean flag, position, number of chunks, number of extra bytes and size,
        or None if the header is damaged.
        """
        data = self._files.pread(_path(number), 0, _HEAD.size)
        if len(data) < _HEAD.size:
            return None
        magic, crc, version, chunks, kind, clean, _, extra, position, size = _HEAD.unpack(data)
        if magic != MAGIC or crc32c.crc32c(data[8:]) != crc:
            return None
        if version > VERSION_WITH_SCHEDULED:
            raise DataFolderError(
                f"{self._files.name()}/{_path(number)} has format {version}, "
                f"this broker writes format {VERSION_WITH_SCHEDULED}",
                path=_path(number),
            )
        return kind, clean, position, chunks, extra, size

    def _read(self, number: int, on_image: Callable[[int, bytes], None]) -> LoadedSnapshot:
        """Verify the whole file, then call `on_image` for its images."""
        header = self._read_header(number)
        if header is None:
            raise _DamagedError("bad header")
        _, clean, position, chunks, extra_bytes, size = header
        data = self._files.pread(_path(number), 0, size + 1)
        if len(data) != size:
            raise _DamagedError(f"it has {len(data)} bytes, not {size}")
        chunk_start = _HEAD.size + extra_bytes + 4
        packed_extra = data[_HEAD.size : chunk_start - 4]
        if _U32.unpack_from(data, chunk_start - 4)[0] != crc32c.crc32c(packed_extra):
            raise _DamagedError("bad checksum of the state besides the partitions")
        extra = msgspec.msgpack.decode(packed_extra, type=Extra)
        starts = []
        for _ in range(chunks):
            starts.append(chunk_start)
            chunk_start = _check_chunk(data, chunk_start)
        for start in starts:
            _read_chunk(data, start, on_image)
        return LoadedSnapshot(position, bool(clean), extra)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────
    def is_full_due(self) -> bool:
        """Return True if the next snapshot must be a full one."""
        last_number = self._next_number - 1
        full = max((number for number, kind in self._kinds.items() if kind == FULL), default=None)
        if full is None or any(
            number not in self._kinds for number in range(full, self._next_number)
        ):
            return True
        is_large = self._incremental_bytes > self._full_bytes + (1 << 20)
        return is_large or last_number - full >= INCREMENTAL_MAX

    def write(
        self, chunks: Sequence[bytes], *, full: bool, clean: bool, position: int, extra: Extra
    ) -> None:
        """
        Write a snapshot, durably, and remove snapshots that are no longer needed.

        Raises:
            StorageError: the snapshot was not written; earlier snapshots are unchanged.
        """
        kind = FULL if full else INCREMENTAL
        number = self._next_number
        header = _encode_header(chunks, kind=kind, clean=clean, position=position, extra=extra)
        pieces: list[Buffer] = [header, *chunks]
        self._files.make_folder(FOLDER)
        replace_file(self._files, _path(number), *pieces)
        self._next_number = number + 1
        self._kinds[number] = kind
        size = sum(map(len, pieces))
        if full:
            self._full_bytes = size
            self._incremental_bytes = 0
            self._remove_old()
        else:
            self._incremental_bytes += size

    def _remove_old(self) -> None:
        """Remove all snapshots that precede the second newest full one."""
        full_snapshots = sorted(number for number, kind in self._kinds.items() if kind == FULL)
        first_kept_number = full_snapshots[-2] if len(full_snapshots) > 1 else full_snapshots[-1]
        for number in self._list_numbers():
            if number < first_kept_number:
                self._kinds.pop(number, None)
                self._files.remove(_path(number))


def _check_chunk(data: bytes, position: int) -> int:
    """Verify the chunk at byte `position`, and return the position that follows it."""
    if len(data) - position < _CHUNK.size:
        raise _DamagedError("it is truncated")
    crc, count, length = _CHUNK.unpack_from(data, position)
    end: int = position + _CHUNK.size + length
    is_complete = end <= len(data) and count * 12 <= length
    if not is_complete or crc32c.crc32c(memoryview(data)[position + 4 : end]) != crc:
        raise _DamagedError(f"bad chunk at byte {position}")
    return end


def _read_chunk(data: bytes, position: int, on_image: Callable[[int, bytes], None]) -> None:
    """Call `on_image` for the images of the verified chunk at byte `position`."""
    count: int = _CHUNK.unpack_from(data, position)[1]
    position += _CHUNK.size
    ids: array[int] = array("Q", data[position : position + 8 * count])
    lengths: array[int] = array("I", data[position + 8 * count : position + 12 * count])
    position += 12 * count
    for number, size in zip(ids, lengths, strict=True):
        on_image(number, data[position : position + size])
        position += size


def _path(number: int) -> str:
    return f"{FOLDER}/{number:010d}{SUFFIX}"

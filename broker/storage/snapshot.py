"""Snapshots of the broker's state, so that a start reads only the log after them. Disk, through
`Files`.

    snapshot/0000000007.snap      all partitions, or those changed since the previous snapshot;
                                  little-endian

     0       4         8       12         16     17      18        20         24
     ┌───────┬─────────┬───────┬──────────┬──────┬───────┬─────────┬──────────┐
     │ magic │ own crc │version│ chunks   │ kind │ clean │ nothing │ extra    │
     ├───────┴─────────┼───────┴──────────┼──────┴───────┴─────────┴──────────┘
  24 │ position     u64│ file bytes    u64│ 40  extra: msgpack, `extra` bytes long, and its crc u32
     └─────────────────┴──────────────────┘
    chunk:  crc u32 of what follows │ count u32 │ bytes u32 │ ids u64×count │ lengths u32×count │
        images

Invariants
    A file is replaced atomically and durably; a damaged file counts as missing.
    A snapshot at position p has the effect of every record below p. It may have effects of durable
    later records, which do not change when the record is folded again. The newest two whole
    snapshots are kept, each with the snapshots of changes after it.
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
from .files import Files, replace_file

log = logging.getLogger("keylane.broker")

FOLDER = "snapshot"
SUFFIX = ".snap"
MAGIC = 0x4E534C4B
VERSION = 1
WHOLE, CHANGES = 1, 2
CHANGES_MAX = 100
"""The number of snapshots of changes after a whole snapshot. It limits the number of files that a
start opens.
"""
_HEAD = struct.Struct("<IIIIBBHIQQ")
_CHUNK = struct.Struct("<III")
_U32 = struct.Struct("<I")


class Extra(msgspec.Struct, array_like=True):
    """The state in a snapshot besides the partitions; see `BrokerState`."""

    orphans: dict[int, int] = {}
    problems: list[str] = []
    retained: int = 0
    """The position that first offsets fit if the log begins there or earlier."""
    damaged: list[int] = []
    """The partitions that have lost messages."""
    dropped: list[tuple[list[tuple[int, int]], dict[str, int]]] = []
    """The bodies of DROPPED records of all dropped partitions."""

    def packed(self) -> bytes:
        """Return the bytes in the file. Later fields are written only if they do not have their
        defaults.
        """
        more: tuple[object, ...] = (self.retained,) if self.retained else ()
        if self.damaged:
            more = (self.retained, self.damaged)
        if self.dropped:
            more = (self.retained, self.damaged, self.dropped)
        return msgspec.msgpack.encode((self.orphans, self.problems, *more))


@dataclass(slots=True)
class Loaded:
    """The newest snapshot on the disk. If there is none, the position is 0 and `extra` is None."""

    position: int = 0
    clean: bool = False
    """True if the snapshot was written at a clean stop: the log ended at `position`."""
    extra: Extra | None = None


def encode_chunk(images: Sequence[tuple[int, bytes]]) -> bytes:
    """Return a chunk of a snapshot for images of partitions, given as (partition id, image)."""
    ids = array("Q", [number for number, _ in images])
    lengths = array("I", [len(image) for _, image in images])
    body = b"".join((ids.tobytes(), lengths.tobytes(), *(image for _, image in images)))
    head = struct.pack("<II", len(images), len(body))
    return b"".join((_U32.pack(crc32c.crc32c(body, crc32c.crc32c(head))), head, body))


def _encode_head(
    chunks: Sequence[bytes], *, kind: int, clean: bool, position: int, extra: Extra
) -> bytes:
    packed = extra.packed()
    size = _HEAD.size + len(packed) + 4 + sum(map(len, chunks))
    after = _HEAD.pack(MAGIC, 0, VERSION, len(chunks), kind, clean, 0, len(packed), position, size)[
        8:
    ]
    own = struct.pack("<II", MAGIC, crc32c.crc32c(after))
    return b"".join((own, after, packed, _U32.pack(crc32c.crc32c(packed))))


class _DamagedError(Exception):
    pass


class Snapshots:
    """The snapshot files of a folder. Only one thread at a time may use them."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._kinds: dict[int, int] = {}
        """The number of an undamaged file → its kind."""
        self._next = 1
        self._whole_bytes = 0
        self._changed_bytes = 0

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def load(self, take: Callable[[int, bytes], None]) -> Loaded:
        """
        Call `take` with every partition id and image of the newest snapshot. The last image of a
        partition counts.

        Raises:
            DataFolderError: a newer broker wrote a snapshot.
        """
        numbers = self._numbers()
        self._next = max(numbers, default=0) + 1
        heads = {number: self._head(number) for number in numbers}
        self._kinds = {number: head[0] for number, head in heads.items() if head is not None}
        for whole in [number for number in reversed(numbers) if self._kinds.get(number) == WHOLE]:
            chain = [whole]
            while self._kinds.get(chain[-1] + 1) == CHANGES:
                chain.append(chain[-1] + 1)
            loaded = self._load_chain(chain, take)
            if loaded is not None:
                return loaded
        if numbers:
            log.warning("every snapshot is damaged; rebuilding the state from the log")
        return Loaded()

    def _load_chain(self, chain: list[int], take: Callable[[int, bytes], None]) -> Loaded | None:
        loaded = None
        for number in chain:
            try:
                link = self._read(number, take)
            except (_DamagedError, StorageError) as error:
                log.warning("the snapshot %s is damaged: %s", _path(number), error)
                self._kinds.pop(number, None)
                break
            size = self._files.size(_path(number)) or 0
            if loaded is None:
                self._whole_bytes = size
                self._changed_bytes = 0
            else:
                self._changed_bytes += size
            loaded = link
        return loaded

    def _numbers(self) -> list[int]:
        return [
            int(name[:10])
            for name in self._files.list(FOLDER)
            if len(name) == 10 + len(SUFFIX)
            and name.endswith(SUFFIX)
            and name[:10].isascii()
            and name[:10].isdecimal()
        ]

    def _head(self, number: int) -> tuple[int, ...] | None:
        """Return kind, clean, position, chunks, extra bytes and size, or None if the head is
        damaged.
        """
        data = self._files.pread(_path(number), 0, _HEAD.size)
        if len(data) < _HEAD.size:
            return None
        magic, own, version, chunks, kind, clean, _, extra, position, size = _HEAD.unpack(data)
        if magic != MAGIC or crc32c.crc32c(data[8:]) != own:
            return None
        if version > VERSION:
            raise DataFolderError(
                f"{self._files.name()}/{_path(number)} has format {version}, "
                f"this broker writes format {VERSION}",
                path=_path(number),
            )
        return kind, clean, position, chunks, extra, size

    def _read(self, number: int, take: Callable[[int, bytes], None]) -> Loaded:
        """Check the whole file, then call `take` with its images."""
        head = self._head(number)
        if head is None:
            raise _DamagedError("its head")
        _, clean, position, chunks, extra_bytes, size = head
        data = self._files.pread(_path(number), 0, size + 1)
        if len(data) != size:
            raise _DamagedError(f"{len(data)} bytes, not {size}")
        at = _HEAD.size + extra_bytes + 4
        packed = data[_HEAD.size : at - 4]
        if _U32.unpack_from(data, at - 4)[0] != crc32c.crc32c(packed):
            raise _DamagedError("the state besides the partitions")
        extra = msgspec.msgpack.decode(packed, type=Extra)
        positions = []
        for _ in range(chunks):
            positions.append(at)
            at = _check_chunk(data, at)
        for start in positions:
            _take_chunk(data, start, take)
        return Loaded(position, bool(clean), extra)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────
    def wants_whole(self) -> bool:
        """Return True if the next snapshot has to be a whole one."""
        last = self._next - 1
        whole = max((number for number, kind in self._kinds.items() if kind == WHOLE), default=None)
        if whole is None or any(number not in self._kinds for number in range(whole, self._next)):
            return True
        grown = self._changed_bytes > self._whole_bytes + (1 << 20)
        return grown or last - whole >= CHANGES_MAX

    def write(
        self, chunks: Sequence[bytes], *, whole: bool, clean: bool, position: int, extra: Extra
    ) -> None:
        """
        Write a snapshot, durably, and remove the snapshots that are no longer needed.

        Raises:
            StorageError: the snapshot could not be written; earlier snapshots are unchanged.
        """
        kind = WHOLE if whole else CHANGES
        number = self._next
        head = _encode_head(chunks, kind=kind, clean=clean, position=position, extra=extra)
        pieces: list[Buffer] = [head, *chunks]
        self._files.make_folder(FOLDER)
        replace_file(self._files, _path(number), *pieces)
        self._next = number + 1
        self._kinds[number] = kind
        size = sum(map(len, pieces))
        if whole:
            self._whole_bytes = size
            self._changed_bytes = 0
            self._remove_old()
        else:
            self._changed_bytes += size

    def _remove_old(self) -> None:
        whole = sorted(number for number, kind in self._kinds.items() if kind == WHOLE)
        keep_from = whole[-2] if len(whole) > 1 else whole[-1]
        for number in self._numbers():
            if number < keep_from:
                self._kinds.pop(number, None)
                self._files.remove(_path(number))


def _check_chunk(data: bytes, at: int) -> int:
    """Check the chunk at byte `at`, and return where it ends."""
    if len(data) - at < _CHUNK.size:
        raise _DamagedError("cut short")
    crc, count, length = _CHUNK.unpack_from(data, at)
    end: int = at + _CHUNK.size + length
    whole = end <= len(data) and count * 12 <= length
    if not whole or crc32c.crc32c(memoryview(data)[at + 4 : end]) != crc:
        raise _DamagedError(f"the chunk at byte {at}")
    return end


def _take_chunk(data: bytes, at: int, take: Callable[[int, bytes], None]) -> None:
    count: int = _CHUNK.unpack_from(data, at)[1]
    at += _CHUNK.size
    ids: array[int] = array("Q", data[at : at + 8 * count])
    lengths: array[int] = array("I", data[at + 8 * count : at + 12 * count])
    at += 12 * count
    for number, size in zip(ids, lengths, strict=True):
        take(number, data[at : at + size])
        at += size


def _path(number: int) -> str:
    return f"{FOLDER}/{number:010d}{SUFFIX}"

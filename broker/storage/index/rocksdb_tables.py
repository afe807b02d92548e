"""The RocksDB database of the index: its two column families, their keys and values, and its
options. The library does the disk I/O.

    units    partition u64, base_offset u64  → position u64, appended_at_ms i64, length u32,
                                               count u32
    bounds   partition u64, 0                → first offset u64, position of its batch u64
             partition u64, 1                → next offset u64, position of the last batch u64,
                                               time of the last batch i64
             "position"                      → log position up to which every batch is in the index
             "format"                        → version u32, 1; a newer version is refused

Keys are big-endian, so that they sort as numbers; values are little-endian.
"""

from __future__ import annotations

import gc
import logging
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from rocksdict import (
    AccessType,
    BlockBasedIndexType,
    BlockBasedOptions,
    Cache,
    ColumnFamily,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    RdictIter,
    WriteBatch,
)

from ....protocol.errors import CorruptIndexError, DataFolderError, DiskFullError, StorageError
from ..fail_points import ignore_fail_point
from .interface import Unit
from .rocksdb_waiting import End


class SharedLock:
    """A readers-writer lock that prefers writers. Not reentrant.

    Readers of the database share the lock; it is held exclusively while the database is reopened.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writer = False
        """True if a thread holds the lock exclusively, or waits for the readers to release it."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with other readers. Threads that want to hold it exclusively come
        first.
        """
        with self._condition:
            while self._writer:
                self._condition.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                if not self._readers:
                    self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock exclusively, after all readers have released it."""
        with self._condition:
            while self._writer:
                self._condition.wait()
            self._writer = True
            while self._readers:
                self._condition.wait()
        try:
            yield
        finally:
            with self._condition:
                self._writer = False
                self._condition.notify_all()


log = logging.getLogger("keylane.broker")

MEMTABLE_BYTES = 16 << 20
CACHE_BYTES = 64 << 20
FILTER_PART_BYTES = 4 << 10
"""The size, in bytes, of the partitions of filters and indexes. A lookup reads one of them, and
they are cached separately.
"""
OPEN_FILES_MAX = 256
FIRST, END = 0, 1
KEY = struct.Struct(">QQ")
BOUND = struct.Struct(">QB")
UNIT_VALUE = struct.Struct("<QqII")
FIRST_VALUE = struct.Struct("<QQ")
END_VALUE = struct.Struct("<QQq")
FORMAT = 1
REOPEN_BYTES = 1 << 20
_FORMAT = b"format"
_FULL = ("No space left on device", "Disk quota exceeded")
_DAMAGED = ("Corruption:", "No such file or directory")
_STILL_OPEN = "lock hold by current process"
_POSITION = b"position"
_POSITION_VALUE = struct.Struct("<Q")


def _build_options(cache: Cache) -> Options:
    tables = BlockBasedOptions()
    tables.set_block_cache(cache)
    tables.set_block_size(16 << 10)
    tables.set_bloom_filter(10, block_based=False)
    # The filter or index of a table with a million bounds is larger than a shard of the cache, so
    # each lookup would read it again. Its partitions are read and cached separately.
    tables.set_index_type(BlockBasedIndexType.two_level_index_search())
    tables.set_partition_filters(True)
    tables.set_metadata_block_size(FILTER_PART_BYTES)
    tables.set_pin_top_level_index_and_filter(True)
    tables.set_cache_index_and_filter_blocks(True)
    tables.set_pin_l0_filter_and_index_blocks_in_cache(True)
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(tables)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_write_buffer_size(MEMTABLE_BYTES)
    options.set_max_write_buffer_number(3)
    options.set_max_total_wal_size(4 * MEMTABLE_BYTES)
    options.set_max_open_files(OPEN_FILES_MAX)
    options.set_max_background_jobs(2)
    options.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(1 << 20)
    options.set_stats_dump_period_sec(0)
    return options


def storage_error(error: Exception) -> StorageError:
    """Convert an exception of the library according to its text, because the library has only one
    exception class.
    """
    text = f"the RocksDB index: {error}"
    if any(sign in text for sign in _FULL):
        return DiskFullError(text)
    if isinstance(error, struct.error) or any(sign in text for sign in _DAMAGED):
        return CorruptIndexError(text)
    return StorageError(text)


@contextmanager
def library_errors() -> Iterator[None]:
    """Convert the library's exceptions to StorageError or a subclass of it."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise storage_error(error) from error


def _retry_after_gc(function: Callable[[], None]) -> None:
    """Call a function that needs the database to be closed. If the database is still open, collect
    garbage and call the function again: exceptions of failed reads may keep iterators, and thereby
    the database, alive in reference cycles.
    """
    try:
        function()
    except Exception as error:
        if _STILL_OPEN not in str(error):
            raise
        gc.collect()
        function()


def unit_of_row(base_offset: int, value: bytes) -> Unit:
    """Return the unit in a row of the family `units`."""
    position, appended_at_ms, length, count = UNIT_VALUE.unpack(value)
    return Unit(base_offset, count, position, length, appended_at_ms)


class RocksTables:
    """The database in the folder `path`. Unless `read_only` is true, a damaged database is replaced
    with an empty one.
    """

    def __init__(
        self,
        path: str,
        *,
        read_only: bool = False,
        reach: Callable[[str], None] = ignore_fail_point,
    ) -> None:
        self._path = path
        self._reach = reach
        self._read_only = read_only
        self.lock = SharedLock()
        """Shared by readers, and held exclusively while the database is reopened."""
        self.needs_reopen = False
        """True if a write has failed. The library then rejects writes until the database is
        reopened.
        """
        try:
            with library_errors():
                self._connect()
        except CorruptIndexError as error:
            if read_only:
                raise
            log.warning("the RocksDB index is rebuilt from the log: %s", error.message)
            with library_errors():
                Rdict.destroy(path)
                self._connect()

    def _connect(self) -> None:
        """Open or create the database. Raises DataFolderError if it has a newer format."""
        cache = Cache(CACHE_BYTES)
        families = {"bounds": _build_options(cache)}
        access = AccessType.read_only(False) if self._read_only else AccessType.read_write()
        units = Rdict(
            self._path, _build_options(cache), column_families=families, access_type=access
        )
        bounds = units.get_column_family("bounds")
        stored_format = bounds.get(_FORMAT)
        if (
            stored_format is not None
            and (version := int.from_bytes(stored_format, "little")) > FORMAT
        ):
            bounds.close()
            units.close()
            raise DataFolderError(
                f"{self._path} has format {version}, this broker writes format {FORMAT}",
                path=self._path,
            )
        if stored_format is None and not self._read_only:
            bounds.put(_FORMAT, FORMAT.to_bytes(4, "little"))
        self._units = units
        self._bounds = bounds
        self._family: ColumnFamily = units.get_column_family_handle("bounds")
        self.needs_reopen = False

    def reopen(self) -> None:
        """
        Reopen the database after a failed write.

        Raises:
            DiskFullError: the disk has too little free space.
        """
        folder = Path(self._path)
        needed_bytes = REOPEN_BYTES + sum(file.stat().st_size for file in folder.glob("*.log"))
        if shutil.disk_usage(folder).free < needed_bytes:
            raise DiskFullError(f"the RocksDB index needs {needed_bytes} free bytes to be reopened")
        with self.lock.exclusive(), library_errors():
            self.close()
            _retry_after_gc(self._connect)

    def clear(self) -> None:
        """Replace the database with an empty one."""
        self.close()
        self._reach("index-clear")
        _retry_after_gc(lambda: Rdict.destroy(self._path))
        self._reach("index-cleared")
        self._connect()

    def close(self) -> None:
        """Close the database. The library keeps it open until its iterators are freed."""
        for name in ("_bounds", "_units"):
            table = self.__dict__.pop(name, None)
            if table is not None:
                try:
                    table.close()
                except Exception as error:  # noqa: BLE001  # treat it as closed
                    log.warning("the RocksDB index: %s", error)
        self.__dict__.pop("_family", None)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────
    def put_first(self, batch: WriteBatch, partition_id: int, first: int, position: int) -> None:
        """Set a partition's first offset, and the log position of its first batch."""
        batch.put(BOUND.pack(partition_id, FIRST), FIRST_VALUE.pack(first, position), self._family)

    def put_end(self, batch: WriteBatch, partition_id: int, end: End) -> None:
        """Set a partition's end."""
        batch.put(BOUND.pack(partition_id, END), END_VALUE.pack(*end), self._family)

    def put_position(self, batch: WriteBatch, position: int) -> None:
        """Set the log position up to which every batch is in the index."""
        batch.put(_POSITION, _POSITION_VALUE.pack(position), self._family)

    def delete_bounds(self, batch: WriteBatch, partition_id: int) -> None:
        """Delete a partition's bounds, as if none of its batches had ever been dispatched."""
        batch.delete(BOUND.pack(partition_id, FIRST), self._family)
        batch.delete(BOUND.pack(partition_id, END), self._family)

    def write(self, batch: WriteBatch) -> None:
        """Write a batch, atomically."""
        self._reach("index-write")
        try:
            self._units.write(batch)
        except Exception:
            self.needs_reopen = True
            raise
        self._reach("index-written")

    def sync(self) -> None:
        """Make all writes durable."""
        self._reach("index-sync")
        self._units.flush_wal(True)
        self._reach("index-synced")

    def flush(self) -> None:
        """Write the tables, so that the write-ahead log does not have to be replayed at the next
        start.
        """
        self._reach("index-flush")
        self._bounds.flush()
        self._units.flush()
        self._reach("index-flushed")

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def position(self) -> int:
        """Return the log position up to which every batch is in the index."""
        value = self._bounds.get(_POSITION)
        return 0 if value is None else int(_POSITION_VALUE.unpack(value)[0])

    def ends(self, partition_ids: list[int]) -> list[End | None]:
        """Return the ends of partitions, using one multi-get. They are None if unknown."""
        values = (
            self._bounds.get([BOUND.pack(partition_id, END) for partition_id in partition_ids])
            or []
        )
        return [None if value is None else End(*END_VALUE.unpack(value)) for value in values]

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """Return a partition's first and next offset, or None if it has no bounds."""
        keys: list[str | int | float | bytes | bool] = [
            BOUND.pack(partition_id, FIRST),
            BOUND.pack(partition_id, END),
        ]
        first, end = self._bounds.get(keys) or (None, None)
        if first is None or end is None:
            return None
        return FIRST_VALUE.unpack(first)[0], END_VALUE.unpack(end)[0]

    def all_bounds(self, start: int = 0) -> Iterator[tuple[int, int, int, End]]:
        """Yield (partition id, first offset, its position, end) for all partitions whose id is
        `start` or higher.
        """
        rows = self._bounds.items(from_key=BOUND.pack(start, 0))
        pairs = cast("Iterable[tuple[bytes, bytes]]", rows)
        first = -1, -1, -1
        for key, value in pairs:
            if len(key) != BOUND.size:
                continue
            partition_id, kind = BOUND.unpack(key)
            if kind == FIRST:
                first = (partition_id, *FIRST_VALUE.unpack(value))
            elif first[0] == partition_id:
                yield *first, End(*END_VALUE.unpack(value))

    def units(self) -> RdictIter:
        """Return an iterator over the units of all partitions. It has no key bounds, because the
        library would free them too early.
        """
        return self._units.iter()


def current_unit(units: RdictIter) -> Unit:
    """Return the unit that an iterator points to."""
    return unit_of_row(KEY.unpack(units.key())[1], units.value())


def unit_at(units: RdictIter, partition_id: int, offset: int) -> Unit:
    """
    Move an iterator to the unit that contains an offset, and return the unit.

    Raises:
        CorruptIndexError: there is no such unit.
    """
    units.seek_for_prev(KEY.pack(partition_id, offset))
    if units.valid():
        owner, base_offset = KEY.unpack(units.key())
        unit = unit_of_row(base_offset, units.value())
        if owner == partition_id and unit.next_offset > offset:
            return unit
    units.status()
    raise CorruptIndexError(
        f"the RocksDB index does not have offset {offset} of partition {partition_id}"
    )


def find_first(
    units: RdictIter,
    partition_id: int,
    bounds: tuple[int, int],
    *,
    at_ms: int = 0,
    position: int = 0,
) -> int:
    """Return the base offset of the first unit within `bounds` that is at or above a time and a
    position, or the end of the bounds if there is none.
    """
    low, high = bounds
    while low < high:
        unit = unit_at(units, partition_id, (low + high) // 2)
        if unit.appended_at_ms >= at_ms and unit.position >= position:
            high = unit.base_offset
        else:
            low = unit.next_offset
    return low

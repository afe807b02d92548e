"""The RocksDB database of the index: its two families, their keys and values, its settings. Disk,
through the library.

    units    partition u64, base_offset u64  → position u64, appended_at_ms i64, length u32,
                                               count u32
    bounds   partition u64, 0                → first offset u64, position of its batch u64
             partition u64, 1                → next offset u64, position of the last batch u64,
                                               its time i64
             "position"                      → log position up to which every batch is in the index
             "format"                        → version u32, 1; a newer version is refused

Keys are big-endian, so that they sort as numbers; values are little-endian.

A lock that many threads share or one thread holds alone. The index is reopened alone, and read
shared.
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
from ..fail_points import pass_by
from .interface import Unit
from .rocksdb_waiting import End


class SharedLock:
    """A readers-writer lock; a waiting writer keeps new readers out. Not reentrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = 0
        self._alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with other threads. A thread that holds it alone, or waits to do
        so, comes first.
        """
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                if not self._sharing:
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock alone, once every thread that shares it has left."""
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._alone = True
            while self._sharing:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


log = logging.getLogger("keylane.broker")

MEMTABLE_BYTES = 16 << 20
CACHE_BYTES = 64 << 20
FILTER_PART_BYTES = 4 << 10
"""The size in bytes of a part of a filter or an index; a lookup reads, and the cache keeps, one
part at a time.
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
_HELD = "lock hold by current process"
_POSITION = b"position"
_POSITION_VALUE = struct.Struct("<Q")


def _options(cache: Cache) -> Options:
    tables = BlockBasedOptions()
    tables.set_block_cache(cache)
    tables.set_block_size(16 << 10)
    tables.set_bloom_filter(10, block_based=False)
    # A whole filter or index of a table with a million bounds is larger than a shard of the cache,
    # and would be read again for each lookup. Its parts are read and cached separately.
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


def failure(error: Exception) -> StorageError:
    """Return the StorageError for an exception of the library. The library has only one class of
    exceptions, so the text decides.
    """
    text = f"the RocksDB index: {error}"
    if any(sign in text for sign in _FULL):
        return DiskFullError(text)
    if isinstance(error, struct.error) or any(sign in text for sign in _DAMAGED):
        return CorruptIndexError(text)
    return StorageError(text)


@contextmanager
def library_errors() -> Iterator[None]:
    """Translate exceptions of the library into StorageError and its subclasses."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise failure(error) from error


def _once_free(work: Callable[[], None]) -> None:
    """Call `work`. Call it again if iterators of failed reads, which errors keep in cycles,
    held the closed database open.
    """
    try:
        work()
    except Exception as error:
        if _HELD not in str(error):
            raise
        gc.collect()
        work()


def unit_of_row(base_offset: int, value: bytes) -> Unit:
    """Return the unit in a row of `units`."""
    position, appended_at_ms, length, count = UNIT_VALUE.unpack(value)
    return Unit(base_offset, count, position, length, appended_at_ms)


class RocksTables:
    """The database, in a folder of its own. A damaged database is replaced by an empty one, unless
    it is `read_only`.
    """

    def __init__(
        self, path: str, *, read_only: bool = False, reach: Callable[[str], None] = pass_by
    ) -> None:
        self._path = path
        self._reach = reach
        self._read_only = read_only
        self.lock = SharedLock()
        """A lock that readers share, and that is held alone to reopen the database."""
        self.stuck = False
        """True if a write has failed: the library refuses writes until the database is reopened."""
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
        cache = Cache(CACHE_BYTES)
        families = {"bounds": _options(cache)}
        access = AccessType.read_only(False) if self._read_only else AccessType.read_write()
        units = Rdict(self._path, _options(cache), column_families=families, access_type=access)
        bounds = units.get_column_family("bounds")
        stored = bounds.get(_FORMAT)
        if stored is not None and (version := int.from_bytes(stored, "little")) > FORMAT:
            bounds.close()
            units.close()
            raise DataFolderError(
                f"{self._path} has format {version}, this broker writes format {FORMAT}",
                path=self._path,
            )
        if stored is None and not self._read_only:
            bounds.put(_FORMAT, FORMAT.to_bytes(4, "little"))
        self._units = units
        self._bounds = bounds
        self._family: ColumnFamily = units.get_column_family_handle("bounds")
        self.stuck = False

    def reopen(self) -> None:
        """
        Reopen the database after a failed write.

        Raises:
            DiskFullError: the disk has too little free space.
        """
        folder = Path(self._path)
        wanted = REOPEN_BYTES + sum(file.stat().st_size for file in folder.glob("*.log"))
        if shutil.disk_usage(folder).free < wanted:
            raise DiskFullError(f"the RocksDB index needs {wanted} free bytes to be reopened")
        with self.lock.alone(), library_errors():
            self.close()
            _once_free(self._connect)

    def clear(self) -> None:
        """Replace the database by an empty one."""
        self.close()
        self._reach("index-clear")
        _once_free(lambda: Rdict.destroy(self._path))
        self._reach("index-cleared")
        self._connect()

    def close(self) -> None:
        """Close the database. The library closes it only when its iterators are gone, too."""
        for name in ("_bounds", "_units"):
            table = self.__dict__.pop(name, None)
            if table is not None:
                try:
                    table.close()
                except Exception as error:  # noqa: BLE001  # the database counts as closed
                    log.warning("the RocksDB index: %s", error)
        self.__dict__.pop("_family", None)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────
    def put_first(self, batch: WriteBatch, partition_id: int, first: int, position: int) -> None:
        """Set a partition's first offset and its position."""
        batch.put(BOUND.pack(partition_id, FIRST), FIRST_VALUE.pack(first, position), self._family)

    def put_end(self, batch: WriteBatch, partition_id: int, end: End) -> None:
        """Set a partition's end."""
        batch.put(BOUND.pack(partition_id, END), END_VALUE.pack(*end), self._family)

    def put_position(self, batch: WriteBatch, position: int) -> None:
        """Set the log position up to which every batch is in the index."""
        batch.put(_POSITION, _POSITION_VALUE.pack(position), self._family)

    def delete_bounds(self, batch: WriteBatch, partition_id: int) -> None:
        """Remove the bounds of a partition, as if none of its batches had been dispatched."""
        batch.delete(BOUND.pack(partition_id, FIRST), self._family)
        batch.delete(BOUND.pack(partition_id, END), self._family)

    def write(self, batch: WriteBatch) -> None:
        """Write a batch of the library, atomically."""
        self._reach("index-write")
        try:
            self._units.write(batch)
        except Exception:
            self.stuck = True
            raise
        self._reach("index-written")

    def sync(self) -> None:
        """Make all writes durable."""
        self._reach("index-sync")
        self._units.flush_wal(True)
        self._reach("index-synced")

    def flush(self) -> None:
        """Write the tables, so that the next start reads no write-ahead log."""
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
        """Return the ends of partitions, read with one multi-get."""
        values = (
            self._bounds.get([BOUND.pack(partition_id, END) for partition_id in partition_ids])
            or []
        )
        return [None if value is None else End(*END_VALUE.unpack(value)) for value in values]

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """Return the first and next offset of a partition, or None."""
        keys: list[str | int | float | bytes | bool] = [
            BOUND.pack(partition_id, FIRST),
            BOUND.pack(partition_id, END),
        ]
        first, end = self._bounds.get(keys) or (None, None)
        if first is None or end is None:
            return None
        return FIRST_VALUE.unpack(first)[0], END_VALUE.unpack(end)[0]

    def all_bounds(self, start: int = 0) -> Iterator[tuple[int, int, int, End]]:
        """Yield (partition id, first offset, its position, end) for every partition from id `start`
        on.
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
        """Return an iterator over the units of all partitions. It has no bounds, because the
        library would free them too early.
        """
        return self._units.iter()


def unit_now(units: RdictIter) -> Unit:
    """Return the unit at the present place of an iterator."""
    return unit_of_row(KEY.unpack(units.key())[1], units.value())


def unit_at(units: RdictIter, partition_id: int, offset: int) -> Unit:
    """
    Move an iterator to the unit that contains this offset, and return the unit.

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
    raise CorruptIndexError(f"the RocksDB index lacks offset {offset} of partition {partition_id}")


def first_where(
    units: RdictIter,
    partition_id: int,
    bounds: tuple[int, int],
    *,
    at_ms: int = 0,
    position: int = 0,
) -> int:
    """Return the base offset of the first unit at or above a time and a position, or the end if
    there is none.
    """
    low, high = bounds
    while low < high:
        unit = unit_at(units, partition_id, (low + high) // 2)
        if unit.appended_at_ms >= at_ms and unit.position >= position:
            high = unit.base_offset
        else:
            low = unit.next_offset
    return low

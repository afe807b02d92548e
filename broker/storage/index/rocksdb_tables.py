"""RocksDB, opened: its two families, what their keys and values are, its settings.  Disk, through the library.

    units    partition u64, base_offset u64          → position u64, appended_at_ms i64, length u32, count u32
    bounds   partition u64, 0                        → first offset u64, position of its batch u64
             partition u64, 1                        → next offset u64, position of the last batch u64, its time i64
             "position"                              → log position up to which everything is in the index
             "format"                                → version u32, 1; a newer one is refused

Keys are big-endian, so that they sort as numbers; values are little-endian.
"""

from __future__ import annotations

import logging
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rocksdict import (
    AccessType,
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
from .shared_lock import SharedLock

log = logging.getLogger("keylane.broker")

MEMTABLE_BYTES = 16 << 20
CACHE_BYTES = 64 << 20
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
_POSITION = b"position"
_POSITION_VALUE = struct.Struct("<Q")


def _options(cache: Cache) -> Options:
    tables = BlockBasedOptions()
    tables.set_block_cache(cache)
    tables.set_block_size(16 << 10)
    tables.set_bloom_filter(10, block_based=False)
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
    """What the library says went wrong, which knows one class only, as an error of ours."""
    text = f"the RocksDB index: {error}"
    if any(one in text for one in _FULL):
        return DiskFullError(text)
    if isinstance(error, struct.error) or any(one in text for one in _DAMAGED):
        return CorruptIndexError(text)
    return StorageError(text)


@contextmanager
def library_errors() -> Iterator[None]:
    """Translate the plain exceptions that the library raises inside the block into ours."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise failure(error) from error


def unit_of_row(base_offset: int, value: bytes) -> Unit:
    """A row of `units`."""
    position, appended_at_ms, length, count = UNIT_VALUE.unpack(value)
    return Unit(base_offset, count, position, length, appended_at_ms)


class RocksTables:
    """The database in a folder of its own; one that is damaged is made anew, empty, unless it is `read_only`."""

    def __init__(
        self, path: str, *, read_only: bool = False, reach: Callable[[str], None] = pass_by
    ) -> None:
        self._path = path
        self._reach = reach
        self._read_only = read_only
        self.turns = SharedLock()
        """Who reads shares; to be opened again it has to be alone."""
        self.stuck = False
        """A write failed: nothing can be written until it is opened again."""
        try:
            with library_errors():
                self._connect()
        except CorruptIndexError as error:
            if read_only:
                raise
            log.warning("the RocksDB index is made again from the log: %s", error.message)
            with library_errors():
                Rdict.destroy(path)
                self._connect()

    def _connect(self) -> None:
        cache = Cache(CACHE_BYTES)
        families = {"bounds": _options(cache)}
        access = AccessType.read_only(False) if self._read_only else AccessType.read_write()
        units = Rdict(self._path, _options(cache), column_families=families, access_type=access)
        bounds = units.get_column_family("bounds")
        found = bounds.get(_FORMAT)
        if found is not None and (version := int.from_bytes(found, "little")) > FORMAT:
            bounds.close()
            units.close()
            raise DataFolderError(
                f"{self._path} has format {version}, this broker writes format {FORMAT}",
                path=self._path,
            )
        if found is None and not self._read_only:
            bounds.put(_FORMAT, FORMAT.to_bytes(4, "little"))
        self._units, self._bounds = units, bounds
        self._family: ColumnFamily = units.get_column_family_handle("bounds")
        self.stuck = False

    def reopen(self) -> None:
        """
        After a full disk nothing can be written until the database is opened again.

        Raises:
            DiskFullError: there is no room yet.
        """
        folder = Path(self._path)
        wanted = REOPEN_BYTES + sum(one.stat().st_size for one in folder.glob("*.log"))
        if shutil.disk_usage(folder).free < wanted:
            raise DiskFullError(f"the RocksDB index needs {wanted} bytes to be written again")
        with self.turns.alone(), library_errors():
            self.close()
            self._connect()

    def clear(self) -> None:
        """Begin with nothing."""
        self.close()
        self._reach("index-clear")
        Rdict.destroy(self._path)
        self._reach("index-cleared")
        self._connect()

    def close(self) -> None:
        """Let go of the database."""
        for one in ("_bounds", "_units"):
            found = self.__dict__.pop(one, None)
            if found is not None:
                try:
                    found.close()
                except Exception as error:  # noqa: BLE001  # it is let go of all the same
                    log.warning("the RocksDB index: %s", error)
        self.__dict__.pop("_family", None)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────
    def put_first(self, batch: WriteBatch, partition_id: int, first: int, position: int) -> None:
        """The partition begins here."""
        batch.put(BOUND.pack(partition_id, FIRST), FIRST_VALUE.pack(first, position), self._family)

    def put_end(self, batch: WriteBatch, partition_id: int, end: End) -> None:
        """The partition ends here."""
        batch.put(BOUND.pack(partition_id, END), END_VALUE.pack(*end), self._family)

    def put_position(self, batch: WriteBatch, position: int) -> None:
        """Everything up to this log position is in the index."""
        batch.put(_POSITION, _POSITION_VALUE.pack(position), self._family)

    def delete_bounds(self, batch: WriteBatch, partition_id: int) -> None:
        """The partition was never here."""
        batch.delete(BOUND.pack(partition_id, FIRST), self._family)
        batch.delete(BOUND.pack(partition_id, END), self._family)

    def write(self, batch: WriteBatch) -> None:
        """All of it or nothing."""
        self._reach("index-write")
        try:
            self._units.write(batch)
        except Exception:
            self.stuck = True
            raise
        self._reach("index-written")

    def sync(self) -> None:
        """Make every write before durable."""
        self._reach("index-sync")
        self._units.flush_wal(True)
        self._reach("index-synced")

    def flush(self) -> None:
        """Write out the tables, so that the next start reads no write-ahead log."""
        self._reach("index-flush")
        self._bounds.flush()
        self._units.flush()
        self._reach("index-flushed")

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────
    def position(self) -> int:
        """The log position up to which everything is in the index."""
        value = self._bounds.get(_POSITION)
        return 0 if value is None else int(_POSITION_VALUE.unpack(value)[0])

    def ends(self, partition_ids: list[int]) -> list[End | None]:
        """The ends of some partitions, with one call."""
        values = self._bounds.get([BOUND.pack(one, END) for one in partition_ids]) or []
        return [None if value is None else End(*END_VALUE.unpack(value)) for value in values]

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """First and next offset of a partition."""
        keys: list[str | int | float | bytes | bool] = [
            BOUND.pack(partition_id, FIRST),
            BOUND.pack(partition_id, END),
        ]
        first, end = self._bounds.get(keys) or (None, None)
        if first is None or end is None:
            return None
        return FIRST_VALUE.unpack(first)[0], END_VALUE.unpack(end)[0]

    def all_bounds(self, start: int = 0) -> Iterator[tuple[int, int, int, End]]:
        """Of every partition from id `start` on: id, first offset, its position, end."""
        pairs: Iterable[tuple[bytes, bytes]] = self._bounds.items(from_key=BOUND.pack(start, 0))  # type: ignore[assignment]
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
        """Over the units of all partitions; without bounds, which the library frees before the iterator."""
        return self._units.iter()


def unit_now(units: RdictIter) -> Unit:
    """The unit that an iterator is at."""
    return unit_of_row(KEY.unpack(units.key())[1], units.value())


def unit_at(units: RdictIter, partition_id: int, offset: int) -> Unit:
    """The unit that holds this offset, of an iterator over its partition."""
    units.seek_for_prev(KEY.pack(partition_id, offset))
    if units.valid():
        found, base_offset = KEY.unpack(units.key())
        unit = unit_of_row(base_offset, units.value())
        if found == partition_id and unit.next_offset > offset:
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
    """Base offset of the first unit at or after a time and a position; the end if there is none."""
    low, high = bounds
    while low < high:
        unit = unit_at(units, partition_id, (low + high) // 2)
        if unit.appended_at_ms >= at_ms and unit.position >= position:
            high = unit.base_offset
        else:
            low = unit.next_offset
    return low

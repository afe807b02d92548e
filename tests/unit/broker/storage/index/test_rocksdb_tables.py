"""How much a lookup reads of the database of the RocksDB index."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocksdict import WriteBatch

from keylane.broker.storage.index import rocksdb_tables
from keylane.broker.storage.index.rocksdb_tables import RocksTables
from keylane.broker.storage.index.rocksdb_waiting import End

PARTITIONS = 60_000
CACHE_BYTES = 64 << 10
"""Less than the filter of all partitions in one piece, as the share of a big cache is with a
million of them.
"""


def read_bytes() -> int:
    """What this process has read of files, from the disk or from the kernel's cache."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_lookup_reads_a_part_of_the_filter_when_the_whole_exceeds_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that is not there costs no read of what says so for all partitions."""
    monkeypatch.setattr(rocksdb_tables, "CACHE_BYTES", CACHE_BYTES)
    tables = RocksTables(str(tmp_path / "rocksdb"))
    for first in (0, 2):
        batch = WriteBatch(raw_mode=True)
        for partition_id in range(first, 2 * PARTITIONS, 4):
            tables.put_first(batch, partition_id, 0, 0)
            tables.put_end(batch, partition_id, End(1, 0, 0))
        tables.write(batch)
        tables.flush()
    tables._bounds.compact_range(None, None)  # the newest tables keep their filters in memory
    tables.ends([PARTITIONS + 1])
    before = read_bytes()
    for number in range(100):
        assert tables.ends([PARTITIONS + 1 + 2 * number]) == [None]
    assert read_bytes() - before < 1_000_000
    assert tables.ends([PARTITIONS]) == [End(1, 0, 0)]
    tables.close()


@pytest.mark.parametrize("renew", [RocksTables.reopen, RocksTables.clear])
def test_database_is_reopened_when_a_failed_read_keeps_an_iterator_in_a_cycle(tmp_path, renew):
    tables = RocksTables(str(tmp_path / "rocksdb"))
    units = tables.units()
    units.seek_to_first()
    failure = OSError("the read failed")
    failure.args = (failure, units)
    del units, failure
    renew(tables)
    assert tables.position() == 0
    tables.close()

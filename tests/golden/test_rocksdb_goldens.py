"""Keys and values of the RocksDB index, byte for byte: written as they always were, and read by
every later version.
"""

from __future__ import annotations

import json
from pathlib import Path

from rocksdict import WriteBatch

from keylane.broker.storage.index.interface import Unit
from keylane.broker.storage.index.rocksdb import RocksConsumeQueues

GOLDEN: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "rocksdb_v1.json").read_text()
)
UNITS = [
    (1, Unit(0, 2, 0, 300, 1_700_000_000_000)),
    (1 << 40, Unit(7, 1, 300, 96, 1_700_000_000_001)),
    (1, Unit(2, 1 << 16, 1 << 33, 1_118_208, 1_700_000_000_002)),
]


def rows(queues: RocksConsumeQueues) -> dict[str, dict[str, str]]:
    tables = queues._tables
    return {
        family: {key.hex(): value.hex() for key, value in table.items()}
        for family, table in (("units", tables._units), ("bounds", tables._bounds))
    }


def test_batches_are_written_as_the_golden_rows(tmp_path):
    """Three batches make the rows of the format, and no others."""
    queues = RocksConsumeQueues(str(tmp_path / "rocksdb"))
    queues.dispatch(UNITS)
    stored = rows(queues)
    queues.close()
    assert stored == GOLDEN


def test_golden_rows_are_read_as_their_batches(tmp_path):
    """Rows of the format, in an empty database, are the batches they were made of."""
    queues = RocksConsumeQueues(str(tmp_path / "rocksdb"))
    tables = queues._tables
    batch = WriteBatch(raw_mode=True)
    for key, value in GOLDEN["units"].items():
        batch.put(bytes.fromhex(key), bytes.fromhex(value))
    for key, value in GOLDEN["bounds"].items():
        batch.put(bytes.fromhex(key), bytes.fromhex(value), tables._family)
    tables.write(batch)
    assert queues.partitions() == [1, 1 << 40]
    assert queues.bounds(1) == (0, 2 + (1 << 16))
    assert queues.bounds(1 << 40) == (7, 8)
    end = 1 << 20
    assert queues.find(1, 0, end=end, bytes_max=end << 20) == [UNITS[0][1], UNITS[2][1]]
    assert queues.find(1 << 40, 7, end=end, bytes_max=1) == [UNITS[1][1]]
    assert queues.position == (1 << 33) + 1_118_208
    queues.close()

"""Reading while the broker runs: nothing wrong is served, whatever happened to the files behind its
back.
"""

from __future__ import annotations

import pytest
from crc32c import crc32c

from keylane.broker.storage.index.file import FileConsumeQueues
from keylane.broker.storage.index.file_blocks import BLOCK_BYTES, BLOCK_UNITS
from keylane.broker.storage.index.interface import Unit
from keylane.protocol.errors import CorruptLogError, StorageError
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

SEGMENT = "log/" + "0" * 20 + ".log"
BLOCKS = "index/" + "0" * 20 + ".blocks"
COUNT = 3 * BLOCK_UNITS


@pytest.fixture
async def desk() -> Desk:
    """A partition of many batches of two messages, nothing of it in memory."""
    clock = ManualClock()
    desk = Desk(open_store(SimDisk(), clock=clock, cache_bytes=0), clock)
    await desk.host()
    for number in range(COUNT):
        await desk.append(batch(sequence=2 * number))
    return desk


def disk_of(desk: Desk) -> SimDisk:
    return desk.store.log._files


async def test_damaged_batch_is_never_served(desk):
    """Up to the damage everything is served, the damaged batch is a typed error, behind it reading
    goes on.
    """
    length = len(batch())
    data = disk_of(desk).contents[SEGMENT].data
    data[len(data) - 5 * length + 120] ^= 4
    bad = 2 * (COUNT - 5)

    assert (await desk.read(bad - 4))[0].upto == bad
    with pytest.raises(CorruptLogError) as caught:
        await desk.read(bad)
    assert caught.value.partition_id == 1
    assert (await desk.read(bad + 2))[0].upto == 2 * COUNT


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("place", [0, 8, 24, 28])
async def test_unit_that_lies_is_found(desk, place, checked):
    """A unit of the index whose offset, position, length or count was changed, its checksum too,
    leads to no batch.
    """
    units = disk_of(desk).contents[BLOCKS].data
    for start in range(0, len(units), BLOCK_BYTES):
        for index in range(1, 1 + BLOCK_UNITS):
            units[start + 32 * index + place] ^= 1
        if checked:
            crc = crc32c(bytes(units[start + 8 : start + BLOCK_BYTES]))
            units[start + 4 : start + 8] = crc.to_bytes(4, "little")
    with pytest.raises(CorruptLogError):
        await desk.read(100, bytes_max=1)


async def test_index_cut_behind_the_broker_is_found(desk):
    """Units that vanish while the broker runs are an error that says what to do."""
    del disk_of(desk).contents[BLOCKS].data[100:]
    with pytest.raises(CorruptLogError, match="index"):
        await desk.read(200)


async def test_index_that_cannot_be_written_blocks_no_reader():
    """The index waits in memory while its disk refuses, loses nothing, and is written out later."""
    disk = SimDisk()
    queues = FileConsumeQueues(disk)
    units = [(1, Unit(n, 1, 100 * n, 100, n)) for n in range(4 * BLOCK_UNITS)]
    queues.dispatch(units[:BLOCK_UNITS])
    disk.failing_operation = "write"
    queues.dispatch(units[BLOCK_UNITS : 3 * BLOCK_UNITS])
    with pytest.raises(StorageError):
        queues.flush()
    stored = queues.find(1, 0, end=1 << 40, bytes_max=1 << 40)
    assert stored == [unit for _, unit in units[: 3 * BLOCK_UNITS]]

    disk.failing_operation = ""
    queues.dispatch(units[3 * BLOCK_UNITS :])
    queues.close()
    again = FileConsumeQueues(disk)
    assert again.find(1, 0, end=1 << 40, bytes_max=1 << 40) == [unit for _, unit in units]

"""When snapshots are written, what is in them, and that a start from one is as good as from the
whole log.
"""

from __future__ import annotations

import asyncio
import copy

import pytest

from keylane.broker.partition import dropped
from keylane.broker.partition.image import encode_partition
from keylane.broker.partition.records import DroppedBody
from keylane.broker.storage.snapshot import Snapshots
from keylane.broker.store import snapshotter
from keylane.protocol.errors import DiskFullError, FlushFailedError
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

SMALL = {"segment_bytes": 8192, "snapshot_bytes": 4096}


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
async def desk(disk) -> Desk:
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock, **SMALL), clock)
    for number in (1, 2):
        await desk.host(number)
    return desk


def images(store) -> dict[int, bytes]:
    return {
        number: encode_partition(partition) for number, partition in store.state.partitions.items()
    }


async def busy(desk: Desk, first: int, count: int) -> None:
    for number in range(first, first + count):
        await desk.append(batch(sequence=2 * number))
        await desk.append(batch(sequence=2 * number, partition_id=2), 2)
        if number % 10 == 0:
            await desk.acquire(number + 1)
            await desk.ack(number + 1, (number, number + 1))


def read_from(disk: SimDisk) -> list[int]:
    """Positions at which a start reads the log."""
    reads: list[int] = []
    pread = disk.pread

    def noted(path: str, position: int, length: int) -> bytes:
        if path.endswith(".log"):
            reads.append(int(path[4:24]) + position)
        return pread(path, position, length)

    disk.pread = noted  # type: ignore[method-assign]
    open_store(disk, **SMALL)
    return reads


async def test_snapshots_come_with_the_log(desk, disk):
    """A snapshot is written whenever the log has grown by a fixed number of bytes, and a start
    reads only what follows it.
    """
    await busy(desk, 0, 200)
    await asyncio.sleep(0)
    store = desk.store
    assert len(disk.list("snapshot")) > 2
    assert store.log.end - store.snapshotter.position < 3 * 4096
    restored = open_store(copy.deepcopy(disk), **SMALL)
    assert images(restored) == images(store)
    assert restored.snapshotter.position == store.snapshotter.position


async def test_after_a_clean_stop_nothing_of_the_log_is_read(desk, disk):
    """A clean stop writes a snapshot that stands for all of the log."""
    await busy(desk, 0, 50)
    expected = images(desk.store)
    await desk.store.close()
    disk.close()
    assert read_from(copy.deepcopy(disk)) == []
    assert images(open_store(disk, **SMALL)) == expected
    assert Snapshots(disk).load(lambda _number, _image: None).clean


@pytest.mark.parametrize("left", range(5))
async def test_any_older_snapshot_will_do(desk, disk, left):
    """From a stale snapshot, or none, the log makes the same state."""
    await busy(desk, 0, 150)
    expected = images(desk.store)
    await desk.store.close()
    names = disk.list("snapshot")
    for name in names[left:]:
        disk.remove(f"snapshot/{name}")
    restored = open_store(disk, **SMALL)
    assert images(restored) == expected
    assert not restored.state.problems


async def test_snapshot_leaves_out_messages_that_a_full_disk_refused(desk, disk):
    """A snapshot made while a commit fails is dropped: what was taken back is not in it."""
    await busy(desk, 0, 20)
    await desk.store.snapshotter.write()
    before = images(desk.store)
    position = desk.store.snapshotter.position
    disk.free_space = 100
    append = asyncio.create_task(desk.append(batch(sequence=40)))
    snapshot = asyncio.create_task(desk.store.snapshotter.write())
    with pytest.raises(DiskFullError):
        await append
    assert not await snapshot
    assert desk.store.snapshotter.problem
    disk.free_space = None
    assert images(open_store(copy.deepcopy(disk), **SMALL)) == before
    assert desk.store.snapshotter.position == position
    assert await desk.store.snapshotter.write()
    assert not desk.store.snapshotter.problem


async def test_changes_made_during_a_snapshot_are_in_the_next_one(desk, disk, monkeypatch):
    """Appends that come between two slices are in the log behind it, and fold into either state."""
    monkeypatch.setattr("keylane.broker.store.snapshotter.PARTITIONS_PER_SLICE", 1)
    for number in range(3, 40):
        await desk.host(number)
    task = asyncio.create_task(desk.store.snapshotter.write())
    for number in range(30):
        await desk.append(batch(sequence=2 * number))
        partition_id = 3 + number
        await desk.append(batch(partition_id=partition_id), partition_id)
    assert await task
    assert images(open_store(copy.deepcopy(disk), **SMALL)) == images(desk.store)


async def test_snapshot_outlives_who_waits_for_it(desk, disk):
    """Retention that is ended while its snapshot is written takes nothing from the one of the clean
    stop after it.
    """
    await desk.store.snapshotter.write()  # a whole one: those after it hold what changed
    await busy(desk, 0, 20)
    written = asyncio.Event()

    async def slow(function, /, *args):
        await written.wait()
        return function(*args)

    desk.store.snapshotter._run_blocking = slow
    waiting = asyncio.create_task(desk.store.snapshotter.write())
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    written.set()
    expected = images(desk.store)
    await desk.store.close()
    disk.close()
    assert images(open_store(disk, **SMALL)) == expected


async def test_held_broker_that_is_stopped_has_its_snapshot(desk, disk):
    """On a disk that is too full for messages a clean stop writes its snapshot all the same, and a
    start is short.
    """
    await busy(desk, 0, 20)
    expected = images(desk.store)
    desk.store.commit.refuse_messages("the disk is 90 % full")
    await desk.store.close()
    disk.close()
    assert read_from(copy.deepcopy(disk)) == []
    assert images(open_store(disk, **SMALL)) == expected


async def test_stop_on_a_full_disk_goes_on_without_a_snapshot(desk, disk, caplog):
    """Where the last snapshot has no room it is logged, the stop is clean, and the log makes the
    same state.
    """
    await busy(desk, 0, 20)
    disk.free_space = 10
    with pytest.raises(DiskFullError):
        await desk.append(batch(sequence=40))
    expected = images(desk.store)
    before = desk.store.snapshotter.position
    await desk.store.close()
    assert "cannot write a snapshot" in caplog.text
    disk.close()
    disk.free_space = None
    restored = open_store(disk, **SMALL)
    assert restored.snapshotter.position == before
    assert images(restored) == expected


@pytest.mark.parametrize("trouble", ["", "held", "failed"])
async def test_stop_waits_for_a_snapshot_under_way(desk, disk, trouble):
    """Nothing is written into the folder once it is closed; after a failed write no further
    snapshot is begun.
    """
    await busy(desk, 0, 20)
    store = desk.store
    written = asyncio.Event()
    begun = asyncio.Event()

    async def slow(function, /, *args):
        begun.set()
        await written.wait()
        return function(*args)

    store.snapshotter._run_blocking = slow
    snapshot = asyncio.create_task(store.snapshotter.write())
    await begun.wait()
    if trouble == "held":
        store.commit.refuse_messages("the disk is 90 % full")
    if trouble == "failed":
        disk.failing_operation = "fdatasync"
        with pytest.raises(FlushFailedError):
            await desk.append(batch(sequence=40))
        disk.failing_operation = ""
    closing = asyncio.create_task(store.close())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    names = disk.list("snapshot")
    written.set()
    await closing
    assert snapshot.done() or await snapshot
    assert len(disk.list("snapshot")) == len(names) + (1 if trouble == "failed" else 2)
    steps = disk.steps
    await asyncio.sleep(0.01)
    assert disk.steps == steps


async def test_fault_of_our_own_keeps_what_was_to_be_saved(desk, disk):
    """If the index cannot make itself durable there is no snapshot, and the next one has
    everything.
    """
    await busy(desk, 0, 5)

    def broken(_position: int) -> None:
        raise ZeroDivisionError

    queues = desk.store.snapshotter._queues
    queues.checkpoint, checkpoint = broken, queues.checkpoint
    assert not await desk.store.snapshotter.write()
    queues.checkpoint = checkpoint
    assert await desk.store.snapshotter.write()
    assert images(open_store(disk, **SMALL)) == images(desk.store)


async def test_snapshot_pauses_when_it_looks_for_partitions_among_dropped_ones(
    disk, desk, monkeypatch
):
    """A million hosted partitions were looked for at once: half a second in which the broker did
    nothing else.
    """
    monkeypatch.setattr(dropped, "RANGES_KEPT", 2)
    monkeypatch.setattr(snapshotter, "IDS_PER_SLICE", 1)
    state = desk.store.state
    for number in range(10, 22, 2):
        state.dropped.add(DroppedBody([(number, number + 1)], {}))
    pauses = []
    hosting = None

    async def pause(_seconds: float) -> None:
        nonlocal hosting
        pauses.append(1)
        if hosting is None:  # it comes while the others are looked at
            hosting = asyncio.ensure_future(desk.host(13))
            await hosting

    monkeypatch.setattr(snapshotter.asyncio, "sleep", pause)
    assert await desk.store.snapshotter.write()
    assert len(pauses) == len((1, 2))
    assert [each for each in range(10, 22) if each in state.dropped] == [
        10,
        11,
        12,
        14,
        15,
        16,
        17,
        18,
        20,
    ]
    assert 13 in state.partitions

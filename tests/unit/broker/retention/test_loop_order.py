"""In which order retention does its work: what readers, new groups, a full disk and a kill in
between find.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil

import pytest

from keylane.broker.retention.loop import RetentionLoop
from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.reserve import PATH as RESERVE
from keylane.broker.store import opening
from keylane.broker.store.group_changes import register_groups_at, set_cursor
from keylane.protocol.control import TimeBound
from keylane.protocol.errors import BrokerReadOnlyError, OffsetOutOfRangeError, StorageError
from keylane.protocol.progress import SetCursor
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, in_place, open_store, settings_of
from support.indexes import KINDS

HOUR = 3_600_000
BATCHES = 100


class Killed(BaseException):
    """No code of ours catches this."""


class RoomyFiles(RealFiles):
    """Real files on a disk that is never too full, whatever else is on it."""

    def free_bytes(self):
        return 3 * self.total_bytes() // 4


class KilledFiles(RoomyFiles):
    """The real files of a process that is killed at one of its operations that change something."""

    def __init__(self, root):
        super().__init__(root)
        self.left = -1
        self.passed = 0

    def step(self):
        self.passed += 1
        self.left -= 1
        if self.left == 0:
            raise Killed

    def open_append(self, path):
        self.step()
        return super().open_append(path)

    def rename(self, old, new):
        self.step()
        super().rename(old, new)

    def remove(self, path):
        self.step()
        super().remove(path)

    def sync_folder(self, path=""):
        super().sync_folder(path)
        self.step()


class CommitWatchedBroker:
    def __init__(self, files, clock=None, **changes):
        changes = {"segment_bytes": 4096, "cache_bytes": 0} | changes
        self.clock = clock or ManualClock()
        self.store = open_store(files, clock=self.clock, **changes)
        self.desk = Desk(self.store, self.clock)
        self.run_commit = in_place
        self.cleaning = RetentionLoop(
            self.store,
            files,
            settings_of(**changes),
            clock=self.clock,
            run_commit=self._on_commit_thread,
            run_read=in_place,
        )

    async def _on_commit_thread(self, function, /, *args):
        return await self.run_commit(function, *args)

    async def fill(self, partitions=(1,)):
        for partition_id in partitions:
            await self.desk.host(partition_id)
        for number in range(BATCHES):
            self.clock.advance(HOUR)
            for partition_id in partitions:
                await self.desk.append(
                    batch(partition_id=partition_id, sequence=2 * number), partition_id
                )

    def first(self, partition_id=1):
        return self.store.state.partition(partition_id).first_offset

    async def agrees(self):
        """What is below the first offset is out of range, all from it on is there; times and groups
        begin there.
        """
        for number, partition in self.store.state.partitions.items():
            offset = first = partition.first_offset
            assert partition.next_offset == 2 * BATCHES
            while offset < partition.next_offset:
                answer, _ = await self.desk.read(offset, partition_id=number)
                assert answer.upto > offset
                offset = answer.upto
            for below in range(first):
                with pytest.raises(OffsetOutOfRangeError):
                    await self.desk.read(below, partition_id=number)
            assert await self.store.find_offset_at(partition, 0, TimeBound.LOWER) == first
        assert (await self.desk.acquire(1)).cursor == self.first(1)
        assert (await self.desk.pull(1, self.first(1)))[0].upto > self.first(1)


@pytest.mark.parametrize("kind", KINDS)
async def test_kill_at_every_operation(kind, tmp_path):
    """Killed anywhere in its first retention, the broker comes up with first offsets, index and log
    that agree.
    """
    kills = 0
    while True:
        kills += 1
        life, copy = tmp_path / f"life{kills}", tmp_path / f"copy{kills}"
        files = KilledFiles(life)
        files.lock()
        house = CommitWatchedBroker(files, index=kind)
        await house.fill((1, 2))
        files.left = kills
        killed = False
        try:
            await house.cleaning.check()
        except Killed:
            killed = True
        shutil.copytree(life, copy)  # what a killed process leaves: nothing is closed
        with contextlib.suppress(Killed):
            files.left = -1
            await house.store.close()
        files.close()
        copied_files = RoomyFiles(copy)
        copied_files.lock()
        again = CommitWatchedBroker(copied_files, house.clock, index=kind)
        await again.agrees()
        if not killed:
            break
        for group in again.store.state.partition(1).groups.values():
            group.acked.add(0, 2 * BATCHES)
        await again.cleaning.check()
        assert again.store.log.first_position > 0
        assert again.first() > 0
        await again.store.close()
        copied_files.close()
        shutil.rmtree(life)
        shutil.rmtree(copy)
    assert kills > 8


@pytest.mark.parametrize("kind", KINDS)
async def test_readers_while_it_works(kind, tmp_path):
    """Between any two of its steps a reader gets messages, or is told the first offset that is not
    gone.
    """
    files = RoomyFiles(tmp_path)
    files.lock()
    house = CommitWatchedBroker(files, index=kind)
    await house.fill()
    partition = house.store.state.partition(1)
    told = []

    async def look(function, /, *args):
        result = function(*args)
        for offset in (0, house.first()):
            try:
                told.append((await house.desk.read(offset))[0].upto > offset)
            except OffsetOutOfRangeError:
                told.append("out of range")
        assert await house.store.find_offset_at(partition, 0, TimeBound.LOWER) == house.first()
        return result

    house.run_commit = look
    assert await house.cleaning.check() > 0
    assert set(told) == {True, "out of range"}
    await house.agrees()
    await house.store.close()
    files.close()


@pytest.mark.parametrize("moment", ["decided", "written"])
async def test_group_that_comes_while_it_is_decided(moment):
    """A group that registers while retention decides keeps what it was told of, and the next check
    looks at it.
    """
    disk = SimDisk()
    house = CommitWatchedBroker(disk)
    await house.fill()
    cleaning = house.cleaning
    name = {"decided": "_find_floor", "written": "_first_offsets_at"}[moment]
    real = getattr(cleaning, name)
    cursors = []

    async def late(*args):
        result = await real(*args)
        if not cursors:
            cursors.append((await house.desk.acquire(1)).cursor)
        return result

    setattr(cleaning, name, late)
    await cleaning.check()
    group = house.store.state.partition(1).groups["audit"]
    assert cursors == [0]
    assert group.acked.cursor == 0
    assert house.first() == 0
    assert "acked" in cleaning.problem
    assert (await house.desk.pull(1, 0))[0].upto > 0


async def test_group_that_is_set_back_while_it_is_decided():
    """A group that an operator sets back to its first message while retention decides keeps that
    message.
    """
    house = CommitWatchedBroker(SimDisk())
    await house.fill()
    await house.desk.acquire(1)
    await house.desk.ack(1, (0, 2 * BATCHES))
    floor = house.cleaning._find_floor
    partition = house.store.state.partition(1)

    async def late(*args):
        result = await floor(*args)
        if partition.groups["audit"].acked.cursor:
            await set_cursor(house.store, partition, SetCursor(group="audit", token=2, cursor=0))
        return result

    house.cleaning._find_floor = late
    await house.cleaning.check()
    assert partition.first_offset == 0
    assert partition.groups["audit"].acked.cursor == 0


@pytest.mark.parametrize("told", [True, False])
async def test_group_that_is_made_known_while_it_is_decided(told):
    """A group that was made known in time finds its first message when it comes; no group loses
    messages.
    """
    house = CommitWatchedBroker(SimDisk())
    await house.fill()
    floor = house.cleaning._find_floor
    partition = house.store.state.partition(1)

    async def late(*args):
        result = await floor(*args)
        if told:
            await register_groups_at(house.store, partition, ["audit"])
        return result

    house.cleaning._find_floor = late
    await house.cleaning.check()
    assert (partition.first_offset == 0) is told


async def test_group_that_comes_after_the_decision():
    """A group that registers while first offsets rise begins at the one that was decided."""
    house = CommitWatchedBroker(SimDisk())
    await house.fill((1, 2))
    decide = house.cleaning._decide_position

    async def late(*args):
        result = await decide(*args)
        assert house.first() == 0
        cursors.append((await house.desk.acquire(1)).cursor)
        return result

    cursors: list[int] = []
    house.cleaning._decide_position = late
    assert await house.cleaning.check() > 0
    assert cursors == [house.first()]
    assert cursors[0] > 0
    assert (await house.desk.pull(1, cursors[0]))[0].upto > cursors[0]


async def test_completely_full_disk_is_freed():
    """With not a byte left the reserve pays for what has to be written, segments go, and messages
    are taken again.
    """
    disk = SimDisk()
    house = CommitWatchedBroker(disk)
    await house.cleaning.check()
    assert disk.size(RESERVE)
    await house.fill()
    disk.total_space, disk.free_space = 1_000_000, 0
    with pytest.raises((StorageError, BrokerReadOnlyError)):
        await house.desk.append(batch(sequence=2 * BATCHES))
    assert await house.cleaning.check() > 0
    assert disk.size(RESERVE) is None
    await house.agrees()
    house.clock.advance(10_000)
    disk.free_space = 800_000
    await house.cleaning.check()
    assert disk.size(RESERVE)
    await house.desk.append(batch(sequence=2 * BATCHES))


async def test_full_disk_without_a_reserve():
    """Where nothing can be written and nothing is kept back, nothing goes, and no first offset
    rises.
    """
    disk = SimDisk()
    house = CommitWatchedBroker(disk)
    await house.fill()
    disk.total_space, disk.free_space = 1_000_000, 0
    for _ in range(3):
        house.clock.advance(10_000)
        with pytest.raises((StorageError, BrokerReadOnlyError)):
            await house.cleaning.check()
        assert house.first() == 0
        assert house.store.log.first_position == 0
    assert (await house.desk.read(0))[0].upto > 0
    disk.free_space = 500_000
    assert await house.cleaning.check() > 0


async def test_first_offsets_are_mended_only_where_they_have_to_be(monkeypatch):
    """A start after a retention that was finished looks at no partition's first offset; one that
    was cut short does.
    """
    disk = SimDisk()
    house = CommitWatchedBroker(disk)
    await house.fill()
    await house.cleaning.check()
    first = house.first()
    mended = []
    correct = opening.correct_first_offsets

    def counted(*args, **kwargs):
        mended.append(kwargs)
        correct(*args, **kwargs)

    monkeypatch.setattr(opening, "correct_first_offsets", counted)
    again = CommitWatchedBroker(disk, house.clock)  # without a clean stop
    assert again.first() == first
    assert mended == []
    for number in range(BATCHES, BATCHES + 50):
        house.clock.advance(HOUR)
        await again.desk.append(batch(sequence=2 * number))
    monkeypatch.setattr(again.cleaning, "_forget_removed", lambda: asyncio.sleep(0))
    await again.cleaning.check()
    last = CommitWatchedBroker(disk, house.clock)
    assert last.first() == again.first() > first
    assert len(mended) == 1


async def test_fault_of_our_own_does_not_end_it(monkeypatch):
    """Whatever goes wrong in a check is told, and the next check is made."""
    house = CommitWatchedBroker(SimDisk())
    checks = []

    async def check():
        checks.append(house.cleaning.problem)
        if len(checks) == 1:
            raise ZeroDivisionError("by accident")
        if len(checks) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr("keylane.broker.retention.loop.CHECK_MS", 1)
    house.cleaning.check = check
    with pytest.raises(asyncio.CancelledError):
        await house.cleaning.run()
    assert len(checks) == 3
    assert "by accident" in checks[1]

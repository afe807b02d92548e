"""Retention of a whole store: what goes, what stays, and what readers and consumers see of it."""

from __future__ import annotations

import asyncio

import pytest

from keylane.broker.partition.damage import describe_damage
from keylane.broker.retention.loop import RetentionLoop
from keylane.broker.service import BrokerService
from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.log.commit_log import segment_bases, segment_path
from keylane.broker.storage.log.trail import trail_path
from keylane.broker.store.group_changes import register_groups_at
from keylane.protocol.control import Retention, TimeBound
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    DataFolderError,
    DiskFullError,
    OffsetOutOfRangeError,
    StorageError,
)
from keylane.protocol.frames import Append
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, in_place, open_store, settings_of

SEGMENT = 4096
HOUR = 3_600_000


class RetainingBroker:
    """A broker's store with segments an hour apart, and its retention."""

    def __init__(self, disk=None, **changes):
        self.disk, self.clock = disk or SimDisk(), ManualClock()
        self.changes = {"segment_bytes": SEGMENT, "cache_bytes": 0} | changes
        self.open()

    def open(self):
        self.store = open_store(self.disk, clock=self.clock, **self.changes)
        self.desk = Desk(self.store, self.clock)
        self.cleaning = RetentionLoop(
            self.store,
            self.disk,
            settings_of(**self.changes),
            clock=self.clock,
            run_commit=in_place,
            run_read=in_place,
        )

    async def fill(self, partitions=(1, 2), *, batches=60, retention=None, groups=()):
        for number in partitions:
            told = facts(number)
            _, durable = self.store.host(
                type(told)(subject=told.subject, partition=told.partition, retention=retention)
            )
            await durable
            if groups is not None:
                await register_groups_at(
                    self.store, self.store.state.partition(number), groups, complete=True
                )
        for number in range(batches):
            self.clock.advance(HOUR)
            for partition in partitions:
                await self.desk.append(
                    batch(partition_id=partition, sequence=2 * number), partition
                )

    def first(self, partition_id=1):
        return self.store.state.partition(partition_id).first_offset

    async def agrees(self):
        """First offsets are those of the first whole batch in the log, for every reader."""
        for partition in self.store.state.partitions.values():
            first = partition.first_offset
            assert self.store.queues.bounds(partition.partition_id) == (
                first,
                partition.next_offset,
            )
            offset = first
            while offset < partition.next_offset:
                _, offset = await self.store.read(partition, offset, bytes_max=1 << 20)
            unit = self.store.queues.find(
                partition.partition_id, first, end=first + 1, bytes_max=1
            )[0]
            assert unit.position >= self.store.log.first_position
            if first:
                with pytest.raises(OffsetOutOfRangeError):
                    await self.desk.read(first - 1, partition_id=partition.partition_id)


async def test_old_segments_go_and_first_offsets_rise():
    """After 72 hours segments go, the first offset is the first message that is there, after a
    restart too.
    """
    house = RetainingBroker()
    await house.fill(batches=100)
    bases = house.store.log.bases
    gone = await house.cleaning.check()
    assert 0 < gone < len(bases) - 1
    assert house.store.log.bases == bases[gone:]
    partition = house.store.state.partition(1)
    unit = house.store.queues.find_by_time(1, 0, TimeBound.LOWER)
    assert house.clock.wall_ms() - unit.appended_at_ms <= 80 * HOUR
    await house.agrees()
    assert partition.first_offset > 0
    assert await house.cleaning.check() == 0
    first = house.first()
    await house.store.close()
    house.open()
    assert house.first() == first
    await house.agrees()


@pytest.mark.parametrize("index", ["file", "rocksdb"])
async def test_messages_go_by_age_when_nothing_is_stored_any_more(index: str, tmp_path):
    """Each goes an eighth of retention_ms later at most; the broker then starts, and stores, as
    before.
    """
    house = RetainingBroker(RealFiles(str(tmp_path)), index=index)
    await house.fill(batches=50)
    for _ in range(72 + 9):
        house.clock.advance(HOUR)
        await house.cleaning.check()
    assert house.first() == house.first(2) == house.store.state.partition(1).next_offset == 100
    assert len(house.store.log.bases) == 1
    await house.store.close()
    house.open()
    assert house.first() == 100
    await house.desk.append(batch(sequence=100))
    assert house.store.state.partition(1).next_offset == 102
    await house.store.close()


async def test_message_goes_by_age_when_the_next_one_came_much_later():
    """Its segment is small, so what is known of it is no later message's time, after a restart
    too.
    """
    house = RetainingBroker()
    await house.fill(partitions=(1,), batches=1)
    for _ in range(70):
        house.clock.advance(HOUR)
        await house.cleaning.check()
    await house.desk.append(batch(sequence=2))
    await house.store.close()
    house.open()
    for _ in range(3):
        house.clock.advance(HOUR)
        await house.cleaning.check()
    assert house.first() == 2
    assert house.store.state.partition(1).next_offset == 4


async def test_segment_is_not_begun_by_age_when_messages_are_young_or_missing():
    """A broker with acks alone makes no files, and a busy one as many as the age has eighths."""
    house = RetainingBroker(segment_bytes=1 << 20)
    await house.fill(partitions=(1,), batches=0, groups=("g",))
    for _ in range(100):
        house.clock.advance(HOUR)
        await house.cleaning.check()
    assert len(house.store.log.bases) == 1
    for number in range(72):
        house.clock.advance(HOUR)
        await house.desk.append(batch(sequence=2 * number))
        await house.cleaning.check()
    assert 8 <= len(house.store.log.bases) <= 9


async def test_segment_is_begun_at_the_next_check_when_the_disk_had_no_room(monkeypatch, caplog):
    """Messages are stored meanwhile."""
    house = RetainingBroker()
    await house.fill(partitions=(1,), batches=2)
    house.clock.advance(10 * HOUR)
    opened = house.disk.open_append

    def refuse(path):
        if house.disk.size(path) is None:
            raise DiskFullError("the disk is full", path=path)
        return opened(path)

    with monkeypatch.context() as full:
        full.setattr(house.disk, "open_append", refuse)
        assert await house.cleaning.check() == 0
    assert "cannot begin a new segment" in caplog.text
    house.clock.advance(10_000)
    await house.desk.append(batch(sequence=4))
    assert len(house.store.log.bases) == 1
    await house.cleaning.check()
    assert house.store.log.bases == [0, house.store.log.end]
    await house.desk.append(batch(sequence=6))
    await house.agrees()


async def test_group_that_lags_keeps_its_messages():
    """What a consumer group has not acked stays and is told; when it has acked, it goes."""
    house = RetainingBroker()
    await house.fill(batches=100)
    await house.desk.acquire(1)
    await house.desk.ack(1, (0, 41))
    await house.cleaning.check()
    assert "acked" in house.cleaning.problem
    assert 0 < house.first() <= 41
    first = house.first()
    await house.desk.ack(1, (41, 200))
    await house.cleaning.check()
    assert house.first() > first
    assert house.cleaning.problem == ""
    await house.agrees()


async def test_messages_reach_their_age_when_the_calendar_was_set_back_for_a_while():
    """Of a segment only times behind it are known, and these are early where the calendar was; no
    message goes early for that.
    """
    house = RetainingBroker()
    await house.fill(partitions=(1,), batches=12)
    house.clock.wall_offset_ms -= 71 * HOUR
    await house.fill(partitions=(2,), batches=12)
    house.clock.wall_offset_ms += 71 * HOUR
    await house.fill(partitions=(3,), batches=12)
    assert await house.cleaning.check() == 0
    house.clock.advance(72 * HOUR)
    assert await house.cleaning.check() >= 1


async def test_retention_removes_no_message_when_the_calendar_was_set_a_year_forward_for_a_while(
    caplog,
):
    """What was not old before stays; a year later by the calendar everything was removed within ten
    seconds.
    """
    house = RetainingBroker()
    await house.fill(batches=60)
    first = house.store.log.first_position
    for year_ms in (8_760 * HOUR, 0):
        house.clock.wall_offset_ms += year_ms
        house.clock.advance(10_000)
        assert await house.cleaning.check() == 0
        assert "set forward by 8760.0 hours" in house.cleaning.problem
    assert caplog.text.count("set forward by 8760.0 hours") == 1
    house.clock.wall_offset_ms -= 8_760 * HOUR
    assert await house.cleaning.check() == 0
    assert house.cleaning.problem == ""
    assert house.store.log.first_position == first


@pytest.mark.parametrize("word", [False, True])
async def test_calendar_that_was_set_forward_counts_when_a_day_has_passed_or_an_operator_says_so(
    word: bool,
):
    """The word is that the broker reads its settings again."""
    house = RetainingBroker()
    await house.fill(batches=20)
    house.clock.wall_offset_ms += 8_760 * HOUR
    assert await house.cleaning.check() == 0
    if word:
        house.cleaning.apply_settings(settings_of())
    else:
        house.clock.advance(24 * HOUR)
    assert await house.cleaning.check() > 0
    assert house.cleaning.problem == ""


async def test_time_alone_counts_where_the_subject_says_so():
    """A group on such a subject is moved on to the first message that is left, durably."""
    house = RetainingBroker()
    await house.fill(batches=100, retention=Retention.TIME)
    await house.desk.acquire(1)
    await house.cleaning.check()
    first = house.first()
    assert first > 0
    group = house.store.state.partition(1).groups["audit"]
    assert group.acked.cursor == first
    await house.store.close()
    house.open()
    assert (await house.desk.acquire(2, "b" * 16)).cursor == first
    await house.agrees()


async def test_new_group_begins_at_the_first_message_there_is():
    """A group that comes after retention is not sent to messages that are gone."""
    house = RetainingBroker()
    await house.fill(batches=100)
    await house.cleaning.check()
    assert (await house.desk.acquire(1)).cursor == house.first() > 0
    payload, _ = await house.desk.pull(1, house.first())
    assert payload.upto > house.first()


async def test_log_is_kept_below_its_size():
    """The log is kept below its size, a segment or two aside."""
    house = RetainingBroker(retention_ms=0, retention_bytes=3 * SEGMENT)
    await house.fill(batches=100)
    await house.cleaning.check()
    assert house.store.log.end - house.store.log.first_position <= 3 * SEGMENT + 8192
    await house.agrees()


async def test_full_disk_stops_messages_and_heals():
    """At 90 % messages are refused, what consumers do is not; once there is room they are taken
    again.
    """
    house = RetainingBroker()
    await house.fill(batches=30)
    await house.desk.acquire(1)
    house.disk.total_space, house.disk.free_space = 1_000_000, 95_000
    await house.cleaning.check()
    with pytest.raises(BrokerReadOnlyError, match=r"^broker group '.+' takes no.* 90 %") as full:
        await house.desk.append(batch(sequence=60))
    assert full.value.broker_group
    assert house.first() == 0
    await house.desk.ack(1, (0, 50))
    await house.desk.acquire(2, "b" * 16)
    await house.cleaning.check()
    assert house.first() > 0
    house.disk.free_space = 500_000
    await house.cleaning.check()
    await house.desk.append(batch(sequence=60))


async def test_messages_are_refused_when_the_data_folder_was_removed(tmp_path):
    """Files that are open would still take them, and they would be gone at the next start."""
    folder = tmp_path / "data"
    folder.mkdir()
    house = RetainingBroker(RealFiles(folder))
    await house.fill(batches=1)
    await house.cleaning.check()
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(DataFolderError, match="was removed while the broker runs"):
        await house.cleaning.check()
    with pytest.raises(BrokerReadOnlyError, match="was removed while the broker runs"):
        await house.desk.append(batch(partition_id=1, sequence=90), 1)
    (tmp_path / "elsewhere").rename(folder)
    await house.cleaning.check()
    await house.desk.append(batch(partition_id=1, sequence=2), 1)
    await house.store.close()


async def test_log_tells_what_a_full_disk_does(caplog):
    """Health alone told that messages are refused, and nothing that they go before retention_ms."""
    caplog.set_level("WARNING", "keylane.broker")
    house = RetainingBroker(retention_ms=1000 * HOUR)
    await house.fill(batches=30, groups=["g"])
    house.disk.total_space, house.disk.free_space = 1_000_000, 95_000
    await house.cleaning.check()
    await house.cleaning.check()
    assert [line[:20] for line in caplog.messages] == ["messages are refused"]
    house.disk.free_space = 500_000
    await house.cleaning.check()
    assert caplog.messages[1:] == ["messages are accepted again: the disk has room"]
    other = RetainingBroker(retention_ms=1000 * HOUR)
    await other.fill(batches=30)
    other.disk.total_space, other.disk.free_space = 1_000_000, 140_000
    caplog.clear()
    await other.cleaning.check()
    assert other.first() > 0
    assert [line[:22] for line in caplog.messages] == ["the disk was 86 % full"]


async def test_lines_stay_few_when_the_disk_crosses_its_limit_at_each_check(caplog):
    """An hour of it had 720 lines."""
    caplog.set_level("WARNING", "keylane.broker")
    house = RetainingBroker()
    await house.fill(batches=3)
    house.disk.total_space = 1_000_000
    for number in range(360):
        house.disk.free_space = 500_000 if number % 2 else 95_000
        await house.cleaning.check()
        house.clock.advance(10_000)
    assert 4 <= len(caplog.messages) <= 20


@pytest.mark.parametrize("path_of", [trail_path, segment_path])
async def test_segment_whose_removal_fails_goes_before_any_later_one(path_of):
    """While a file of the first segment cannot be removed, no other segment goes, its offsets are
    not read, and the problem is told.
    """
    house = RetainingBroker()
    await house.fill(batches=100)
    bases = house.store.log.bases

    def fail_at(name):
        if name == "remove" and house.disk.size(trail_path(0)) is None:
            house.disk.failing_operation = "remove"

    house.disk.on_step = fail_at
    if path_of is trail_path:
        house.disk.failing_operation = "remove"
    with pytest.raises(StorageError, match=path_of(0)):
        await house.cleaning.check()
    assert house.store.log.first_position == bases[1]
    with pytest.raises(OffsetOutOfRangeError):
        await house.desk.read(0)

    house.clock.advance(10 * HOUR)
    with pytest.raises(StorageError, match=path_of(0)):
        await house.cleaning.check()
    assert segment_bases(house.disk)[: len(bases)] == bases
    checks = asyncio.create_task(house.cleaning.run())
    while not house.cleaning.problem:
        await asyncio.sleep(0)
    checks.cancel()
    assert path_of(0) in house.cleaning.problem

    house.disk.on_step, house.disk.failing_operation = lambda _name: None, ""
    all_bases = segment_bases(house.disk)
    assert await house.cleaning.check() > 0
    assert house.cleaning.problem == ""
    assert (
        segment_bases(house.disk)
        == house.store.log.bases
        == all_bases[-len(house.store.log.bases) :]
    )
    await house.agrees()
    await house.store.close()
    for name in house.disk.list("snapshot"):
        house.disk.remove(f"snapshot/{name}")
    house.open()
    assert describe_damage(house.store.state) == []
    await house.agrees()
    await house.desk.append(batch(sequence=200))


async def test_removal_that_failed_is_finished_though_nothing_else_is_due():
    """The next check removes the file, and a start from the log alone finds no gap."""
    house = RetainingBroker()
    await house.fill(batches=100)
    bases = house.store.log.bases
    house.disk.failing_operation = "remove"
    with pytest.raises(StorageError):
        await house.store.carry_over.remove_oldest_segment()
    house.disk.failing_operation = ""
    assert segment_bases(house.disk) == bases
    house.cleaning._limits = type(house.cleaning._limits)(retention_ms=0, retention_bytes=0)
    assert await house.cleaning.check() == 0
    assert segment_bases(house.disk) == bases[1:]
    assert not house.store.log.has_undeleted


async def test_reader_that_is_overtaken_is_told():
    """A read whose bytes go while it waits for its turn is out of range, not damage."""
    house = RetainingBroker()
    await house.fill(batches=100)
    turn = asyncio.Event()

    async def later(function, /, *args):
        await turn.wait()
        return function(*args)

    house.store.run_read = later
    reading = asyncio.create_task(house.desk.read(0))
    await asyncio.sleep(0)
    await house.cleaning.check()
    assert house.first() > 0
    turn.set()
    with pytest.raises(OffsetOutOfRangeError):
        await reading


async def test_producers_are_remembered_when_their_segments_go():
    """A batch sent again after its segment went, and the broker was restarted without a snapshot,
    is a duplicate.
    """
    house = RetainingBroker()
    await house.fill(batches=100)
    await house.cleaning.check()
    await house.store.close()
    for name in house.disk.list("snapshot"):
        house.disk.remove(f"snapshot/{name}")
    house.open()
    service = BrokerService(house.store, clock=house.clock)
    answer, _ = await service.handle(Append(1), memoryview(batch(sequence=198)))
    assert answer.duplicate
    answer, _ = await service.handle(Append(1), memoryview(batch(sequence=200)))
    assert answer.base_offset == 200
    await house.agrees()


async def test_reader_that_hangs_delays_no_append():
    """Appends, acks and other readers go on while a read waits for its disk."""
    house = RetainingBroker()
    await house.fill(batches=40)
    never = asyncio.Event()
    run_read = house.store.run_read

    async def hangs(function, /, *args):
        await never.wait()
        return function(*args)

    house.store.run_read = hangs
    slow = [asyncio.create_task(house.desk.read(0, bytes_max=1 << 21)) for _ in range(100)]
    await asyncio.sleep(0)
    house.store.run_read = run_read
    await house.desk.acquire(1)
    for number in range(40, 60):
        await house.desk.append(batch(sequence=2 * number))
    await house.desk.ack(1, (0, 100))
    assert (await house.desk.read(100))[0].upto == 120
    never.set()
    for answer, _ in await asyncio.gather(*slow):
        assert answer.upto > 0


async def test_removal_is_told_by_the_held_calendar_when_the_log_is_too_large():
    """A year set forward makes no message go a year from now: it may go at once, by the calendar
    that ages are judged by.
    """
    house = RetainingBroker(retention_bytes=1)
    await house.fill(batches=1)
    await house.cleaning.check()
    now_ms = house.clock.wall_ms()
    house.clock.wall_offset_ms += 365 * 24 * HOUR
    assert house.cleaning.removed_from_ms(now_ms) == now_ms


class CountedBase(int):
    """The position of a segment that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedBase.compared += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


async def _fill_without_messages(house: RetainingBroker) -> None:
    """Sealed segments that have progress alone, behind some with messages."""
    await house.fill(batches=20)
    await house.fill(partitions=(9,), batches=0, groups=("g",))
    partition = house.store.state.partition(9)
    for _ in range(300):
        await house.store.save_now(partition, partition.groups["g"], undo=lambda: None)


async def test_check_reads_a_segment_without_messages_once(monkeypatch):
    """A log of acks was read from each segment's beginning in each check, ten thousand records of
    each.
    """
    house = RetainingBroker()
    await _fill_without_messages(house)
    read: list[str] = []
    pread = house.disk.pread

    def counted(path, position, length):
        read.append(path)
        return pread(path, position, length)

    monkeypatch.setattr(house.disk, "pread", counted)
    await house.cleaning.check()
    bases = house.store.log.bases
    assert len(bases) > 8
    assert {segment_path(base) for base in bases} <= set(read)
    read.clear()
    await house.cleaning.check()
    assert set(read) <= {segment_path(bases[-1])}


async def test_segment_goes_when_its_first_message_came_after_a_check():
    """It was the last segment of the log then, and had progress alone."""
    house = RetainingBroker()
    await _fill_without_messages(house)
    last = house.store.log.bases[-1]
    await house.cleaning.check()
    assert house.cleaning._times[last].first_ms is None
    await house.fill(partitions=(3,), batches=200)
    assert await house.cleaning.check()
    assert house.store.log.first_position > last


async def test_check_compares_positions_as_often_as_there_are_segments():
    """With ten thousand segments each check compared all of them with one another."""
    house = RetainingBroker()
    await house.fill(batches=600, groups=("g",))  # which has acked nothing, so that all stays
    await house.cleaning.check()
    known = house.cleaning._times
    count = len(known)
    assert count > 40
    house.cleaning._times = {CountedBase(base): at for base, at in known.items()}
    CountedBase.compared = 0
    await house.cleaning.check()
    assert CountedBase.compared <= 6 * count

"""Retention and the groups that a broker was told of: nothing goes before, and what time removes is
counted.
"""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from keylane.broker.control import BrokerControl
from keylane.broker.partition.image import decode_partition, encode_partition
from keylane.broker.retention import loop
from keylane.broker.retention.loop import RetentionLoop
from keylane.broker.store.group_changes import forget_group, register_groups_at
from keylane.broker.store.store import Store
from keylane.protocol.control import HostPartition, Retention
from keylane.protocol.errors import BrokerReadOnlyError, FencedError, GroupUnknownError
from keylane.protocol.frames import Ack, Acquire, AcquireShared, PullShared
from keylane.protocol.progress import ForgetGroup, RegisterGroups
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import SESSION, Desk, batch, facts, in_place, open_store, settings_of

HOUR = 3_600_000
OTHER = "b" * 16


class GatedBroker:
    """A broker whose commits can be held back, with an hour between messages."""

    def __init__(self) -> None:
        self.disk, self.clock = SimDisk(), ManualClock()
        self.gate = asyncio.Event()
        self.gate.set()
        self.open()

    def open(self) -> None:
        async def commit(function, *args):
            await self.gate.wait()
            return function(*args)

        settings = settings_of(segment_bytes=4096, cache_bytes=0)
        self.store = Store.open(
            self.disk, settings, clock=self.clock, run_commit=commit, run_read=in_place
        )
        self.desk = Desk(self.store, self.clock)
        self.cleaning = RetentionLoop(
            self.store, self.disk, settings, clock=self.clock, run_commit=commit, run_read=in_place
        )
        self.control = BrokerControl(
            self.store,
            broker_group="g1",
            broker_id="id",
            clock=self.clock,
            registration=lambda: "",
            retention=lambda: self.cleaning.problem,
        )

    def kill(self) -> None:
        """The power goes: what was not synced may be gone."""
        self.disk = self.disk.disk_after_crash(random.Random(1))
        self.gate = asyncio.Event()
        self.gate.set()
        self.open()

    async def host(self, number: int = 1, **said) -> None:
        told = facts(number)
        body = HostPartition(subject=told.subject, partition=told.partition, **said)
        await self.control.host(body, {})

    async def fill(self, partitions=(1,), *, start: int = 0, batches: int = 100) -> None:
        for number in range(start, start + batches):
            self.clock.advance(HOUR)
            for partition_id in partitions:
                await self.desk.append(
                    batch(partition_id=partition_id, sequence=2 * number), partition_id
                )

    def partition(self, number: int = 1):
        return self.store.state.partition(number)

    def status(self, number: int = 1):
        return self.partition(number).status(now_ms=0)


async def test_partition_whose_groups_were_never_told_removes_nothing():
    """It says so, by number and in the health; once all groups are told it goes, a restart in
    between or not.
    """
    house = GatedBroker()
    await house.host()
    await house.host(2, groups=())
    await house.fill((1, 2))
    assert await house.cleaning.check() == 0
    assert house.partition().first_offset == house.partition(2).first_offset == 0
    assert house.cleaning.untold == (1,)
    assert "not said which consumer groups read partition 1" in house.cleaning.problem
    health = await house.control.health(None, {})
    assert health.details["retention"] == house.cleaning.problem
    assert not house.status().groups_told
    assert house.status(2).groups_told
    await house.store.close()
    house.open()
    assert await house.cleaning.check() == 0
    await house.control.register_groups(RegisterGroups(groups=("late",)), {"id": "1"})
    assert await house.cleaning.check() == 0
    await house.control.register_groups(
        RegisterGroups(groups=("late",), complete=True), {"id": "1"}
    )
    assert await house.cleaning.check() == 0, "the group has acked nothing"
    assert house.cleaning.untold == ()
    assert "has not acked" in house.cleaning.problem
    await house.desk.acquire(3, group="late")
    await house.desk.say(Ack(1, "late", SESSION, 3, ((0, 200),)))
    assert await house.cleaning.check() > 0
    assert house.partition().first_offset > 0


async def test_groups_told_with_the_hosting_are_waited_for_from_the_first_message_on():
    """A child that is hosted with its subject's groups keeps all for a group that never came; so
    after a kill.
    """
    house = GatedBroker()
    await house.host(groups=("dead", "alive"))
    await house.host(groups=("dead", "alive", "young"))
    await house.fill()
    await house.desk.acquire(3, group="alive")
    await house.desk.say(Ack(1, "alive", SESSION, 3, ((0, 200),)))
    for _ in range(2):
        assert await house.cleaning.check() == 0
        assert house.partition().first_offset == 0
        assert [group.group for group in house.status().groups] == ["alive", "dead", "young"]
        assert house.status().facts.groups is None
        house.kill()


async def test_partition_counts_as_told_when_that_is_on_the_disk():
    """Before the commit is on the disk the partition does not count as told and lists no group; a
    kill then forgets all of it.
    """
    house = GatedBroker()
    await house.host()
    await house.fill(batches=3)
    house.gate.clear()
    telling = asyncio.create_task(
        house.control.register_groups(RegisterGroups(groups=("g",), complete=True), {"id": "1"})
    )
    await asyncio.sleep(0.01)
    assert not telling.done()
    assert not house.partition().groups_told
    assert house.status().groups == ()
    telling.cancel()
    house.kill()
    assert not house.partition().groups_told
    assert house.partition().groups == {}
    await house.control.register_groups(RegisterGroups(groups=("g",), complete=True), {"id": "1"})
    house.kill()
    assert house.partition().groups_told
    assert [group.group for group in house.status().groups] == ["g"]


async def test_mark_is_in_images_and_in_records_written_again():
    """Snapshots and the STATE record that stands for removed segments have it."""
    house = GatedBroker()
    await house.host(groups=())
    assert decode_partition(1, encode_partition(house.partition())).groups_told
    await house.fill()
    assert await house.cleaning.check() > 0
    for name in house.disk.list("snapshot"):
        house.disk.remove(f"snapshot/{name}")
    house.kill()
    assert house.partition().groups_told


async def test_messages_removed_unread_by_time_are_counted_logged_and_kept(caplog):
    """By group and partition, without what was acked; told once for a group, and there after a
    kill.
    """
    house = GatedBroker()
    for number in (1, 2):
        await house.host(number, retention=Retention.TIME, groups=())
        await register_groups_at(house.store, house.partition(number), ["slow", "quick"])
    await house.fill((1, 2))
    await house.desk.acquire(3, group="quick")
    await house.desk.say(Ack(1, "quick", SESSION, 3, ((0, 200),)))
    await house.desk.acquire(3, group="slow")
    await house.desk.say(Ack(1, "slow", SESSION, 3, ((5, 10),)))
    with caplog.at_level(logging.WARNING, "keylane.broker"):
        assert await house.cleaning.check() > 0
    first, second = house.partition().first_offset, house.partition(2).first_offset
    assert first > 10
    for _ in range(2):
        counts = {
            (number, group.group): group.removed_unread
            for number in (1, 2)
            for group in house.status(number).groups
        }
        assert counts == {
            (1, "quick"): 0,
            (1, "slow"): first - 5,
            (2, "quick"): second,
            (2, "slow"): second,
        }
        house.kill()
    told = [
        record.getMessage() for record in caplog.records if "has not read" in record.getMessage()
    ]
    removes, unread = "retention removes", "messages of flights that group"
    assert told == [
        f"{removes} {second} {unread} quick has not read, in 1 partition",
        f"{removes} {first - 5 + second} {unread} slow has not read, in 2 partitions",
    ]


async def test_counts_are_on_the_disk_before_the_segments_go(monkeypatch):
    """Where the count cannot be written nothing goes; the next look writes it, and counts nothing
    twice.
    """
    house = GatedBroker()
    await house.host(retention=Retention.TIME, groups=("slow",))
    await house.fill()
    real = house.store.save_progress

    def refuse(*_args):
        raise BrokerReadOnlyError("the disk is full")

    house.store.first_offsets._save = refuse
    monkeypatch.setattr(loop, "release_reserve", lambda _files: False)
    begin = house.store.log.first_position
    with pytest.raises(BrokerReadOnlyError):
        await house.cleaning.check()
    assert house.store.log.first_position == begin
    house.store.first_offsets._save = real
    assert await house.cleaning.check() > 0
    (group,) = house.status().groups
    assert group.removed_unread == house.partition().first_offset > 0
    house.kill()
    assert house.status().groups[0].removed_unread == group.removed_unread


async def test_status_tells_only_what_is_on_the_disk():
    """A cursor whose ack is on its way is not shown: a database made anew from it would know more
    than a restart.
    """
    house = GatedBroker()
    await house.host(groups=())
    await house.fill(batches=2)
    await house.desk.acquire(3)
    house.gate.clear()
    ack = asyncio.create_task(house.desk.ack(3, (0, 2), (3, 4)))
    await asyncio.sleep(0.01)
    (group,) = house.status().groups
    assert (group.cursor, group.acked_above, group.lag) == (0, 0, 4)
    house.gate.set()
    await ack
    (group,) = house.status().groups
    assert (group.cursor, group.acked_above, group.lag) == (2, 1, 1)


async def test_partition_is_listed_when_it_is_on_the_disk():
    """A database made anew from the list knows of no partition that a kill takes away."""
    house = GatedBroker()
    await house.host(groups=())
    house.gate.clear()
    hosting = asyncio.create_task(house.host(2, groups=()))
    await asyncio.sleep(0.01)
    assert [
        partition.partition_id for partition in (await house.control.list(None, {})).partitions
    ] == [1]
    house.gate.set()
    await hosting
    assert [
        partition.partition_id for partition in (await house.control.list(None, {})).partitions
    ] == [1, 2]


async def taken(house: GatedBroker, session: str, *, wait_ms: int = 0):
    ask = PullShared(1, "audit", session, 5, 100, 1 << 20, wait_ms, 1_000)
    answer, _ = await house.desk.service.handle(ask, memoryview(b""))
    return answer


async def test_end_of_a_shared_partition_is_told_from_durable_acks():
    """A session that asks while the last ack is on its way hears nothing of it; a kill then leaves
    nothing drained.
    """
    house = GatedBroker()
    await house.host(groups=())
    await house.fill(batches=2)
    for session in (SESSION, OTHER):
        await house.desk.say(AcquireShared(1, "audit", session, 5, 2_000))
    assert (await taken(house, SESSION)).ranges == ((0, 4),)
    _, sealed = house.store.seal(1)
    await sealed
    house.gate.clear()
    ack = asyncio.create_task(house.desk.say(Ack(1, "audit", SESSION, 5, ((0, 4),))))
    await asyncio.sleep(0.01)
    asks = [asyncio.create_task(taken(house, OTHER, wait_ms=wait_ms)) for wait_ms in (0, 20_000)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in (ack, *asks))
    for task in (ack, *asks):
        task.cancel()
    house.kill()
    assert house.status().groups[0].cursor == 0
    await house.desk.say(AcquireShared(1, "audit", OTHER, 5, 2_000))
    assert (await taken(house, OTHER)).ranges == ((0, 4),)
    waiting = asyncio.create_task(taken(house, OTHER, wait_ms=20_000))
    await asyncio.sleep(0.01)
    await house.desk.say(Ack(1, "audit", OTHER, 5, ((0, 4),)))
    answer = await waiting
    assert (answer.cursor, answer.next_offset, answer.sealed) == (4, 4, True)
    house.kill()
    assert house.status().groups[0].cursor == 4


async def test_shared_cursor_is_told_from_durable_acks():
    """An ack of another session raises the cursor only when it is on the disk."""
    house = GatedBroker()
    await house.host(groups=())
    await house.fill(batches=2)
    for session in (SESSION, OTHER):
        await house.desk.say(AcquireShared(1, "audit", session, 5, 2_000))
    await taken(house, SESSION)
    house.gate.clear()
    ack = asyncio.create_task(house.desk.say(Ack(1, "audit", SESSION, 5, ((0, 2),))))
    await asyncio.sleep(0.01)
    assert (await taken(house, OTHER)).cursor == 0
    house.gate.set()
    await ack
    assert (await taken(house, OTHER)).cursor == 2


async def test_older_log_counts_as_never_told():
    """Records and images from before there was a mark are read, and nothing goes until the
    metaserver tells.
    """
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock=clock)
    _, durable = store.host(facts(1))
    await durable
    assert await store.snapshotter.write()
    await store.close()
    again = open_store(disk, clock=clock)
    assert not again.state.partition(1).groups_told
    assert not decode_partition(1, encode_partition(again.state.partition(1))).groups_told


@pytest.mark.parametrize("kind", [Acquire, AcquireShared])
async def test_acquire_makes_no_group_when_all_groups_were_told(kind):
    """A client with `consume` on every group made a thousand, and no new group found a place; a
    told one does.
    """
    broker = GatedBroker()
    await broker.host(retention=Retention.ACKED, groups=("told",))
    for number in range(3):
        with pytest.raises(GroupUnknownError) as refused:
            await broker.desk.say(kind(1, f"ghost{number}", SESSION, 1, 2000))
        assert (refused.value.subject, refused.value.group) == ("flights", f"ghost{number}")
    assert list(broker.store.state.partition(1).groups) == ["told"]
    await broker.desk.say(kind(1, "told", SESSION, 1, 2000))
    await register_groups_at(
        broker.store, broker.store.state.partition(1), ("later",), complete=True
    )
    await broker.desk.say(kind(1, "later", SESSION, 1, 2000))
    broker.kill()
    with pytest.raises(GroupUnknownError):
        await broker.desk.say(kind(1, "ghost", SESSION, 1, 2000))
    await broker.desk.say(kind(1, "later", SESSION, 2, 2000))


@pytest.mark.parametrize(
    "said",
    [
        {"retention": Retention.TIME, "groups": ()},
        {"groups": ()},
        {"retention": Retention.ACKED},
    ],
    ids=["by time", "older metaserver", "never told"],
)
async def test_acquire_makes_a_group_when_brokers_may_not_have_been_told(said):
    """Of a subject whose messages go by age no groups are told, and an older metaserver does not
    say how they go.
    """
    broker = GatedBroker()
    await broker.host(**said)
    await broker.desk.say(Acquire(1, "new", SESSION, 1, 2000))
    assert list(broker.store.state.partition(1).groups) == ["new"]


async def test_acquire_of_a_deleted_group_is_fenced_when_all_groups_were_told():
    """A consumer of it learns that its lease has ended."""
    broker = GatedBroker()
    await broker.host(retention=Retention.ACKED, groups=("gone",))
    ask = ForgetGroup(group="gone", token=5)
    _, durable = forget_group(broker.store, broker.store.state.partition(1), ask)
    await durable
    with pytest.raises(FencedError):
        await broker.desk.say(Acquire(1, "gone", SESSION, 5, 2000))

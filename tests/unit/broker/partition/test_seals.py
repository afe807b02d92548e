"""When a partition can be sealed, and what its broker says of that before it is asked to; what an
open one refuses.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from keylane.broker.control import BrokerControl
from keylane.broker.partition import partition
from keylane.broker.store import group_commit
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    KeylaneError,
    MessageTooLargeError,
    OverloadedError,
    Reason,
    SequenceGapError,
    StaleRouteError,
)
from keylane.protocol.routing import PartitionState
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, facts, open_store
from support.raising import raises


class Office:
    """A broker with partition 1, and what it answers to control calls."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.disk = SimDisk()
        self.store = open_store(self.disk, clock=self.clock)
        self.desk = Desk(self.store, self.clock)
        self.control = BrokerControl(
            self.store,
            broker_group="g1",
            broker_id="folder",
            clock=self.clock,
            registration=lambda: "",
        )

    async def unsealable(self) -> str:
        return (await self.control.describe(None, {"id": "1"})).unsealable

    async def seal(self) -> PartitionState:
        return (await self.control.seal(None, {"id": "1"})).state


@pytest.fixture
async def office() -> Office:
    office = Office()
    await office.desk.host()
    return office


async def test_partition_refuses_a_larger_message_and_takes_what_fits(office):
    """After a restart too; a repeat of what is stored is answered, and a sealed partition says so
    first.
    """
    low = msgspec.structs.replace(facts(2), message_bytes_max=1_024)
    await office.store.host(low)[1]
    small = batch(partition_id=2, count=50)
    assert len(small) > 1_024
    await office.desk.append(small, 2)
    store = open_store(office.disk, clock=office.clock)
    desk = Desk(store, office.clock)
    large = batch(partition_id=2, sequence=50, value=bytes(1_024))
    with pytest.raises(MessageTooLargeError) as raised:
        await desk.append(large, 2)
    assert (raised.value.size_bytes, raised.value.limit_bytes) == (1_024 + 3 + 3, 1_024)
    assert (await desk.append(small, 2)).duplicate
    with pytest.raises(SequenceGapError):
        await desk.append(batch(partition_id=2, sequence=52), 2)
    await desk.append(batch(partition_id=2, sequence=50), 2)
    await store.seal(2)[1]
    with pytest.raises(StaleRouteError):
        await desk.append(batch(partition_id=2, sequence=52, value=bytes(1_024)), 2)


async def test_partition_is_hosted_under_one_limit(office):
    with raises(Reason.PARTITION_IN_USE):
        office.store.host(msgspec.structs.replace(facts(1), message_bytes_max=1_024))


async def test_broker_that_holds_messages_back_seals(office):
    """A disk too full for messages has room for a seal; it could be sealed, and is, and says so
    after a restart.
    """
    office.store.commit.refuse_messages("the disk is 90 % full")
    with pytest.raises(BrokerReadOnlyError):
        await office.desk.append(batch())
    assert await office.unsealable() == ""
    assert await office.seal() is PartitionState.SEALED
    assert await office.unsealable() == ""
    await office.store.close()
    assert open_store(office.disk).state.partition(1).ended


async def test_describe_says_why_a_partition_cannot_be_sealed(office):
    """Damage at the end and a failed write: the words of the refusal, before the seal is asked
    for.
    """
    partition = office.store.state.partition(1)
    office.store.state.add_lost_range(partition, 0, -1, position=0)
    with pytest.raises(KeylaneError) as refused:
        await office.seal()
    assert await office.unsealable() == refused.value.message
    partition.lost = ()
    assert await office.unsealable() == ""
    office.disk.failing_operation = "fdatasync"
    with pytest.raises(KeylaneError):
        await office.desk.append(batch())
    with pytest.raises(BrokerReadOnlyError) as refused:
        await office.seal()
    assert await office.unsealable() == refused.value.message


async def test_full_disk_says_so_until_there_is_room(office):
    """A write that found no room holds seals up too, and no longer than that."""
    office.disk.free_space = 0
    with pytest.raises(KeylaneError):
        await office.seal()
    assert "the disk is full" in await office.unsealable()
    office.disk.free_space = None
    office.clock.advance(10_000)
    assert await office.unsealable() == ""
    assert await office.seal() is PartitionState.SEALED


async def test_seal_has_room_where_messages_have_none(office):
    """However much producers have waiting for the disk, a partition is sealed behind it."""
    office.store.commit._queued_bytes_max = 1
    told: list[KeylaneError | None] = []
    office.store.append(1, memoryview(batch()), told.append)
    with pytest.raises(OverloadedError):
        office.store.append(1, memoryview(batch(sequence=2)), told.append)
    assert await office.seal() is PartitionState.SEALED
    assert told == [None]


async def test_partition_is_hosted_where_messages_have_no_room(office):
    """A resize that is to relieve a broker does not wait until its producers are slow; one that
    takes no messages hosts nothing.
    """
    office.store.commit._queued_bytes_max = 1
    told: list[KeylaneError | None] = []
    office.store.append(1, memoryview(batch()), told.append)
    _, hosted = office.store.host(facts(2))
    await hosted
    assert told == [None]
    office.store.commit.refuse_messages("the disk is 90 % full")
    with pytest.raises(BrokerReadOnlyError):
        office.store.host(facts(3))


async def test_broker_that_is_busy_for_a_moment_can_seal(office, monkeypatch):
    """More waits for the disk than it takes at once: that passes by itself, and is no reason to
    wait with a plan.
    """
    monkeypatch.setattr(group_commit, "CONTROL_QUEUED_BYTES_MAX", 0)
    office.store.commit._queued_bytes_max = 1
    told = asyncio.Event()
    office.store.append(1, memoryview(batch()), lambda _error: told.set())
    assert await office.unsealable() == ""
    with pytest.raises(OverloadedError):
        await office.seal()
    await told.wait()
    assert await office.seal() is PartitionState.SEALED


async def test_partition_with_messages_is_not_sealed_when_it_should_be_empty(office):
    """Who takes back what it had hosted, and meets another's partition of that number, changes
    nothing there.
    """
    await office.desk.append(batch())
    with raises(Reason.PARTITION_IN_USE):
        await office.control.seal(None, {"id": "1", "empty": "1"})
    assert not office.store.state.partition(1).sealed
    assert await office.seal() is PartitionState.SEALED


async def test_empty_partition_is_sealed_when_it_should_be_empty(office):
    for _ in range(2):
        status = await office.control.seal(None, {"id": "1", "empty": "1"})
        assert (status.state, status.next_offset) == (PartitionState.SEALED, 0)


async def test_partition_takes_no_more_messages_than_it_may_hold(office, monkeypatch):
    """Logic offsets behind a loss rest on it. A batch that does not fit is refused whole, and what
    is stored is told.
    """
    monkeypatch.setattr(partition, "PARTITION_MESSAGES_MAX", 5)
    await office.desk.append(batch(count=4))
    with pytest.raises(OverloadedError, match="move it"):
        await office.desk.append(batch(sequence=4, count=2))
    await office.desk.append(batch(count=4))
    await office.desk.append(batch(sequence=4, count=1))
    assert office.store.state.partition(1).next_offset == 5
    assert await office.seal() is PartitionState.SEALED

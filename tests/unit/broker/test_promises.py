"""A broker promises an owner that no higher token is let in."""

from __future__ import annotations

import asyncio

import pytest

from keylane.broker.copies.commitment import Commitment
from keylane.broker.store import carry_over
from keylane.broker.store.group_changes import forget_group, set_cursor
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    BusyError,
    FencedError,
    Reason,
    StorageError,
)
from keylane.protocol.frames import Ack, Acked
from keylane.protocol.progress import ForgetGroup, SetCursor
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import SESSION, AskedCall, Desk, batch, open_store

OTHER = "b" * 16
TTL_MS = 10_000
PROMISE_MS = 5_000


class PromisedDesk(Desk):
    """A broker whose owner asks for promises."""

    async def want(self, token: int = 1, promise_ms: int = PROMISE_MS) -> Acked:
        answer, _ = await self.service.handle(
            Ack(1, "audit", SESSION, token, (), promise_ms=promise_ms), memoryview(b"")
        )
        return answer


async def opened(disk: SimDisk, clock: ManualClock) -> PromisedDesk:
    return PromisedDesk(open_store(disk, clock=clock), clock)


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
async def desk(disk: SimDisk) -> PromisedDesk:
    desk = await opened(disk, ManualClock())
    await desk.host()
    await desk.append(batch())
    await desk.acquire(1, ttl_ms=TTL_MS)
    return desk


async def refusal(desk: Desk, token: int = 2) -> BusyError:
    """Return the refusal of a higher token, which waits for a while by the real clock."""
    waiting = asyncio.create_task(desk.acquire(token, OTHER))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    desk.clock.advance(2_001)
    desk.service._long_polls.wake(1)
    with pytest.raises(BusyError) as refused:
        await asyncio.wait_for(waiting, 5)
    return refused.value


async def test_higher_token_waits_until_the_promise_has_run_out(desk: PromisedDesk) -> None:
    assert (await desk.want()).promise_ms == PROMISE_MS
    error = await refusal(desk)
    assert error.reason is Reason.PROMISED
    assert error.left_ms == PROMISE_MS - 2_001
    desk.clock.advance(PROMISE_MS - 2_001)
    await desk.acquire(2, OTHER)
    with pytest.raises(FencedError):
        await desk.want()


async def test_higher_token_takes_the_lock_at_once_when_no_promise_was_asked_for(
    desk: PromisedDesk,
) -> None:
    """As while heartbeats succeed, and with clients of an earlier version."""
    assert (await desk.want(promise_ms=0)).promise_ms == 0
    await desk.acquire(2, OTHER)


async def test_waiting_token_ends_the_promise(desk: PromisedDesk) -> None:
    await desk.want()
    await refusal(desk)
    answer = await desk.want()
    assert (answer.promise_ms, answer.is_wanted) == (0, True)


async def test_waiting_token_is_let_in_when_the_owner_releases(desk: PromisedDesk) -> None:
    await desk.want()
    waiting = asyncio.create_task(desk.acquire(2, OTHER))
    await asyncio.sleep(0)
    assert not waiting.done()
    await desk.release(1)
    await asyncio.wait_for(waiting, 5)


async def test_promise_lasts_no_longer_than_the_ttl(desk: PromisedDesk) -> None:
    assert (await desk.want(promise_ms=10 * TTL_MS)).promise_ms == TTL_MS


async def test_promise_is_durable_before_it_is_told(desk: PromisedDesk, disk: SimDisk) -> None:
    """A broker started from that very disk keeps higher tokens out for as long from its start."""
    await desk.want()
    clock = ManualClock()
    again = await opened(disk, clock)
    await again.acquire(1, SESSION, ttl_ms=TTL_MS)
    error = await refusal(again)
    assert error.left_ms == PROMISE_MS - 2_001
    clock.advance(PROMISE_MS - 2_001)
    await again.acquire(2, OTHER)
    third = await opened(disk, ManualClock())
    await third.acquire(3, SESSION)


async def test_start_lets_a_higher_token_in_at_once_when_nothing_was_promised(
    desk: PromisedDesk, disk: SimDisk
) -> None:
    again = await opened(disk, ManualClock())
    await again.acquire(2, OTHER)


async def test_group_is_not_forgotten_while_its_owner_has_a_promise(desk: PromisedDesk) -> None:
    await desk.want()
    partition, request = desk.store.state.partition(1), ForgetGroup(group="audit", token=1)
    with pytest.raises(BusyError) as refused:
        forget_group(desk.store, partition, request)
    assert refused.value.reason is Reason.PROMISED
    assert (await desk.want()).is_wanted, "the owner hands over"
    desk.clock.advance(PROMISE_MS)
    _, durable = forget_group(desk.store, partition, request)
    await durable
    assert "audit" not in partition.groups


async def test_cursor_is_not_set_while_the_owner_has_a_promise(desk: PromisedDesk) -> None:
    await desk.want()
    partition, request = desk.store.state.partition(1), SetCursor(group="audit", token=2, cursor=0)
    with pytest.raises(BusyError) as refused:
        set_cursor(desk.store, partition, request)
    assert refused.value.reason is Reason.PROMISED
    assert (await desk.want()).is_wanted
    await desk.release(1)
    await set_cursor(desk.store, partition, request)


async def test_promise_is_not_told_when_the_disk_fails(desk: PromisedDesk, disk: SimDisk) -> None:
    disk.failing_operation = "fdatasync"
    with pytest.raises(StorageError):
        await desk.want()


async def test_request_for_a_promise_is_refused_once_when_the_disk_has_failed(
    desk: PromisedDesk, disk: SimDisk
) -> None:
    """Its caller answers a refusal that is raised; the call must get no second one."""
    disk.failing_operation = "fdatasync"
    with pytest.raises(StorageError):
        await desk.say(Ack(1, "audit", SESSION, 1, ((0, 1),)))
    call = AskedCall()
    with pytest.raises(BrokerReadOnlyError):
        desk.service.begin(
            Ack(1, "audit", SESSION, 1, (), promise_ms=PROMISE_MS), memoryview(b""), call
        )
    for _ in range(5):
        await asyncio.sleep(0)
    assert not call.done.done()


async def test_promise_waits_for_copies(desk: PromisedDesk) -> None:
    """A copy that takes the broker's place has the record."""
    copies = Commitment(members=frozenset({"copy"}))
    desk.store.commit.copy_wait.copies = copies
    wanting = asyncio.create_task(desk.want())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not wanting.done()
    copies.synced["copy"] = desk.store.log.written_end
    desk.store.commit.copy_wait.check()
    assert (await asyncio.wait_for(wanting, 5)).promise_ms == PROMISE_MS


@pytest.mark.parametrize("image_bytes_max", [1 << 20, 0])
async def test_promise_outlives_the_segment_of_its_record(
    desk: PromisedDesk, disk: SimDisk, monkeypatch: pytest.MonkeyPatch, image_bytes_max: int
) -> None:
    """Also when the partition's state is repeated in parts."""
    monkeypatch.setattr(carry_over, "STATE_BYTES_MAX", image_bytes_max)
    await desk.want()
    await desk.store.commit.begin_segment()
    await desk.store.carry_over.remove_oldest_segment()
    again = await opened(disk, ManualClock())
    assert (await refusal(again)).reason is Reason.PROMISED


async def test_snapshot_keeps_the_promise(desk: PromisedDesk) -> None:
    from keylane.broker.partition.image import decode_partition, encode_partition

    await desk.want()
    partition = desk.store.state.partition(1)
    image = encode_partition(partition)
    assert decode_partition(1, image).groups["audit"].lock.promise_ms == PROMISE_MS
    assert not partition.is_quiet(desk.clock.boot_ms())

"""A shared group at a broker: fence, in flight, acks, restart, and the switch to and from
exclusive.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane.protocol.control import ConsumeStrategy
from keylane.protocol.errors import FencedError, InvalidRequestError, TokenUnknownError
from keylane.protocol.frames import Ack, AcquireShared, Handed, PullShared, Release
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import SESSION, Desk, batch, open_store

OTHER = "b" * 16


class SharedDesk(Desk):
    async def join(self, token: int, session: str = SESSION):
        return await self.say(AcquireShared(1, "audit", session, token, 2_000))

    async def take(
        self,
        token: int,
        session: str = SESSION,
        *,
        count_max: int = 100,
        wait_ms: int = 0,
        in_flight_ms: int = 1_000,
    ) -> Handed:
        request = PullShared(1, "audit", session, token, count_max, 1 << 20, wait_ms, in_flight_ms)
        answer, payload = await self.service.handle(request, memoryview(b""))
        assert isinstance(answer, Handed)
        assert bool(payload) == bool(answer.ranges)
        return answer

    async def ack_shared(self, token: int, *ranges: tuple[int, int], session: str = SESSION):
        return await self.say(Ack(1, "audit", session, token, ranges))


@pytest.fixture
async def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
async def desk(disk: SimDisk) -> SharedDesk:
    clock = ManualClock()
    desk = SharedDesk(open_store(disk, clock=clock), clock)
    await desk.host()
    for number in range(10):
        await desk.append(batch(sequence=2 * number))
    return desk


async def test_sessions_share_a_partition_under_one_token(desk):
    """Each brings the same token, and no message goes to two of them."""
    await desk.join(5)
    await desk.join(5, OTHER)
    assert (await desk.take(5, count_max=7)).ranges == ((0, 7),)
    assert (await desk.take(5, OTHER, count_max=100)).ranges == ((7, 20),)
    assert (await desk.take(5)).ranges == ()
    assert (await desk.ack_shared(5, (7, 20), session=OTHER)).cursor == 0
    assert (await desk.ack_shared(5, (0, 7))).cursor == 20


async def test_silent_session_is_replaced_at_its_deadline(desk):
    """When its deadline passes on the broker's clock, the messages it did not ack go to the next
    session that asks.
    """
    await desk.join(5)
    await desk.take(5, count_max=4)
    await desk.ack_shared(5, (1, 2))
    desk.clock.now_ms += 999
    assert (await desk.take(5, OTHER, count_max=2)).ranges == ((4, 6),)
    desk.clock.now_ms += 1
    assert (await desk.take(5, OTHER, count_max=4)).ranges == ((0, 1), (2, 4), (6, 7))


async def test_dead_session_is_replaced_after_its_ttl(desk):
    """Not when its messages would be late: one that waits gets them as soon as the broker has not
    heard it so long.
    """
    await desk.join(5)
    await desk.take(5, in_flight_ms=60_000)
    await desk.join(5, OTHER)
    waiting = asyncio.create_task(desk.take(5, OTHER, wait_ms=20_000, in_flight_ms=60_000))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    waiting.cancel()
    desk.clock.now_ms += 1_999
    assert (await desk.take(5, OTHER)).ranges == ()
    desk.clock.now_ms += 1
    assert (await desk.take(5, OTHER)).ranges == ((0, 20),)


async def test_session_with_slow_handlers_is_alive_by_its_acks(desk):
    """Empty acks are enough; without one for its ttl it has nothing any more, and acks of others'
    messages still count.
    """
    await desk.join(5)
    await desk.take(5, in_flight_ms=60_000)
    for _ in range(5):
        desk.clock.now_ms += 1_900
        await desk.ack_shared(5)
        assert (await desk.take(5, OTHER)).ranges == ()
    desk.clock.now_ms += 2_000
    assert (await desk.take(5, OTHER, count_max=1)).ranges == ((0, 1),)
    assert (await desk.ack_shared(5, (0, 1))).cursor == 1


async def test_released_is_handed_out_at_once_to_who_waits(desk):
    """A session that hands over wakes a waiting one, and the lock stays everybody's."""
    await desk.join(5)
    await desk.take(5)
    waiting = asyncio.create_task(desk.take(5, OTHER, wait_ms=20_000))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await desk.say(Release(1, "audit", SESSION, 5))
    assert (await waiting).ranges == ((0, 20),)
    with pytest.raises(FencedError):
        await desk.take(5)
    await desk.join(5)
    assert (await desk.take(5)).ranges == ()


async def test_pull_of_who_has_left_takes_nothing(desk):
    """A session's own waiting pull does not take what the session gives back."""
    await desk.join(5)
    await desk.take(5)
    waiting = asyncio.create_task(desk.take(5, wait_ms=20_000))
    await asyncio.sleep(0.01)
    await desk.say(Release(1, "audit", SESSION, 5))
    with pytest.raises(FencedError):
        await waiting
    assert (await desk.take(5, OTHER)).ranges == ((0, 20),)


async def test_after_a_restart_all_that_is_not_acked_is_handed_out(desk, disk):
    """Acks and the token are on the disk, what is in flight is not; the old token goes on."""
    await desk.join(5)
    await desk.take(5)
    await desk.ack_shared(5, (0, 3), (6, 8))
    await desk.store.close()
    again = SharedDesk(open_store(disk, clock=desk.clock), desk.clock)
    (group,) = again.store.state.partition(1).status(now_ms=0).groups
    assert (group.strategy, group.token, group.cursor) == (ConsumeStrategy.SHARED, 5, 3)
    assert (await again.take(5, OTHER)).ranges == ((3, 6), (8, 20))
    assert (await again.ack_shared(5, (3, 6))).cursor == 8


async def test_switch_fences_in_both_directions(desk):
    """The first new Acquire refuses every old owner: exclusive to shared, and shared to
    exclusive.
    """
    await desk.acquire(5)
    await desk.pull(5, 0)
    await desk.join(6, OTHER)
    for late in (desk.pull(5, 0), desk.ack(5, (0, 1)), desk.release(5), desk.acquire(5)):
        with pytest.raises(FencedError):
            await late
    await desk.take(6, OTHER)
    await desk.acquire(7)
    for late in (
        desk.take(6, OTHER),
        desk.ack_shared(6, (0, 1), session=OTHER),
        desk.say(Release(1, "audit", OTHER, 6)),
        desk.join(6, OTHER),
    ):
        with pytest.raises(FencedError):
            await late
    assert (await desk.acquire(7)).cursor == 0


async def test_token_is_refused_when_it_was_acquired_for_the_other_strategy(desk):
    """A token brought as shared is no exclusive owner's, and the other way round."""
    await desk.join(5)
    with pytest.raises(FencedError):
        await desk.pull(5, 0)
    with pytest.raises(FencedError):
        await desk.acquire(5)
    await desk.acquire(6)
    with pytest.raises(FencedError):
        await desk.take(6)
    with pytest.raises(FencedError):
        await desk.join(6)


async def test_waiting_pull_is_fenced_at_once(desk):
    """A pull that waits under the old token is told of the switch without waiting on."""
    await desk.join(5)
    await desk.take(5)
    waiting = asyncio.create_task(desk.take(5, OTHER, wait_ms=20_000))
    await asyncio.sleep(0.01)
    await desk.acquire(6)
    with pytest.raises(FencedError):
        await waiting


async def test_end_is_told_to_who_waits(desk):
    """When the last of a sealed partition is acked, the waiting sessions hear of it."""
    await desk.join(5)
    await desk.take(5)
    _, durable = desk.store.seal(1)
    await durable
    waiting = asyncio.create_task(desk.take(5, OTHER, wait_ms=20_000))
    await asyncio.sleep(0.01)
    await desk.ack_shared(5, (0, 20))
    answer = await waiting
    assert (answer.ranges, answer.cursor, answer.next_offset, answer.sealed) == ((), 20, 20, True)


@pytest.mark.parametrize(
    "changes", [{"count_max": 0}, {"in_flight_ms": 0}, {"in_flight_ms": 1 << 40}, {"wait_ms": -1}]
)
async def test_impossible_pulls_are_refused(desk, changes):
    """A pull beyond its limits changes nothing."""
    await desk.join(5)
    with pytest.raises(InvalidRequestError):
        await desk.take(5, **changes)
    assert (await desk.take(5)).ranges == ((0, 20),)


@pytest.mark.parametrize(
    ("held", "in_flight_ms"),
    [(((0, 21),), 1_000), (((3, 3),), 1_000), (((-1, 2),), 1_000), (((0, 2),), 0)],
)
async def test_ack_with_impossible_held_messages_changes_nothing(desk, held, in_flight_ms):
    await desk.join(5)
    await desk.take(5)
    with pytest.raises(InvalidRequestError):
        await desk.say(Ack(1, "audit", SESSION, 5, ((0, 1),), held=held, in_flight_ms=in_flight_ms))
    assert (await desk.join(5)).cursor == 0


async def test_held_messages_go_to_nobody_else(desk):
    await desk.join(5)
    await desk.join(5, OTHER)
    await desk.take(5)
    for _ in range(3):
        desk.clock.now_ms += 900
        await desk.say(Ack(1, "audit", SESSION, 5, (), held=((4, 6),), in_flight_ms=1_000))
    assert (await desk.take(5, OTHER)).ranges == ((0, 4), (6, 20))


async def test_session_is_refused_when_its_name_is_the_shared_one(desk):
    """The name that stands for all sessions is no session's."""
    with pytest.raises(InvalidRequestError):
        await desk.acquire(5, "*")
    await desk.join(5)
    with pytest.raises(InvalidRequestError):
        await desk.take(5, "*")
    with pytest.raises(TokenUnknownError):
        await desk.take(6)


async def end_with(desk: SharedDesk, session: str, **how: int) -> Handed:
    """A session takes messages, and is not heard of again."""
    await desk.join(5, session)
    handed = await desk.take(5, session, in_flight_ms=10_000, **how)
    desk.clock.now_ms += 2_000
    return handed


async def test_message_in_flight_at_two_ends_is_handled_alone_and_counted_on(desk):
    """Nothing is counted of sessions that release, nor of messages that are acked or have
    failed.
    """
    first = await end_with(desk, "1" * 16, count_max=4)
    assert (first.ranges, first.crashes) == (((0, 4),), ())
    second = await end_with(desk, "2" * 16, count_max=3)
    assert second.crashes == ((0, 1), (1, 1), (2, 1))
    await desk.join(5)
    assert (await desk.take(5)).ranges == ((0, 1),)
    assert (await desk.take(5)).ranges == (), "its session has nothing else"
    assert (await desk.take(5, OTHER)).ranges == ((1, 2),), "others go on"
    await desk.ack_shared(5, (0, 1))
    third = await desk.take(5)
    assert (third.ranges, third.crashes) == (((2, 3),), ((2, 2),))
    desk.clock.now_ms += 2_000
    await desk.join(5)
    assert (await desk.take(5)).crashes == ((1, 3),)
    await desk.say(Ack(1, "audit", SESSION, 5, (), ((1, 1),)))
    await desk.say(Release(1, "audit", SESSION, 5))
    await desk.join(5, OTHER)
    rest = await desk.take(5, OTHER)
    assert (rest.ranges, rest.crashes) == (((1, 2),), ())


async def test_exclusive_owner_suspects_nothing_when_its_group_was_shared(desk):
    """Two processes ended with it among others: an exclusive owner would set it aside as one that
    was alone.
    """
    for session in ("1" * 16, "2" * 16):
        await end_with(desk, session, count_max=3)
    await desk.join(5)
    assert (await desk.take(5, count_max=1)).crashes == ((0, 2),)
    answer = await desk.acquire(6)
    assert (answer.suspects_upto, answer.begun) == (0, ())


async def test_message_whose_deadline_passes_first_is_counted_when_its_session_falls_silent(desk):
    await desk.join(5)
    await desk.take(5, count_max=2, in_flight_ms=1_000)
    desk.clock.now_ms += 1_000
    await desk.join(5, OTHER)
    assert (await desk.take(5, OTHER, count_max=1)).crashes == ()
    desk.clock.now_ms += 1_000
    assert (await desk.take(5, OTHER, count_max=1)).crashes == ((0, 1),)

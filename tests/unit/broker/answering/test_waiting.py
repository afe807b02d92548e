"""Long polls at a broker: the first to wait is woken first, no waiter asks in a loop, and a newer
token ends every wait.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane.broker.answering.waiting import LongPolls
from keylane.broker.partition.in_flight import InFlight
from keylane.protocol.errors import FencedError
from keylane.protocol.frames import Acquire, AcquireShared, Pull, PullShared
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

SESSIONS = [letter * 16 for letter in "abcdefgh"]


@pytest.fixture
async def desk() -> Desk:
    clock = ManualClock()
    desk = Desk(open_store(SimDisk(), clock=clock), clock)
    await desk.host()
    return desk


async def take_one(desk: Desk, session: str, order: list[str]) -> int:
    request = PullShared(1, "audit", session, 5, 1, 1 << 20, 30_000, 60_000)
    answer = await desk.say(request)
    order.append(session)
    ((start, _end),) = answer.ranges
    return start


async def test_waits_end_in_the_order_in_which_they_began():
    """The first to wait is the first to go on."""
    waiting, order = LongPolls(), []

    async def wait(number: int) -> None:
        await waiting.wait(1, 10_000)
        order.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(8)]
    await asyncio.sleep(0.01)
    waiting.wake(1)
    await asyncio.gather(*tasks)
    assert order == list(range(8))


async def test_listener_is_called_once_in_its_place_unless_it_has_left():
    """Pulls that wait without a task stand in one line with those of tasks."""
    waiting, order = LongPolls(), []
    task = asyncio.create_task(waiting.wait(1, 10_000))
    await asyncio.sleep(0)
    for name in ("left", "first", "second"):
        waiting.add_listener(1, name, lambda name=name: order.append(name))
    waiting.remove_listener(1, "left")
    waiting.remove_listener(2, "first")
    assert waiting.count == 3
    waiting.wake(2)
    waiting.wake(1)
    waiting.wake(1)
    await task
    assert (order, waiting.count) == (["first", "second"], 0)


async def test_longest_waiting_session_gets_the_first_message(desk):
    """Sessions of a shared group are served in the order of asking, one message each."""
    order: list[str] = []
    await desk.say(AcquireShared(1, "audit", SESSIONS[0], 5, 2_000))
    tasks = []
    for session in SESSIONS:
        tasks.append(asyncio.create_task(take_one(desk, session, order)))
        await asyncio.sleep(0.001)
    await desk.append(batch(count=len(SESSIONS)))
    assert await asyncio.gather(*tasks) == list(range(len(SESSIONS)))
    assert order == SESSIONS


async def test_waiting_asks_for_nothing(desk, monkeypatch):
    """Eight sessions that wait for a message look once each, however long it takes."""
    looks = 0
    hand_out = InFlight.hand_out

    def counted(self, *args, **kwargs):
        nonlocal looks
        looks += 1
        return hand_out(self, *args, **kwargs)

    monkeypatch.setattr(InFlight, "hand_out", counted)
    await desk.say(AcquireShared(1, "audit", SESSIONS[0], 5, 2_000))
    tasks = [asyncio.create_task(take_one(desk, session, [])) for session in SESSIONS]
    await asyncio.sleep(0.5)
    assert looks == len(SESSIONS)
    await desk.append(batch(count=len(SESSIONS)))
    await asyncio.gather(*tasks)
    assert looks == 2 * len(SESSIONS)


async def test_higher_token_takes_a_held_lock_at_once(desk):
    """A newer owner waits for no ttl, and the older one's waiting pull ends now."""
    await desk.acquire(5, SESSIONS[0], ttl_ms=600_000)
    waiting = asyncio.create_task(desk.pull(5, 0, SESSIONS[0], wait_ms=30_000))
    await asyncio.sleep(0.01)
    assert (await desk.acquire(6, SESSIONS[1])).cursor == 0
    with pytest.raises(FencedError):
        await waiting
    (group,) = desk.store.state.partition(1).status(now_ms=desk.clock.boot_ms()).groups
    assert (group.holder, group.token) == (SESSIONS[1], 6)


async def test_lock_is_kept_by_pull_ack_and_empty_ack(desk):
    """Each of them renews it for its ttl; without any it runs out, and the owner's next call has it
    again.
    """

    def holder() -> str | None:
        (group,) = desk.store.state.partition(1).status(now_ms=desk.clock.boot_ms()).groups
        return group.holder

    owner = SESSIONS[0]
    await desk.append(batch())
    await desk.acquire(5, owner, ttl_ms=1_000)
    for renew in (
        lambda: desk.pull(5, 0, owner),
        lambda: desk.ack(5, (0, 1), session=owner),
        lambda: desk.ack(5, session=owner),
    ):
        desk.clock.now_ms += 999
        assert holder() == owner
        await renew()
    desk.clock.now_ms += 1_000
    assert holder() is None
    await desk.ack(5, session=owner)
    assert holder() == owner
    await desk.release(5, owner)
    assert holder() is None


async def test_owner_that_pulls_again_ends_its_older_pull_with_tags(desk):
    """Each keeps its tags, up to 20 kB; a connection has thousands of pulls."""
    await desk.say(Acquire(1, "audit", SESSIONS[0], 5, 60_000))
    pulls = []
    for number in range(50):
        pull = Pull(1, "audit", SESSIONS[0], 5, 0, 1 << 20, 30_000, (f"tag {number}",))
        pulls.append(asyncio.create_task(desk.say(pull)))
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert [pull.done() for pull in pulls] == [True] * 49 + [False]
    assert {(await pull).upto for pull in pulls[:-1]} == {0}
    desk.service.close()
    await pulls[-1]
    assert desk.service.waiting == 0

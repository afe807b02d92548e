"""Pulls that go on after a small answer: what is a part, what is the last answer, and what ends a
pull.
"""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from keylane.broker.store.group_changes import drop_partition, forget_group, set_cursor
from keylane.protocol.batch import batch_starts
from keylane.protocol.control import DropPartition
from keylane.protocol.errors import (
    FencedError,
    InvalidRequestError,
    PartitionUnknownError,
    TokenUnknownError,
)
from keylane.protocol.frames import AcquireShared, Batches, Pull
from keylane.protocol.limits import PART_BYTES_MAX, PULL_ANSWERS_MAX
from keylane.protocol.progress import ForgetGroup, SetCursor
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import SESSION, AskedCall, Desk, batch, open_store

WHO = ("audit", SESSION, 1)


def begin(
    desk: Desk, offset: int = 0, *, answers_max: int = 4, bytes_max: int = 1 << 20, wait_ms=30_000
) -> AskedCall:
    """A pull that the service has begun."""
    call = AskedCall()
    pull = Pull(1, *WHO, offset, bytes_max, wait_ms, (), answers_max)
    assert desk.service.begin(pull, memoryview(b""), call)
    return call


async def append(desk: Desk, sequence: int, **more: object) -> None:
    """Two messages, and the turns in which a waiting pull gets them."""
    await desk.append(batch(sequence=sequence, **more))
    await asyncio.sleep(0)


def offsets(answers: list[tuple[Batches, bytes]]) -> list[int]:
    """The offsets that batches begin at."""
    return [
        header.base_offset for _, data in answers for _, header in batch_starts(memoryview(data))
    ]


async def test_pull_gets_a_part_for_each_append_until_its_last_answer(desk):
    """The last one says that no other follows."""
    call = begin(desk, answers_max=3)
    for sequence in (0, 2, 4, 6):
        await append(desk, sequence)
    last = await call.done
    assert [answer.more for answer, _ in [*call.parts, last]] == [True, True, False]
    assert [answer.upto for answer, _ in [*call.parts, last]] == [2, 4, 6]
    assert offsets([*call.parts, last]) == [0, 2, 4]
    assert desk.service.waiting == 0


async def test_pull_of_one_answer_has_no_part(desk):
    """As every client before this version asks."""
    call = begin(desk, answers_max=1)
    await append(desk, 0)
    assert (await call.done)[0].more is False
    assert call.parts == []


async def test_pull_goes_on_after_messages_that_were_there_before(desk):
    await append(desk, 0)
    call = begin(desk)
    assert offsets(call.parts) == [0]
    await append(desk, 2)
    assert offsets(call.parts) == [0, 2]


async def test_large_answer_ends_its_pull(desk):
    """While its owner handles it, the next one gathers more."""
    call = begin(desk)
    await append(desk, 0, value=bytes(PART_BYTES_MAX))
    assert (await call.done)[0].more is False


async def test_pull_ends_when_its_bytes_are_used_up(desk):
    size = len(batch())
    call = begin(desk, bytes_max=size + 1)
    await append(desk, 0)
    await append(desk, 2)
    last = await call.done
    assert (len(call.parts), last[0].more) == (1, False)


async def test_pull_ends_without_messages_when_its_time_is_over(desk):
    """Its time is that of all parts together."""
    call = begin(desk, wait_ms=30)
    await append(desk, 0)
    desk.clock.advance(30)
    answer, data = await asyncio.wait_for(call.done, 5)
    assert (answer.more, answer.upto, data) == (False, 2, b"")
    assert len(call.parts) == 1


async def test_pull_is_refused_when_a_newer_owner_came_between_its_parts(desk):
    """The owner is checked for each part."""
    call = begin(desk)
    await append(desk, 0)
    await desk.acquire(2, "b" * 16)
    await append(desk, 2)
    with pytest.raises(FencedError):
        await call.done
    assert len(call.parts) == 1


async def test_pull_is_ended_by_the_next_one_of_its_group(desk):
    """A client that asks again takes no further part of the older one."""
    older = begin(desk)
    await append(desk, 0)
    newer = begin(desk, 2)
    answer, data = await older.done
    assert (answer.more, answer.upto, data) == (False, 2, b"")
    await append(desk, 2)
    assert (len(older.parts), offsets(newer.parts)) == (1, [2])
    assert desk.service.waiting == 1


async def test_pull_that_was_woken_in_the_same_turn_is_answered_once(desk):
    """The next pull comes before the woken one has gone on."""
    older = begin(desk)
    appending = asyncio.ensure_future(desk.append(batch()))
    while desk.service.waiting:
        await asyncio.sleep(0)
    newer = begin(desk)
    await appending
    await asyncio.sleep(0)
    assert (older.parts, (await older.done)[1]) == ([], b"")
    assert offsets(newer.parts) == [0]


async def test_pull_ends_when_its_client_does_not_take_parts(desk):
    """A slow client is sent no more than it takes."""
    call = begin(desk)
    call.accepts_parts = False
    await append(desk, 0)
    assert (await call.done)[0].more is False


async def test_pull_of_a_sealed_partition_ends(desk):
    call = begin(desk)
    await append(desk, 0)
    _, sealed = desk.store.seal(1)
    await sealed
    answer, _ = await asyncio.wait_for(call.done, 5)
    assert (answer.more, answer.sealed, answer.upto) == (False, True, 2)


async def test_pull_whose_client_has_left_waits_no_longer(desk):
    call = begin(desk)
    await append(desk, 0)
    assert call.wait is not None
    call.wait.cancel()
    await asyncio.sleep(0)
    assert desk.service.waiting == 0
    await append(desk, 2)
    assert len(call.parts) == 1


async def test_part_that_is_not_in_memory_is_read_in_a_task():
    """What is left of the pull is answered there, once."""
    clock = ManualClock()
    desk = Desk(open_store(SimDisk(), clock=clock, cache_bytes=0), clock)
    await desk.host()
    await desk.acquire(1)
    call = begin(desk)
    await append(desk, 0)
    left = await call.done
    assert isinstance(left, Pull)
    assert (left.offset, left.wait_ms) == (0, 0)


async def test_pull_lock_is_held_while_a_pull_waits(desk):
    """Also if it waits for longer than the ttl of the lock, which is 2 s here."""
    group = desk.store.state.partition(1).groups["audit"]
    begin(desk, wait_ms=30_000)
    desk.clock.advance(20_000)
    assert group.lock.holder_at(desk.clock.boot_ms()) == SESSION


async def test_pull_lock_ends_with_its_ttl_when_the_client_has_left(desk):
    """What a pull holds is held for a client that is there."""
    group = desk.store.state.partition(1).groups["audit"]
    call = begin(desk, wait_ms=30_000)
    call.wait.cancel()
    await asyncio.sleep(0)
    desk.clock.advance(1_999)
    assert group.lock.holder_at(desk.clock.boot_ms()) == SESSION
    desk.clock.advance(1)
    assert group.lock.holder_at(desk.clock.boot_ms()) is None


@pytest.mark.parametrize("answers_max", [0, -1, PULL_ANSWERS_MAX + 1])
async def test_pull_of_impossible_answers_is_refused(desk, answers_max):
    with pytest.raises(InvalidRequestError, match="answers"):
        begin(desk, answers_max=answers_max)


async def forget(desk: Desk) -> None:
    partition = desk.store.state.partition(1)
    _, durable = forget_group(desk.store, partition, ForgetGroup(group="audit", token=1))
    await durable


async def drop(desk: Desk) -> None:
    subject = desk.store.state.partition(1).facts.subject
    await drop_partition(desk.store, 1, DropPartition(subject=subject, last_id=1), now_ms=0)


async def reset(desk: Desk) -> None:
    partition = desk.store.state.partition(1)
    await set_cursor(desk.store, partition, SetCursor(group="audit", token=2, cursor=0))


async def share(desk: Desk) -> None:
    await desk.say(AcquireShared(1, "audit", "b" * 16, 2, 2_000))


async def release(desk: Desk) -> None:
    await desk.release(1)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (forget, TokenUnknownError),
        (drop, PartitionUnknownError),
        (reset, FencedError),
        (share, FencedError),
        (release, FencedError),
    ],
)
async def test_pull_between_parts_is_refused_at_once_when_its_owner_owns_no_more(
    desk, change, refused
):
    """Nothing of it is left to be woken."""
    call = begin(desk)
    await append(desk, 0)
    await change(desk)
    with pytest.raises(refused):
        await asyncio.wait_for(call.done, 5)
    assert (len(call.parts), desk.service.waiting) == (1, 0)


async def test_pull_between_parts_is_answered_when_the_broker_closes(desk):
    call = begin(desk)
    await append(desk, 0)
    desk.service.close()
    answer, data = await asyncio.wait_for(call.done, 5)
    assert (answer.more, answer.upto, data, desk.service.waiting) == (False, 2, b"", 0)


async def test_acks_leave_the_pull_lock_held_until_the_pull_ends(desk):
    """An ack renews it for the ttl alone, which is no less than what is left of a pull."""
    group = desk.store.state.partition(1).groups["audit"]
    begin(desk, wait_ms=2_000)
    desk.clock.advance(1)
    await append(desk, 0)
    await desk.ack(1, (0, 2))
    desk.clock.advance(1_999)
    assert group.lock.holder_at(desk.clock.boot_ms()) == SESSION


async def test_pull_has_one_timer_and_one_future_however_many_parts_it_gives(desk):
    """What a part costs is what a message costs, when messages come one by one."""
    call = begin(desk, answers_max=8)
    first = call.wait
    timers = len(asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]
    for sequence in range(0, 8, 2):
        await append(desk, sequence)
        assert call.wait is first
    assert len(call.parts) == 4
    assert len(asyncio.get_running_loop()._scheduled) == timers  # type: ignore[attr-defined]


async def test_pull_whose_time_is_over_when_it_was_woken_is_answered_once(desk):
    """A tick may come before the end of its time, and its turn behind its last answer."""
    call = begin(desk, answers_max=4)
    (pull,) = desk.service._pulls.open.values()
    desk.service._long_polls.wake(1)
    pull._on_timeout()
    answer, _ = await call.done
    assert (answer.more, answer.upto) == (False, 0)
    await append(desk, 0)
    assert call.parts == []
    assert desk.service.waiting == 0


async def test_pull_that_was_woken_when_its_client_left_gives_nothing(desk):
    """Its turn comes behind that of the client's end, and finds it closed."""
    call = begin(desk)
    call.wait.cancel()
    desk.service._long_polls.wake(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert call.parts == []
    assert desk.service.waiting == 0
    assert not desk.service._pulls.open


async def test_fault_of_one_pull_leaves_the_others_of_its_commit_to_go_on(desk):
    """As the connection of one fails in a way that nothing expects; the others would wait for their
    time to be over.
    """
    await desk.acquire(1, group="other")
    broken, other = begin(desk), AskedCall()
    pull = Pull(1, "other", SESSION, 1, 0, 1 << 20, 30_000, (), 4)
    assert desk.service.begin(pull, memoryview(b""), other)

    def fails(*_args: object) -> None:
        raise RuntimeError("a bug")

    broken.send_part = broken.refuse = fails
    await append(desk, 0)
    assert offsets(other.parts) == [0]


async def test_ended_pull_is_freed_without_the_garbage_collector(desk):
    """A broker's collector runs seldom; what a pull held, as its request and its call, goes with
    its last answer.
    """
    gc.collect()
    gc.disable()
    try:
        call = begin(desk, answers_max=2)
        watched = weakref.ref(call.wait)
        await append(desk, 0)
        await append(desk, 2)
        await call.done
        call.wait = None
        assert watched() is None
    finally:
        gc.enable()

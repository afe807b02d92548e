"""Memory budgets for answers: which answers wait, for what, and in which order."""

from __future__ import annotations

import asyncio

from keylane.rpc.answer_budget import AnswerBudget, begin_answer, reserve_bytes


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def asks(share, *sizes: int) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(share.reserve(size)) for size in sizes]


async def test_connection_waits_for_its_own_room_only():
    """An answer that exceeds its connection's budget waits for earlier ones, and delays no other
    connection.
    """
    room = AnswerBudget(connection_bytes_max=10)
    slow, other = room.for_connection(), room.for_connection()
    first, second = asks(slow, 8, 8)
    third = asyncio.create_task(other.reserve(8))
    await settled()
    assert (first.done(), second.done(), third.done()) == (True, False, True)
    slow.settle(8, 8)
    await settled()
    assert not second.done()
    slow.release(8)
    await settled()
    assert second.done()
    assert (slow.reserved_bytes, other.reserved_bytes, room.reserved_bytes) == (8, 8, 16)


async def test_few_answers_of_a_connection_are_made_at_once():
    """However small they are, a connection prepares only a few answers at a time, so that others
    proceed.
    """
    share = AnswerBudget(reads_max=2).for_connection()
    tasks = asks(share, 1, 1, 1)
    await settled()
    assert [task.done() for task in tasks] == [True, True, False]
    share.settle(1, 1)
    await settled()
    assert tasks[2].done()


async def test_connections_take_turns_where_the_server_has_no_room():
    """A connection with many waiting answers gets one, and then the others get theirs."""
    room = AnswerBudget(bytes_max=10, connection_bytes_max=100, reads_max=100)
    full, greedy, modest = room.for_connection(), room.for_connection(), room.for_connection()
    await full.reserve(10)
    many, single = asks(greedy, 5, 5, 5), asks(modest, 5)
    await settled()
    assert room.is_exhausted
    full.settle(10, 0)
    await settled()
    assert [task.done() for task in [*many, *single]] == [True, False, False, True]
    greedy.settle(5, 0)
    modest.settle(5, 0)
    await settled()
    assert all(task.done() for task in many)
    assert not room.is_exhausted


async def test_answer_larger_than_all_room_is_made_alone():
    """An empty budget accepts any answer, so that none waits forever."""
    room = AnswerBudget(bytes_max=10, connection_bytes_max=10)
    share = room.for_connection()
    await asyncio.wait_for(share.reserve(1_000), 5)
    assert room.reserved_bytes == 1_000


async def test_room_is_free_again_when_its_answers_are_cancelled():
    """Answers that are cancelled, before or after their reservation, hold no bytes and delay no
    other answer.
    """
    room = AnswerBudget(bytes_max=10)
    first, second = room.for_connection(), room.for_connection()

    async def answer(share, size):
        answering = begin_answer(share)
        try:
            await reserve_bytes(size)
            answering.settle(size)
            await asyncio.sleep(60)
        finally:
            answering.release()

    tasks = [asyncio.create_task(answer(share, 8)) for share in (first, second, first, second)]
    await settled()
    for task in (tasks[1], tasks[0], tasks[2]):
        task.cancel()
        await settled()
    assert room.reserved_bytes == second.reserved_bytes == 8
    tasks[3].cancel()
    await settled()
    assert (
        room.reserved_bytes,
        first.reserved_bytes,
        second.reserved_bytes,
        room.is_exhausted,
    ) == (0, 0, 0, False)


async def test_without_a_server_there_is_room():
    """A handler that is called directly never waits."""
    await asyncio.wait_for(reserve_bytes(1 << 40), 5)

"""The lock for messages that may end a process: one at a time, in order, with a time limit."""

from __future__ import annotations

import asyncio
import time

from keylane.consumer.session_shell import SuspectLock


async def test_turns_are_taken_in_the_order_of_the_calls():
    alone = SuspectLock()
    running: list[int] = []
    order: list[int] = []

    async def take(number: int) -> None:
        async with alone.acquire(60):
            running.append(number)
            await asyncio.sleep(0)
            assert running == [number]
            order.append(number)
            running.remove(number)

    await asyncio.gather(*(take(number) for number in range(5)))
    assert order == list(range(5))


async def test_turn_ends_after_its_limit():
    """The first block keeps running, and its end does not release the next one's turn."""
    alone = SuspectLock()
    async with alone.acquire(0.02):
        began_s = time.monotonic()
        async with alone.acquire(60):
            assert time.monotonic() - began_s >= 0.015
            third = asyncio.create_task(alone.acquire(60).__aenter__())
            await asyncio.sleep(0)
    await asyncio.wait_for(third, 5)


async def test_canceled_wait_takes_no_turn():
    alone = SuspectLock()
    async with alone.acquire(60):
        waiting = asyncio.create_task(alone.acquire(60).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    async with asyncio.timeout(5), alone.acquire(60):
        pass


def test_turn_is_taken_in_another_event_loop():
    """A consumer may be opened again there; tasks that waited in the earlier loop no longer
    exist.
    """
    alone = SuspectLock()

    async def take_two() -> None:
        async with alone.acquire(60):
            waiting = asyncio.create_task(alone.acquire(60).__aenter__())
            await asyncio.sleep(0)
        await waiting

    for _ in range(2):
        asyncio.run(take_two())

"""The time that the workers of a consumer share until the event loop has its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from keylane.consumer.dispatch.workers import TURN_S, WorkerTurn


class HandClock:
    """Readings of a clock that moves when it is told to."""

    now_s = 100.0

    def readings(self) -> Iterator[float]:
        while True:
            yield self.now_s


async def test_worker_turn_lets_the_event_loop_run_after_one_worker_when_that_used_it_up():
    """Sixteen workers that never wait delay an answer by one turn, and not by sixteen."""
    clock = HandClock()
    turn = WorkerTurn(clock.readings())
    longest = 0.0

    async def work() -> None:
        for _ in range(10):
            await turn.wait()
            clock.now_s += TURN_S

    async def answer() -> None:
        nonlocal longest
        while not all(worker.done() for worker in workers):
            before = clock.now_s
            await asyncio.sleep(0)
            longest = max(longest, clock.now_s - before)

    workers = [asyncio.ensure_future(work()) for _ in range(16)]
    await answer()
    assert longest < 2 * TURN_S
    assert clock.now_s > 100 + 159 * TURN_S


async def test_worker_turn_is_for_all_workers_when_none_uses_it_up():
    """Workers whose handlers wait for something go on in the same iteration."""
    turn = WorkerTurn(HandClock().readings())
    iterations, gone_on = 0, 0

    async def work() -> None:
        nonlocal gone_on
        await turn.wait()
        gone_on += 1

    workers = [asyncio.ensure_future(work()) for _ in range(16)]
    while gone_on < len(workers):
        await asyncio.sleep(0)
        iterations += 1
    assert iterations <= 3

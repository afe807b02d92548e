"""The time that the workers of a consumer share in one iteration of the event loop."""

from __future__ import annotations

import asyncio
from itertools import repeat

import pytest

from keylane.consumer.dispatch.workers import TURN_S, WorkerTurn
from keylane.protocol.message import Message
from sim.machines.clock import ManualClock
from support.cluster import eventually
from support.handling import Client, workers_of


async def test_worker_turn_ends_with_the_iteration_of_the_event_loop():
    turn = WorkerTurn(repeat(0.0))
    assert turn.has_time(100.0)
    assert turn.has_time(100.0 + TURN_S / 2)
    assert not turn.has_time(100.0 + TURN_S)
    await asyncio.sleep(0)
    assert turn.has_time(100.0 + TURN_S)
    assert not turn.has_time(100.0 + 2 * TURN_S)


@pytest.mark.parametrize("is_first_slow", [False, True])
async def test_workers_let_the_event_loop_run_when_none_of_their_handlers_waits(
    is_first_slow: bool,
):
    """Whether they take a run or, beside a handler that waits, bundles: an answer or a heartbeat
    waits for the time of one turn, and not of each worker.
    """
    client, clock, going = Client(), ManualClock(), asyncio.Event()
    counts = [0]
    """How many handlers have returned in each iteration."""

    async def handle(message: Message) -> None:
        if is_first_slow and message.offset == 0:
            await going.wait()
            return
        counts[-1] += 1
        clock.advance(1)

    async def count_iterations() -> None:
        while True:
            await asyncio.sleep(0)
            counts.append(0)

    workers = workers_of(handle, concurrency=16, clock=clock)
    counting = asyncio.ensure_future(count_iterations())
    client.give(workers, *[b"%d" % number for number in range(400)])
    await eventually(lambda: sum(counts) == 400 - is_first_slow)
    counting.cancel()
    assert max(counts) <= TURN_S * 1000  # each takes a millisecond
    going.set()
    await eventually(lambda: client.held == 0)
    await workers.close()

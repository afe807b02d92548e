"""The reads of jobs beside live clients: a budget, and an end to every wait."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.broker.background import (
    LIVE_ANSWER_BYTES,
    LIVE_BYTES_PER_SECOND,
    LIVE_MS,
    WAIT_MS_MAX,
    BackgroundBudget,
)
from keylane.protocol.frames import Read
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store


def test_job_reads_at_full_size_when_no_client_is_live():
    """Before the first live request, and again when the last one is old."""
    budget = BackgroundBudget()
    assert (budget.wait_ms(0), budget.reserve(2 << 20, 0)) == (0, 2 << 20)
    budget.last_live_at_ms = 1_000
    assert budget.reserve(2 << 20, 1_000) == LIVE_ANSWER_BYTES
    assert budget.wait_ms(1_000) > 0
    later = 1_000 + LIVE_MS + 1
    assert (budget.wait_ms(later), budget.reserve(2 << 20, later)) == (0, 2 << 20)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 4 << 20)), min_size=1))
def test_jobs_keep_to_the_budget_when_clients_are_live(reads):
    """Whatever they ask for, all of them together get the budget and one answer."""
    budget, now_ms, total = BackgroundBudget(), 0.0, 0
    for pause_ms, wanted in reads:
        now_ms += pause_ms
        budget.last_live_at_ms = int(now_ms)
        while wait_ms := budget.wait_ms(int(now_ms)):
            assert wait_ms <= WAIT_MS_MAX
            now_ms += wait_ms
            budget.last_live_at_ms = int(now_ms)
        assert total <= (now_ms + 1) / 1_000 * LIVE_BYTES_PER_SECOND + LIVE_ANSWER_BYTES
        total += budget.reserve(wanted, int(now_ms))


@pytest.fixture
async def desk() -> Desk:
    clock = ManualClock()
    desk = Desk(open_store(SimDisk(), clock=clock), clock)
    await desk.host()
    return desk


async def test_broker_answers_a_job_with_small_answers_beside_an_append(desk):
    """The first read after an append is small and the next one waits; other reads are as before."""
    for number in range(10):
        await desk.append(batch(sequence=number, count=1, value=bytes(100_000)))
    small, _ = await desk.service.handle(Read(1, 0, 2 << 20, background=True), memoryview(b""))
    assert small.upto == 2
    usual, _ = await desk.service.handle(Read(1, 0, 2 << 20), memoryview(b""))
    assert usual.upto == 10
    waiting = asyncio.create_task(
        desk.service.handle(Read(1, 2, 2 << 20, background=True), memoryview(b""))
    )
    await asyncio.sleep(0)
    assert not waiting.done()
    desk.clock.advance(LIVE_MS + 1)
    later, _ = await waiting
    assert later.upto == 10

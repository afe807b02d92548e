"""How long calls of a handler take, as metrics have it, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from keylane.consumer.dispatch.workers import WorkerPool
from keylane.rpc.operating.histogram import Histogram
from sim.machines.clock import ManualClock
from support.cluster import eventually
from support.handling import Client, in_virtual_time, virtual_loop, workers_of

KEYS = tuple(b"%d" % number for number in range(8))


def counted(
    handler: Callable[[Any], Any], *keys: bytes, after_s: float = 30, **options: Any
) -> Histogram:
    """The times of the calls that a handler got within some seconds."""
    loop, machine = virtual_loop()

    async def story() -> WorkerPool:
        workers = workers_of(handler, clock=machine, **options)
        client = Client()
        give = client.give_batch if options.get("batched") else client.give
        give(workers, *keys)
        await asyncio.sleep(after_s)
        await client.hand_over()
        await workers.close()
        return workers

    return in_virtual_time(story(), loop).handling


def buckets(times: Histogram) -> dict[str, int]:
    """The number of calls by upper bound, without empty buckets."""
    found, before = {}, 0
    for bound, total in times.cumulative():
        if total > before:
            found[bound] = total - before
        before = total
    return found


@pytest.mark.parametrize("concurrency", [1, 3])
def test_handler_that_waits_is_counted_with_the_time_of_each_call(concurrency: int):
    async def handle(message: Any) -> None:
        await asyncio.sleep(0.02 if message.key == b"3" else 2)

    times = counted(handle, *KEYS, concurrency=concurrency)
    assert buckets(times) == {"0.025": 1, "2.5": 7}
    assert times.sum_ns == pytest.approx(14.02e9, rel=1e-3)


def test_calls_that_do_not_wait_are_counted_each():
    times = counted(lambda _message: None, *KEYS, after_s=1)
    assert times.count == 8
    assert times.sum_ns == 0, "no time passes in them"


async def test_slow_call_is_not_hidden_by_quick_ones_of_its_run():
    clock, client = ManualClock(), Client()

    def handle(message: Any) -> None:
        clock.advance(200 if message.offset % 100 == 50 else 1)

    workers = workers_of(handle, clock=clock)
    client.give(workers, *[b"%d" % number for number in range(400)])
    await eventually(lambda: client.held == 0)
    await client.hand_over()
    await workers.close()
    assert buckets(workers.handling) == {"0.001": 396, "0.25": 4}
    assert workers.handling.sum_ns == pytest.approx(1.196e9)


def test_call_before_one_that_waits_is_counted_apart():
    async def handle(message: Any) -> None:
        if message.key == b"5":
            await asyncio.sleep(0.2)

    times = counted(handle, *KEYS)
    assert buckets(times) == {"0.0001": 7, "0.25": 1}


def test_call_that_fails_is_counted_and_tried_again():
    tries = 0

    async def handle(_message: Any) -> None:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0.2)
        if tries < 3:
            raise ValueError("not yet")

    assert buckets(counted(handle, b"a")) == {"0.25": 3}


def test_call_that_fails_at_once_is_counted():
    tries = 0

    def handle(_message: Any) -> None:
        nonlocal tries
        tries += 1
        if tries in {2, 3}:
            raise ValueError("not yet")

    assert counted(handle, *KEYS).count == 10


def test_call_with_a_batch_is_counted_once():
    async def handle(_messages: Any) -> None:
        await asyncio.sleep(0.2)

    assert buckets(counted(handle, *KEYS, batched=True)) == {"0.25": 1}


def test_mean_of_several_durations_is_counted():
    times = Histogram((0.001, 0.01))
    times.observe_many(0, 0)
    times.observe_many(4, 8_000_000)
    times.observe_many(2, -5)
    assert (times.cumulative(), times.sum_ns) == (
        [("0.001", 2), ("0.01", 6), ("+Inf", 6)],
        8_000_000,
    )

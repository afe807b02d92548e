"""Waiting calls are woken by changes; runs of work are shared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from keylane.metaserver.wakeups import SingleFlight, Wakeups


async def test_change_wakes_the_waiters_of_its_key_only() -> None:
    """A change wakes the calls that wait for its key, and no others."""
    wakeups: Wakeups[str] = Wakeups()
    with wakeups.listen("a") as first, wakeups.listen("a") as second, wakeups.listen("b") as other:
        wakeups.wake(["a", "other"])
        await first.wait(10_000)
        await second.wait(10_000)
        assert not other.woken
        assert sorted(wakeups.keys()) == ["a", "b"]
        wakeups.wake_all()
        assert other.woken
    assert wakeups.keys() == []


async def test_change_before_the_wait_ends_it_at_once() -> None:
    """A change between `listen` and `wait` is not lost."""
    wakeups: Wakeups[str] = Wakeups()
    with wakeups.listen("a") as waiter:
        wakeups.wake(["a"])
        start = time.monotonic()
        await waiter.wait(10_000)
        assert time.monotonic() - start < 1


async def test_wait_ends_when_its_time_is_over() -> None:
    """Without a change the wait returns after `wait_ms`."""
    wakeups: Wakeups[str] = Wakeups()
    with wakeups.listen("a") as waiter:
        await waiter.wait(20)
        assert not waiter.woken


async def test_calls_during_a_run_share_the_next_one_with_all_their_items() -> None:
    """The next run begins after these calls and gets the item of each; other keys do not wait."""
    runs: list[tuple[str, int]] = []
    gate = asyncio.Event()

    async def work(key: str, items: Sequence[int]) -> int:
        runs.append((key, sum(items)))
        if key == "slow":
            await gate.wait()
        return len(runs)

    flight: SingleFlight[str, int, int] = SingleFlight(work)
    first = asyncio.create_task(flight.run("slow", 1))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(flight.run("slow", item)) for item in range(50)]
    await asyncio.sleep(0.01)
    assert runs == [("slow", 1)]
    assert await flight.run("quick", 2) == 2
    gate.set()
    assert await first == 2
    assert set(await asyncio.gather(*others)) == {3}
    assert runs == [("slow", 1), ("quick", 2), ("slow", sum(range(50)))]
    assert await flight.run("slow", 0) == 4


async def test_failed_run_fails_its_callers_only() -> None:
    """An error reaches every call that shared the run; the next run is not affected."""
    answers = iter([ValueError("first"), "second"])

    async def work(_key: None, _items: Sequence[None]) -> str:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    flight: SingleFlight[None, None, str] = SingleFlight(work)
    failed = await asyncio.gather(
        flight.run(None, None), flight.run(None, None), return_exceptions=True
    )
    assert [type(error) for error in failed] == [ValueError, ValueError]
    assert await flight.run(None, None) == "second"


async def test_cancelled_caller_leaves_the_run_alone() -> None:
    """A caller that is cancelled cancels the run of no other."""
    gate = asyncio.Event()

    async def work(_key: None, _items: Sequence[None]) -> str:
        await gate.wait()
        return "done"

    flight: SingleFlight[None, None, str] = SingleFlight(work)
    leaving = asyncio.create_task(flight.run(None, None))
    staying = asyncio.create_task(flight.run(None, None))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gate.set()
    assert await staying == "done"

"""Waking waiting calls, and sharing runs of work."""

from __future__ import annotations

import asyncio
import time

import pytest

from keylane.metaserver.wakeups import SingleFlight, Wakeups


async def test_ring_wakes_only_its_key() -> None:
    """A change rings those who listen to its key, and nobody else."""
    wakeups: Wakeups[str] = Wakeups()
    with wakeups.listen("a") as first, wakeups.listen("a") as second, wakeups.listen("b") as other:
        wakeups.wake(["a", "nobody"])
        await first.wait(10_000)
        await second.wait(10_000)
        assert not other.woken
        assert sorted(wakeups.keys()) == ["a", "b"]
        wakeups.wake_all()
        assert other.woken
    assert wakeups.keys() == []


async def test_ring_before_the_wait_is_not_lost() -> None:
    """A change between listening and waiting ends the wait at once."""
    wakeups: Wakeups[str] = Wakeups()
    with wakeups.listen("a") as waiter:
        wakeups.wake(["a"])
        start = time.monotonic()
        await waiter.wait(10_000)
        assert time.monotonic() - start < 1


async def test_wait_ends_by_itself() -> None:
    """Without a change the wait ends when its time is over."""
    wakeups: Wakeups[str] = Wakeups()
    with wakeups.listen("a") as waiter:
        await waiter.wait(20)
        assert not waiter.woken


async def test_turns_share_the_next_run() -> None:
    """Calls during a run share one run that begins after them; keys do not wait for each other."""
    runs: list[str] = []
    gate = asyncio.Event()

    async def work(key: str) -> int:
        runs.append(key)
        if key == "slow":
            await gate.wait()
        return len(runs)

    turns: SingleFlight[str, int] = SingleFlight(work)
    first = asyncio.create_task(turns.run("slow"))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(turns.run("slow")) for _ in range(50)]
    await asyncio.sleep(0.01)
    assert runs == ["slow"]
    assert await turns.run("quick") == 2
    gate.set()
    assert await first == 2
    assert set(await asyncio.gather(*others)) == {3}
    assert runs == ["slow", "quick", "slow"]
    assert await turns.run("slow") == 4


async def test_failed_turn_fails_its_callers_only() -> None:
    """An error reaches everybody who shared the run, and the next run starts afresh."""
    answers = iter([ValueError("first"), "second"])

    async def work(_key: None) -> str:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    turns: SingleFlight[None, str] = SingleFlight(work)
    failed = await asyncio.gather(turns.run(None), turns.run(None), return_exceptions=True)
    assert [type(one) for one in failed] == [ValueError, ValueError]
    assert await turns.run(None) == "second"


async def test_cancelled_caller_leaves_the_run_alone() -> None:
    """One caller that gives up takes nothing from the others."""
    gate = asyncio.Event()

    async def work(_key: None) -> str:
        await gate.wait()
        return "done"

    turns: SingleFlight[None, str] = SingleFlight(work)
    leaving = asyncio.create_task(turns.run(None))
    staying = asyncio.create_task(turns.run(None))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gate.set()
    assert await staying == "done"

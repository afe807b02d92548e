"""A race waits for the first of its tasks, and leaves none of them behind."""

from __future__ import annotations

import asyncio

import pytest

from keylane.rpc.race import Race


class Runner:
    """Runs until it is told to stop; when it is cancelled it takes a while to end."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.ended = False

    async def run(self) -> str:
        try:
            await self.stop.wait()
            return "stopped"
        finally:
            await asyncio.sleep(0.01)
            self.ended = True


async def test_race_ends_the_slower_tasks():
    """The first result is there when `first` returns; the others have ended when the block has."""
    quick, slow = Runner(), Runner()
    quick.stop.set()
    async with Race() as race:
        first = race.start(quick.run())
        second = race.start(slow.run())
        assert await race.first()
        assert first.result() == "stopped"
        assert not second.done()
    assert second.cancelled()
    assert slow.ended


async def test_race_waits_no_longer_than_its_limit():
    """`first` says that no task has ended in time; a task may join later."""
    runner = Runner()
    async with Race() as race:
        race.start(runner.run())
        assert not await race.first(0)
        assert not await race.first(5)
        race.start(asyncio.sleep(0))
        assert await race.first(10_000)
    assert runner.ended


@pytest.mark.parametrize("cancels", [1, 2])
async def test_race_ends_its_tasks_when_its_own_task_is_cancelled(cancels: int):
    """Also if the second cancellation comes while the tasks end."""
    runners = Runner(), Runner()

    async def wait() -> None:
        async with Race() as race:
            for runner in runners:
                race.start(runner.run())
            await race.first()

    waiting = asyncio.create_task(wait())
    for _ in range(cancels):
        await asyncio.sleep(0.002)
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(asyncio.all_tasks()) == 1


async def test_race_raises_the_error_of_its_block():
    """The tasks have ended by then."""
    runner = Runner()

    async def fail() -> None:
        async with Race() as race:
            race.start(runner.run())
            await asyncio.sleep(0)
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert runner.ended

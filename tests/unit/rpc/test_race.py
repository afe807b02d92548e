"""A race waits for the first of its tasks, and leaves none of them behind."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from keylane.protocol.errors import ClosedError, NotSentError
from keylane.rpc.race import Race, shield, start_closing_task, start_task, wait_for_shared
from support.running.eager_tasks import eager_tasks


class Runner:
    """Runs until it is told to stop; it needs some time to end when it is cancelled."""

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


async def test_shared_task_gives_its_outcome_to_all_who_wait():
    """A result as well as an error."""

    async def fail() -> str:
        raise NotSentError("not there")

    runner = Runner()
    runner.stop.set()
    task = asyncio.create_task(runner.run())
    assert (
        await asyncio.gather(*(wait_for_shared(task, "closed") for _ in range(3)))
        == ["stopped"] * 3
    )
    failing = asyncio.create_task(fail())
    for _ in range(2):
        with pytest.raises(NotSentError, match="not there"):
            await wait_for_shared(failing, "closed")


async def test_shared_task_goes_on_when_one_who_waits_is_cancelled():
    """The others get its result."""
    runner = Runner()
    task = asyncio.create_task(runner.run())
    leaving, staying = (asyncio.create_task(wait_for_shared(task, "closed")) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    runner.stop.set()
    assert await staying == "stopped"


async def test_shared_task_raises_closed_error_when_it_is_cancelled():
    """A CancelledError in a task that was not cancelled itself would end that task without a
    word.
    """
    task = asyncio.create_task(Runner().run())
    waiting = asyncio.create_task(wait_for_shared(task, "it was closed"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([waiting])
    assert not waiting.cancelled()
    with pytest.raises(ClosedError, match="it was closed"):
        waiting.result()


async def test_shared_task_lets_a_cancelled_caller_end_when_both_are_cancelled():
    """Its own cancellation is not swallowed."""
    task = asyncio.create_task(Runner().run())
    waiting = asyncio.create_task(wait_for_shared(task, "it was closed"))
    await asyncio.sleep(0)
    task.cancel()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_started_task_takes_its_first_step_later_when_the_event_loop_takes_it_at_once():
    """What starts a task keeps it first, and sets what it reads."""
    steps: list[str] = []

    async def work() -> str:
        steps.append("work")
        return "done"

    asyncio.get_running_loop().set_task_factory(eager_tasks)
    await asyncio.ensure_future(work())
    assert steps == ["work"]
    task = start_task(work(), name="named")
    steps.append("started")
    assert await task == "done"
    assert steps == ["work", "started", "work"]
    assert task.get_name() == "named"


async def test_ending_is_begun_when_its_task_is_cancelled_before_the_first_step():
    """A later cancellation reaches the work, as in any task."""
    steps: list[str] = []

    async def work() -> str:
        steps.append("begun")
        try:
            await asyncio.sleep(0)
            steps.append("going on")
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            steps.append("cancelled")
        return "done"

    task = start_closing_task(work(), name="named")
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert steps == ["begun", "going on"]
    task.cancel()
    assert await task == "done"
    assert steps == ["begun", "going on", "cancelled"]
    assert "named" in repr(task)


async def test_task_that_ends_a_client_shows_where_it_waits():
    """Debuggers and simulated programs inspect the frame of a task's coroutine."""
    stop = asyncio.Event()
    task = start_closing_task(stop.wait())
    await asyncio.sleep(0)
    (frame,) = task.get_stack()
    assert frame.f_code is asyncio.Event.wait.__code__
    stop.set()
    await task
    assert task.get_stack() == []


async def test_shielded_work_ends_when_its_waiter_is_cancelled():
    ended: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0.01)
        ended.append(1)

    task = asyncio.ensure_future(work())
    waiter = shield(task)
    waiter.cancel()
    await task
    assert waiter.cancelled()
    assert ended == [1]


async def test_error_of_shielded_work_is_dropped_when_its_waiter_has_gone():
    """The event loop hears of no error, on no version of Python."""
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: heard.append(context))

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("nobody waits")

    waiter = shield(fail())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.sleep(0.03)
    gc.collect()
    assert heard == []


async def test_shielded_work_raises_its_error_when_it_is_awaited():
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await shield(fail())


def destroyed(*, in_running_loop: bool) -> list[str]:
    """What an event loop's handler of exceptions says of a pending task that is destroyed."""
    said: list[str] = []
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, context: said.append(context["message"]))

    async def drop() -> None:
        future = loop.create_future()
        task = start_task(asyncio.wait_for(future, None))
        await asyncio.sleep(0)
        if not in_running_loop:
            kept.append(task)
        del task, future
        gc.collect()

    kept: list[Any] = []
    loop.run_until_complete(drop())
    loop.close()
    kept.clear()
    gc.collect()
    return said


def test_task_is_dropped_in_silence_when_its_event_loop_has_ended():
    """A client that was not closed is reported by itself; a lost task of a running loop is not."""
    assert destroyed(in_running_loop=False) == []
    assert destroyed(in_running_loop=True) == ["Task was destroyed but it is pending!"]

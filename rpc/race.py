"""Starts tasks, waits for the first of several, and ends the others."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from ..protocol.errors import ClosedError

P = ParamSpec("P")
T = TypeVar("T")


def start_task(work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """
    Run `work` in a task whose first step happens in a later turn of the running event loop.

    The loop's task factory, which belongs to the program, is bypassed: `asyncio.eager_task_factory`
    would take the first step inside this call, before the caller has kept the task, and has set
    what the task reads.
    """
    return asyncio.Task(work, loop=asyncio.get_running_loop(), name=name)


def start_ending(work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """
    Run `work`, which closes a client, in a task that begins even if it is cancelled before its
    first step.

    A plain task that is cancelled that early never runs, and the end of the event loop cancels even
    tasks that were started a moment before.
    """
    return start_task(_Ending(work), name=name)


def shield(work: asyncio.Future[T] | Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """
    Return a future for one waiter, whose cancellation does not cancel `work`.

    An error of `work` is dropped once the waiter has gone. From Python 3.14 on, `asyncio.shield`
    reports such an error to the event loop, and a server would log one for each caller that left.
    """
    inner = start_task(work) if asyncio.iscoroutine(work) else work
    assert isinstance(inner, asyncio.Future)
    if inner.done():
        return inner
    outer: asyncio.Future[T] = inner.get_loop().create_future()

    def ended(inner: asyncio.Future[T]) -> None:
        if inner.cancelled():
            outer.cancel()
            return
        error = inner.exception()
        if outer.done():
            return
        if error is None:
            outer.set_result(inner.result())
        else:
            outer.set_exception(error)

    inner.add_done_callback(ended)
    return outer


class _Ending(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine that ignores exceptions thrown into it before its first step."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._begun = False

    def send(self, value: Any) -> Any:
        self._begun = True
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error) if self._begun else self.send(None)

    def close(self) -> None:
        self._work.close()

    @property
    def cr_frame(self) -> FrameType | None:
        """Frame of the coroutine, for code that shows or ends tasks."""
        frame: FrameType | None = self._work.cr_frame  # type: ignore[attr-defined]
        return frame

    @property
    def cr_await(self) -> Any:
        """Awaitable for which the coroutine waits."""
        return self._work.cr_await  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if not self._begun:
            self._work.close()  # the event loop drops its task, and reports that

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()


class Race:
    """
    Tasks that race: the block waits for the first to end; leaving it cancels all others, and waits
    for their ends.

        async with Race() as race:
            answer = race.start(call())
            race.start(stop.wait())
            await race.first()
            return answer.result() if answer.done() else None

    The tasks end with the block even if it raises or its task is cancelled. Errors of tasks that
    are not awaited in the block are dropped.
    """

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run `work` in a task of the race."""
        task = start_task(work, name=name)
        self._tasks.append(task)
        return task

    async def first(self, within_ms: int | None = None) -> bool:
        """Wait until some task has ended; False if none has ended after `within_ms`
        milliseconds.
        """
        timeout_s = None if within_ms is None else within_ms / 1000
        done, _ = await asyncio.wait(
            self._tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def error_of(work: Awaitable[object]) -> BaseException | None:
    """
    Return the error with which `work` ends, None if it ends without one. Raises CancelledError if
    this call is cancelled.

    A task that raises SystemExit or KeyboardInterrupt ends the event loop at once; a task of this
    function does not.
    """
    try:
        await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - raised where the task is awaited
        return error
    return None


async def shared(task: asyncio.Task[T], closed: str) -> T:
    """
    Return the result of a task for which several callers wait; a cancelled caller leaves it to the
    others.

    Args:
        closed: text of the error if the owner of the task has cancelled it.

    Raises:
        ClosedError: the task was cancelled. A caller that is not cancelled itself never gets a
            CancelledError.
    """
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(_note_error)
        raise
    if task.cancelled():
        raise ClosedError(closed)
    return task.result()


def _note_error(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from logging an error for which no caller waits any more."""
    if not task.cancelled():
        task.exception()


def outlives_cancel(
    listing: Callable[P, AsyncGenerator[T, None]],
) -> Callable[P, AsyncIterator[T]]:
    """
    Make an async generator function return an iterator that survives a cancelled `anext`.

    A cancellation that reached the generator would end it, and a later loop would seem to have seen
    all values.
    """

    @functools.wraps(listing)
    def listed(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return Steps(listing(*args, **kwargs))

    return listed


class Steps(AsyncIterator[T]):
    """
    The values of an async generator. Each is made in a task; if an `anext` was cancelled, the next
    one waits for the same task.

    Args:
        values: the generator, which nothing else iterates.
    """

    def __init__(self, values: AsyncGenerator[T, None]) -> None:
        self._values = values
        self._step: asyncio.Task[T] | None = None

    async def __anext__(self) -> T:
        if self._step is None:
            self._step = start_task(_next_of(self._values), name="next value")
            self._step.add_done_callback(_note_seen)
        step = self._step
        try:
            value = await shield(step)
        except asyncio.CancelledError:
            if step.cancelled():
                self._step = None
            raise  # the value that the step has made remains the next one
        except BaseException:
            self._step = None
            raise
        self._step = None
        return value

    async def aclose(self) -> None:
        """End the iteration, like that of a generator."""
        if self._step is not None:
            self._step.cancel()
            with suppress(Exception, asyncio.CancelledError):
                await self._step
        await self._values.aclose()


async def _next_of(values: AsyncGenerator[T, None]) -> T:
    return await anext(values)


def _note_seen(step: asyncio.Task[Any]) -> None:
    """Mark the error of an abandoned iteration as retrieved."""
    if not step.cancelled():
        step.exception()

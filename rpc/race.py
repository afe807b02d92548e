"""Starts tasks, races them, shares their results, and shields them from cancellation."""

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
    Run `work` in a task that takes its first step in a later iteration of the running event loop.

    This bypasses the loop's task factory, which belongs to the user: `asyncio.eager_task_factory`
    would take the first step inside this call, before the caller has stored the task and set the
    state that the task reads.
    """
    return PackageTask(work, loop=asyncio.get_running_loop(), name=name)


class PackageTask(asyncio.Task[T]):
    """A task of this package. If it is pending when its event loop has ended, it is dropped without
    a line of asyncio's: the program has not closed a client, which `unclosed` reports.
    """

    def __del__(self) -> None:
        if not self.get_loop().is_running():
            self._log_destroy_pending = False  # asyncio's own switch, which `gather` uses
        super().__del__()


async def wait_for_cancelled(limit_s: float) -> None:
    """Wait until the program's tasks that were cancelled have ended, for at most so many seconds.
    An event loop that ends cancels them together with the tasks of this package.
    """
    cancelled = [
        task
        for task in asyncio.all_tasks()
        if task.cancelling() and not isinstance(task, PackageTask)
    ]
    if cancelled:
        await asyncio.wait(cancelled, timeout=limit_s)


def start_closing_task(work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """
    Run `work`, which closes a client, in a task that runs even if it is cancelled before its first
    step.

    A plain task that is cancelled this early never runs, and the shutdown of the event loop cancels
    tasks that were just started.
    """
    return start_task(_AlwaysStarted(work), name=name)


def shield(work: asyncio.Future[T] | Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """
    Return a future whose cancellation does not cancel `work`, like `asyncio.shield`.

    If the future has been cancelled, an error raised by `work` is dropped. Since Python 3.14,
    `asyncio.shield` reports such an error to the event loop, so a server would log an error for
    each caller that disconnects.
    """
    inner = start_task(work) if asyncio.iscoroutine(work) else work
    assert isinstance(inner, asyncio.Future)
    if inner.done():
        return inner
    outer: asyncio.Future[T] = inner.get_loop().create_future()

    def pass_result(inner: asyncio.Future[T]) -> None:
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

    inner.add_done_callback(pass_result)
    return outer


class _AlwaysStarted(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine that ignores exceptions that are thrown into it before its first step."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._is_started = False

    def send(self, value: Any) -> Any:
        self._is_started = True
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error) if self._is_started else self.send(None)

    def close(self) -> None:
        self._work.close()

    @property
    def cr_frame(self) -> FrameType | None:
        """The coroutine's frame, for code that inspects tasks."""
        frame: FrameType | None = self._work.cr_frame  # type: ignore[attr-defined]
        return frame

    @property
    def cr_await(self) -> Any:
        """The awaitable that the coroutine is waiting for."""
        return self._work.cr_await  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if not self._is_started:
            self._work.close()  # the event loop already reports the dropped task

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()


class Race:
    """
    Runs tasks until the first of them is done. Leaving the block cancels the others, and waits
    until they have ended.

        async with Race() as race:
            answer = race.start(call())
            race.start(stop.wait())
            await race.first()
            return answer.result() if answer.done() else None

    The tasks are cancelled even if the block raises an error or is itself cancelled. Errors in
    tasks that are not awaited in the block are dropped.
    """

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run `work` in a task of this race."""
        task = start_task(work, name=name)
        self._tasks.append(task)
        return task

    async def first(self, within_ms: int | None = None) -> bool:
        """Wait until any task is done. Return False if none is done after `within_ms`
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
    Return the error that `work` raises, or None if it succeeds. Raises CancelledError if this call
    itself is cancelled.

    A task that raises SystemExit or KeyboardInterrupt stops the event loop immediately; a task that
    runs this function does not.
    """
    try:
        await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        return error
    return None


async def wait_for_shared(task: asyncio.Task[T], closed_text: str) -> T:
    """
    Return the result of a task that several callers share. Cancelling one caller does not cancel
    the task.

    Args:
        closed_text: the message of the ClosedError.

    Raises:
        ClosedError: the task itself was cancelled by its owner. CancelledError is only raised if
            the caller is cancelled.
    """
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(_retrieve_error)
        raise
    if task.cancelled():
        raise ClosedError(closed_text)
    return task.result()


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Mark a task's error as retrieved, so that asyncio does not log it if no caller is waiting."""
    if not task.cancelled():
        task.exception()


def survives_cancel(
    generator: Callable[P, AsyncGenerator[T, None]],
) -> Callable[P, AsyncIterator[T]]:
    """
    Make an async generator function return an iterator that survives the cancellation of `anext`.

    A cancellation that reaches a generator ends it. A later loop over it would then end without an
    error, although values are missing.
    """

    @functools.wraps(generator)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return CancelSafeIterator(generator(*args, **kwargs))

    return wrapper


class CancelSafeIterator(AsyncIterator[T]):
    """
    Iterates over an async generator. Each value is computed in a task; if an `anext` is cancelled,
    the next one waits for the same task.

    Args:
        values: the generator, which nothing else may iterate over.
    """

    def __init__(self, values: AsyncGenerator[T, None]) -> None:
        self._values = values
        self._step: asyncio.Task[T] | None = None

    async def __anext__(self) -> T:
        if self._step is None:
            self._step = start_task(_next_of(self._values), name="next value")
            self._step.add_done_callback(_retrieve_error)
        step = self._step
        try:
            value = await shield(step)
        except asyncio.CancelledError:
            if step.cancelled():
                self._step = None
            raise  # if the step completes, the next `anext` returns its value
        except BaseException:
            self._step = None
            raise
        self._step = None
        return value

    async def aclose(self) -> None:
        """Close the generator, like `AsyncGenerator.aclose`."""
        if self._step is not None:
            self._step.cancel()
            with suppress(Exception, asyncio.CancelledError):
                await self._step
        await self._values.aclose()


async def _next_of(values: AsyncGenerator[T, None]) -> T:
    return await anext(values)

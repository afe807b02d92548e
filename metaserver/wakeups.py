"""Wakes the waiting calls of this process at changes, and lets many calls share one run of work.

A wake-up may be lost when the process ends, because the state is in SQL. A call registers before it
reads, so that it sees an earlier change in its read, and is woken by a later one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from ..rpc.race import shield

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")


class Waiter:
    """
    A registration of one waiting call; a call may have several.

    Args:
        event: shared by the waiters of one call, so that each change ends its wait.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def woken(self) -> bool:
        """Whether a change has come to this waiter."""
        return self._event.is_set()

    def wake(self) -> None:
        """End the present wait, or the next one."""
        self._event.set()

    async def wait(self, wait_ms: int) -> None:
        """Return when woken, or after `wait_ms`."""
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._event.wait()
        except TimeoutError:
            pass


class Wakeups(Generic[K]):
    """The calls that wait for changes, by key."""

    def __init__(self) -> None:
        self._waiters: dict[K, dict[Waiter, None]] = {}
        """Key → its waiters, which are woken in the order of their registration."""

    @contextmanager
    def listen(self, key: K) -> Iterator[Waiter]:
        """Register for changes of `key` until the block ends; `event` as for `Waiter`."""
        waiter = Waiter()
        self._waiters.setdefault(key, {})[waiter] = None
        try:
            yield waiter
        finally:
            waiters = self._waiters[key]
            del waiters[waiter]
            if not waiters:
                del self._waiters[key]

    def wake(self, keys: Iterable[K]) -> None:
        """Wake every call that waits for one of these keys."""
        for key in keys:
            for waiter in self._waiters.get(key, ()):
                waiter.wake()

    def wake_all(self) -> None:
        """Wake every call."""
        self.wake(self._waiters)

    def keys(self) -> list[K]:
        """Return the keys that calls wait for."""
        return list(self._waiters)


class SingleFlight(Generic[K, V, T]):
    """
    Runs work for a key, one run at a time; calls that arrive during a run share the next run and
    its result.

    Args:
        work: gets the key and the items of all calls that share the run.
        rest_ms_max: longest pause between two runs, in milliseconds. The pause is as long as the
            previous run took, so that runs take at most half of the time, and more calls share a
            long one.
    """

    def __init__(
        self, work: Callable[[K, Sequence[V]], Awaitable[T]], *, rest_ms_max: int = 0
    ) -> None:
        self._work = work
        self._rest_ms_max = rest_ms_max
        self._items: dict[K, list[V]] = {}
        """Key → items of the run that has not begun."""
        self._next: dict[K, asyncio.Task[T]] = {}
        self._last: dict[K, asyncio.Task[T]] = {}
        self._took: dict[K, float] = {}

    async def run(self, key: K, item: V) -> T:
        """Add an item to the next run for this key, and return that run's result."""
        self._items.setdefault(key, []).append(item)
        task = self._next.get(key)
        if task is None:
            task = asyncio.create_task(self._run_after(self._last.get(key), key))
            self._next[key] = self._last[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return await shield(task)

    async def _run_after(self, before: asyncio.Task[T] | None, key: K) -> T:
        if before is not None:
            await asyncio.wait([before])
            await asyncio.sleep(min(self._took.get(key, 0), self._rest_ms_max / 1000))
        else:
            await asyncio.sleep(0)  # calls of the same moment share this run
        del self._next[key]
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            return await self._work(key, self._items.pop(key))
        finally:
            self._took[key] = clock() - start

    def _forget(self, key: K, task: asyncio.Task[T]) -> None:
        if self._last.get(key) is task:
            del self._last[key]
            self._took.pop(key, None)
        if not task.cancelled():
            task.exception()  # every caller raises it; the event loop need not report it

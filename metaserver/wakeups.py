"""Waking the calls of this process that wait for a change.  Nothing here is lost that a look at SQL would not find.

A listener registers before it reads: a change that comes after the reading waiters, one before it was read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Waiter:
    """What one waiting call holds; it has woken or not."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def woken(self) -> bool:
        """True once a change came."""
        return self._event.is_set()

    def wake(self) -> None:
        """A change came."""
        self._event.set()

    async def wait(self, wait_ms: int) -> None:
        """Until it waiters, or `wait_ms` have passed."""
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._event.wait()
        except TimeoutError:
            pass


class Wakeups(Generic[K]):
    """Which calls wait for which key."""

    def __init__(self) -> None:
        self._waiters: dict[K, dict[Waiter, None]] = {}
        """In the order of asking: the first to wait is the first to be woken."""

    @contextmanager
    def listen(self, key: K) -> Iterator[Waiter]:
        """A waiter for changes of `key` from now on."""
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
        """Waiter for everybody who listens to these keys."""
        for key in keys:
            for waiter in self._waiters.get(key, ()):
                waiter.wake()

    def wake_all(self) -> None:
        """Waiter for everybody."""
        self.wake(self._waiters)

    def keys(self) -> list[K]:
        """What is listened to."""
        return list(self._waiters)


class SingleFlight(Generic[K, T]):
    """
    Runs work for a key, one at a time; calls that come during a run share the next one and its result.

    Args:
        work: what to run.
        rest_ms_max: between two runs there is a rest as long as the first of them took, up to this: where
            runs are long, more calls share one, and they never take more than half of the time.
    """

    def __init__(self, work: Callable[[K], Awaitable[T]], *, rest_ms_max: int = 0) -> None:
        self._work = work
        self._rest_ms_max = rest_ms_max
        self._next: dict[K, asyncio.Task[T]] = {}
        self._last: dict[K, asyncio.Task[T]] = {}
        self._took: dict[K, float] = {}

    async def run(self, key: K) -> T:
        """What a run answered that began after this call."""
        task = self._next.get(key)
        if task is None:
            task = asyncio.create_task(self._turn(key, self._last.get(key)))
            self._next[key] = self._last[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    async def _turn(self, key: K, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
            await asyncio.sleep(min(self._took.get(key, 0), self._rest_ms_max / 1000))
        else:
            await asyncio.sleep(0)  # let the calls of the same moment join this run
        del self._next[key]
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            return await self._work(key)
        finally:
            self._took[key] = clock() - start

    def _forget(self, key: K, task: asyncio.Task[T]) -> None:
        if self._last.get(key) is task:
            del self._last[key]
            self._took.pop(key, None)
        if not task.cancelled():
            task.exception()  # seen by every caller; not once more by the event loop

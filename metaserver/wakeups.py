"""Wakes calls in this process that are waiting for a change, and lets concurrent calls share one
run.

Wake-ups are not stored: the state is in SQL, and a restarted process reads it from there. A call
registers before it reads, so it sees earlier changes in that read and is woken by later ones.
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
    """The registration of one waiting call."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def woken(self) -> bool:
        """True if this waiter has been woken."""
        return self._event.is_set()

    def wake(self) -> None:
        """End the current wait, or the next one."""
        self._event.set()

    async def wait(self, wait_ms: int) -> None:
        """Wait until woken, for at most `wait_ms` milliseconds."""
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._event.wait()
        except TimeoutError:
            pass


class Wakeups(Generic[K]):
    """Calls that are waiting for changes, by key."""

    def __init__(self) -> None:
        self._waiters: dict[K, dict[Waiter, None]] = {}
        """Maps each key to its waiters, which are woken in the order of registration."""

    @contextmanager
    def listen(self, key: K) -> Iterator[Waiter]:
        """Register for changes of `key` until the block ends."""
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
        """Wake all calls that are waiting for one of these keys."""
        for key in keys:
            for waiter in self._waiters.get(key, ()):
                waiter.wake()

    def wake_all(self) -> None:
        """Wake all waiting calls."""
        self.wake(self._waiters)

    def keys(self) -> list[K]:
        """Return the keys that calls are waiting for."""
        return list(self._waiters)


class SingleFlight(Generic[K, V, T]):
    """
    Runs a function for each key, one run at a time; calls that arrive during a run share the next
    run and its result.

    Args:
        work: called with the key and the items of all calls that share the run.
        pause_ms_max: maximum pause between two runs, in milliseconds. The pause is as long as the
            previous run, so runs take up at most half of the time, and the slower they are, the
            more calls share one.
    """

    def __init__(
        self, work: Callable[[K, Sequence[V]], Awaitable[T]], *, pause_ms_max: int = 0
    ) -> None:
        self._work = work
        self._pause_ms_max = pause_ms_max
        self._items: dict[K, list[V]] = {}
        """Maps each key to the items of the next run."""
        self._next_tasks: dict[K, asyncio.Task[T]] = {}
        self._last_tasks: dict[K, asyncio.Task[T]] = {}
        self._durations_s: dict[K, float] = {}

    async def run(self, key: K, item: V) -> T:
        """Add an item to the next run for this key and return that run's result."""
        self._items.setdefault(key, []).append(item)
        task = self._next_tasks.get(key)
        if task is None:
            task = asyncio.create_task(self._run_after(self._last_tasks.get(key), key))
            self._next_tasks[key] = self._last_tasks[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return await shield(task)

    async def _run_after(self, previous: asyncio.Task[T] | None, key: K) -> T:
        """Wait for the previous run and the pause after it, then run with all items gathered so
        far.
        """
        if previous is not None:
            await asyncio.wait([previous])
            await asyncio.sleep(min(self._durations_s.get(key, 0), self._pause_ms_max / 1000))
        else:
            await asyncio.sleep(0)  # calls made in the same loop iteration share this run
        del self._next_tasks[key]
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            return await self._work(key, self._items.pop(key))
        finally:
            self._durations_s[key] = clock() - start

    def _forget(self, key: K, task: asyncio.Task[T]) -> None:
        """Forget a finished run, unless another one for the same key has followed it."""
        if self._last_tasks.get(key) is task:
            del self._last_tasks[key]
            self._durations_s.pop(key, None)
        if not task.cancelled():
            task.exception()  # raised by every caller, so the event loop need not report it

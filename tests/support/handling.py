"""Workers with partitions of which a test gives messages, in real or in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from keylane.consumer.dispatch.failures import FailureRecords
from keylane.consumer.dispatch.jobs import BatchJobs, MessageJobs
from keylane.consumer.dispatch.workers import WorkerPool
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import Clock, SystemClock
from keylane.protocol.message import Message
from keylane.protocol.parked import Failure
from keylane.testing.machines.loop import SimLoop
from keylane.testing.machines.machine import Machine
from support.dispatching import GivenBatch, SteppedShell

T = TypeVar("T")
_SETTINGS: WeakKeyDictionary[WorkerPool, tuple[ConsumerSettings, Clock]] = WeakKeyDictionary()


class Crash(BaseException):
    """Not an Exception: the program is to end."""


class Client:
    """A partition, which is granted when it gets its first messages."""

    def __init__(self, partition_id: int = 1) -> None:
        self.partition_id = partition_id
        self.shell: Any = None

    def of(self, workers: WorkerPool) -> SteppedShell:
        """Return the shell of the partition."""
        if self.shell is None:
            settings, clock = _SETTINGS[workers]
            self.shell = SteppedShell(
                workers, settings, partition_id=self.partition_id, clock=clock
            )
        shell: SteppedShell = self.shell
        return shell

    def give(self, workers: WorkerPool, *keys: bytes, start: int | None = None) -> list[Message]:
        """Hand out a message of each key."""
        return self.of(workers).give(*keys, start=start)

    def give_batch(self, workers: WorkerPool, *keys: bytes, start: int | None = None) -> GivenBatch:
        """Hand out a batch with a message of each key."""
        return self.of(workers).give_batch(*keys, start=start)

    @property
    def handled(self) -> list[int]:
        """The offsets of handled messages, in the order in which they were reported."""
        return [] if self.shell is None else self.shell.ended

    @property
    def hanging(self) -> list[tuple[int, str, int, int]]:
        """(offset, what, failed tries, milliseconds), as told."""
        told: list[tuple[int, str, int, int]] = self.shell.hanging
        return told

    @property
    def set_aside(self) -> list[tuple[str, int, list[int], Failure]]:
        """How, the offset that failed, those behind it, and why."""
        aside: list[tuple[str, int, list[int], Failure]] = self.shell.set_aside
        return aside

    @property
    def held(self) -> int:
        """The number of messages that have arrived and have not ended."""
        return 0 if self.shell is None else self.shell.held

    def lose(self) -> None:
        """End the lease."""
        self.shell.lapse()

    async def hand_over(self, *, grace_ms: int = 0) -> None:
        """Hand the partition over: its handlers end first."""
        await self.shell.hand_over(grace_ms=grace_ms)


def workers_of(
    handler: Callable[[Any], Any],
    *,
    batched: bool = False,
    crashed: list[BaseException] | None = None,
    concurrency: int = 1,
    clock: Clock | None = None,
    first_ms: int = 1,
    max_ms: int = 1,
    handover_ms: int = 0,
    ordered: bool = True,
    handler_timeout_ms: int = 0,
    cancels: bool = True,
    **settings: Any,
) -> WorkerPool:
    """Workers that try again after `first_ms`."""
    clock = clock or SystemClock()
    pool = WorkerPool(
        partial(BatchJobs if batched else MessageJobs, handler),
        runner="handler of batches" if batched else "handler",
        concurrency=concurrency,
        handover_ms=handover_ms,
        clock=clock,
        on_crash=(crashed if crashed is not None else []).append,
        failures=FailureRecords(client="c", wall_ms=clock.wall_ms),
        handler_timeout_ms=handler_timeout_ms,
        cancels=cancels,
        ordered=ordered,
    )
    settings |= {
        "handler_backoff": Backoff(first_ms=first_ms, max_ms=max_ms),
        "consume_strategy": "exclusive" if ordered else "shared",
    }
    _SETTINGS[pool] = ConsumerSettings(**settings), clock
    return pool


def in_virtual_time(story: Coroutine[Any, Any, T], loop: SimLoop) -> T:
    """Run `story` on a loop whose time jumps to the next timer."""
    try:
        return loop.run_until_complete(story)
    finally:
        asyncio.set_event_loop(None)
        loop.dispose()


def virtual_loop() -> tuple[SimLoop, Machine]:
    """A loop in virtual time, and its clock."""
    loop = SimLoop(random.Random(1))
    return loop, Machine(loop, "m", rate=1.0, boot_s=10.0)

"""A scheduler on a simulated disk, and a scripted subject for what it delivers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from keylane.broker.scheduled.agenda import ScheduledAgenda
from keylane.broker.scheduled.records import ScheduledMessageRecord
from keylane.broker.scheduled.scheduler import Scheduler
from keylane.broker.scheduled.subjects import Subjects
from keylane.broker.store.store import Store
from keylane.protocol.clock import Clock, SystemClock
from keylane.protocol.errors import (
    KeylaneError,
    MessageTooLargeError,
    SubjectDeletedError,
    SubjectUnknownError,
)
from keylane.protocol.http.posted import PostedMessage
from keylane.testing.machines.disk import SimDisk
from sim.machines.store import settings_of

CLOCK = SystemClock()
RNG = random.Random(7)
"""One for all: a restart draws no number again."""


async def in_place(function: Callable[..., Any], /, *args: Any) -> Any:
    await asyncio.sleep(0)
    return function(*args)


class AcceptedFolder:
    """A data folder that a metaserver has accepted."""

    set_aside = ""
    has_reported = accepted = True
    awaits_copies = False

    async def wait_accepted(self) -> None:
        return

    async def wait_reported(self) -> None:
        return


class ScriptedSubjects(Subjects):
    """Stores each batch once by its idempotency key, as a partition does; errors come first, before
    or after storing.
    """

    def __init__(self) -> None:
        self.batches: dict[str, list[bytes]] = {}
        self.errors: list[tuple[KeylaneError, bool]] = []
        """An error, and whether the batch is stored before."""
        self.tries: list[str] = []
        self.deleted: set[int] = set()
        """Ids of deleted subjects."""
        self.limit_bytes: int | None = None
        """Of a value; None: any may be stored."""

    @property
    def values(self) -> list[bytes]:
        return [value for batch in self.batches.values() for value in batch]

    async def choose_logical_partition(self, subject: str, subject_id: int) -> int:
        if subject == "unknown":
            raise SubjectUnknownError(subject=subject)
        if subject_id in self.deleted:
            raise SubjectDeletedError(subject=subject)
        return 5

    async def store(
        self,
        subject: str,
        messages: Sequence[PostedMessage],
        *,
        sent_at_ns: Sequence[int],
        key: str,
        logical_partition: int,
        subject_id: int,
        tried: bool,
    ) -> None:
        assert tried or key not in self.tries
        assert (subject, logical_partition, len(sent_at_ns)) == ("s", 5, len(messages))
        self.tries.append(key)
        values = [message.value for message in messages]
        if self.errors:
            error, is_stored = self.errors.pop(0)
            if is_stored:
                self.batches[key] = values
            if isinstance(error, SubjectDeletedError):
                self.deleted.add(subject_id)  # for every later delivery too
            raise error
        longest = max(map(len, values))
        if self.limit_bytes is not None and longest > self.limit_bytes:
            raise MessageTooLargeError(f"{longest} bytes", limit_bytes=self.limit_bytes)
        assert self.batches.setdefault(key, values) == values, "a repeat has the same messages"


def open_scheduler(
    disk: SimDisk,
    *,
    clock: Clock = CLOCK,
    run_blocking: Callable[..., Any] = in_place,
    **limits: int,
) -> Scheduler:
    """A scheduler on a store of its own, of whose settings `limits` may have some."""
    settings = settings_of(
        segment_bytes=limits.get("segment_bytes", 1 << 21),
        snapshot_bytes=limits.get("snapshot_bytes", 1 << 28),
    )
    agenda = ScheduledAgenda(disk, clock)
    store = Store.open(
        disk, settings, clock=clock, run_commit=run_blocking, run_read=run_blocking, agenda=agenda
    )
    return Scheduler.open(
        disk,
        agenda,
        store,
        clock=clock,
        rng=RNG,
        broker_group="g1",
        count_max=limits.get("count_max", 10_000),
        bytes_max=limits.get("bytes_max", 1 << 20),
    )


async def close_scheduler(scheduler: Scheduler) -> None:
    """End the deliveries, and write what was submitted."""
    await scheduler.close()
    await scheduler._store.commit.close()


async def remove_old_log(scheduler: Scheduler) -> None:
    """Remove the log up to a new segment, as retention does."""
    store = scheduler._store
    await store.commit.begin_segment()
    end = store.log.bases[-1]
    while store.log.first_position < end:
        await store.carry_over.remove_oldest_segment()


@contextlib.asynccontextmanager
async def running(scheduler: Scheduler, subjects: ScriptedSubjects) -> AsyncIterator[None]:
    loop = asyncio.create_task(scheduler.run(subjects, AcceptedFolder()))
    try:
        yield
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await close_scheduler(scheduler)


def message(name: bytes, after_ms: int = 20, *, subject: str = "s") -> ScheduledMessageRecord:
    at_ms = CLOCK.wall_ms() + after_ms
    return ScheduledMessageRecord(name.rjust(16, b"-"), at_ms, subject, 1, name, b"")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)

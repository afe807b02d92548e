"""The scheduler removes old segments of its journal beside other work: in short steps, and nothing
that is needed after all.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from keylane.broker.scheduled.journal import segment_path
from keylane.broker.scheduled.records import ScheduledMessageRecord
from keylane.broker.scheduled.schedule_index import ScheduleIndex
from keylane.broker.scheduled.scheduler import COPIED_MAX, Scheduler, open_schedule
from keylane.protocol.clock import SystemClock
from keylane.testing.machines.disk import SimDisk

CLOCK = SystemClock()
SEGMENT_BYTES = 1 << 20


async def in_place(function: Callable[..., Any], /, *args: Any) -> Any:
    await asyncio.sleep(0)
    return function(*args)


def waiting(number: int) -> ScheduledMessageRecord:
    return ScheduledMessageRecord(
        b"%016d" % number, CLOCK.wall_ms() + 10_000_000, "s", 1, b"v", b""
    )


async def with_two_segments(disk: SimDisk, count: int) -> Scheduler:
    """The first of them with messages of the numbers below `count`."""
    scheduler = Scheduler.open(
        disk,
        clock=CLOCK,
        rng=random.Random(7),
        run_blocking=in_place,
        broker_group="g1",
        count_max=20_000,
        bytes_max=1 << 28,
        segment_bytes=SEGMENT_BYTES,
    )
    await scheduler.schedule([waiting(number) for number in range(count)])
    while len(scheduler._journal.segments) == 1:
        large = ScheduledMessageRecord(
            waiting(count).scheduled_id, CLOCK.wall_ms() + 10_000_000, "s", 1, bytes(900_000), b""
        )
        count += 1
        await scheduler.schedule([large])
    return scheduler


async def test_segment_is_looked_at_in_short_steps_when_most_of_it_is_needed(monkeypatch):
    """A look at all of it for each thousand that are written again kept the event loop for a tenth
    of a second each.
    """
    steps: list[int] = []
    needed = ScheduleIndex.select_needed

    def counted(self, records, segment):
        steps.append(len(records))
        return needed(self, records, segment)

    monkeypatch.setattr(ScheduleIndex, "select_needed", counted)
    disk, count = SimDisk(), 5 * COPIED_MAX
    scheduler = await with_two_segments(disk, count)
    await scheduler._remove_oldest()
    await scheduler.close()
    assert disk.size(segment_path(1)) is None
    assert max(steps) <= COPIED_MAX
    assert sum(steps) < 4 * count
    schedule_index, journal = open_schedule(disk, segment_bytes=SEGMENT_BYTES)
    assert journal.problems == []
    assert len(schedule_index.entries) >= count


async def test_segment_stays_until_a_cancel_of_its_message_has_ended():
    """A cancel that is not written is undone, and then the record of the message is needed after
    all.
    """
    disk = SimDisk()
    scheduler = await with_two_segments(disk, 2 * COPIED_MAX)
    scheduler._schedule_index.cancel(waiting(0).scheduled_id)
    cleaning = asyncio.create_task(scheduler._remove_oldest())
    await asyncio.sleep(0.1)
    assert disk.size(segment_path(1)) is not None
    scheduler._schedule_index.requeue([waiting(0).scheduled_id])
    await cleaning
    await scheduler.close()
    assert disk.size(segment_path(1)) is None
    schedule_index, journal = open_schedule(disk, segment_bytes=SEGMENT_BYTES)
    assert journal.problems == []
    assert len(schedule_index.entries) >= 2 * COPIED_MAX

"""A broker that stops at any step of its disk keeps every scheduled message that it acked, and
stores each once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from keylane.broker.scheduled.records import ScheduledMessageRecord, bind_to_subject
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import NotSentError, OutcomeUnknownError
from keylane.protocol.scheduled.receipt import CancelOutcome
from keylane.testing.machines.disk import Crashed, SimDisk
from support.scheduling import ScriptedSubjects, open_scheduler, remove_old_log, running

CLOCK = SystemClock()
MESSAGES = 12


class StoppingMachine:
    """Runs what the scheduler does on a disk; when the disk stops, so does everything."""

    def __init__(self, disk: SimDisk) -> None:
        self.stopped = asyncio.Event()
        self.scheduler = open_scheduler(
            disk, run_blocking=self._run, segment_bytes=4_096, snapshot_bytes=4_096
        )

    async def _run(self, function: Callable[..., Any], /, *args: Any) -> Any:
        await asyncio.sleep(0)
        try:
            return function(*args)
        except Crashed:
            self.stopped.set()
            await asyncio.Event().wait()


async def live(
    machine: StoppingMachine, subjects: ScriptedSubjects
) -> tuple[set[bytes], set[bytes]]:
    """Schedule and cancel until all is settled or the machine stops; the values that were acked and
    not canceled, and those canceled.
    """
    acked: set[bytes] = set()
    canceled: set[bytes] = set()

    async def work() -> None:
        for number in range(MESSAGES):
            value = b"%d" % number
            kept = ScheduledMessageRecord(
                value.rjust(16, b"-"), CLOCK.wall_ms() + number % 3, "s", 1, value, b""
            )
            await machine.scheduler.schedule([kept])
            acked.add(value)
            if number % 4 == 3:
                acked.discard(value)  # until the cancel is answered, either is right
                outcome = await machine.scheduler.cancel(kept.scheduled_id)
                (canceled if outcome is CancelOutcome.CANCELED else acked).add(value)
            if number % 3 == 2:
                await remove_old_log(machine.scheduler)
        while machine.scheduler.view()["count"]:
            await asyncio.sleep(0.001)

    loop = asyncio.create_task(machine.scheduler.run(subjects, subjects))
    working, stopping = asyncio.create_task(work()), asyncio.create_task(machine.stopped.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED, timeout=20)
    alive = asyncio.all_tasks() - {asyncio.current_task()}
    if working.done():
        working.result()
    for task in alive:
        task.cancel()
    await asyncio.gather(loop, working, stopping, *alive, return_exceptions=True)
    return acked, canceled


class AcceptingSubjects(ScriptedSubjects):
    """Subjects, and a data folder that a metaserver has accepted."""

    set_aside = ""
    has_reported = accepted = True
    awaits_copies = False

    async def wait_accepted(self) -> None:
        return


@pytest.mark.parametrize("seed", range(12))
async def test_acked_messages_are_stored_once_after_a_crash_at_any_step(seed):
    """Every ninth step, another one for each seed; some answers of subjects are lost as well."""
    rng = random.Random(seed)
    for crash_at in range(1 + seed, 250, 12):
        disk, subjects = SimDisk(), AcceptingSubjects()
        machine = StoppingMachine(disk)
        disk.crash_at = disk.steps + crash_at
        answers = [
            (NotSentError("no broker"), False),
            (OutcomeUnknownError("lost"), False),
            (OutcomeUnknownError("lost"), True),
        ]
        subjects.errors = rng.choices(answers, k=rng.randrange(3))
        acked, canceled = await live(machine, subjects)
        disk = disk.disk_after_crash(rng)
        scheduler = StoppingMachine(disk).scheduler
        assert scheduler.problem == ""
        async with running(scheduler, subjects):
            async with asyncio.timeout(20):
                while scheduler.view()["count"]:
                    await asyncio.sleep(0.002)
        stored = Counter(subjects.values)
        assert all(count == 1 for count in stored.values()), f"crash at step {crash_at}: {stored}"
        assert acked <= stored.keys(), f"crash at step {crash_at}"
        assert not canceled & stored.keys(), f"crash at step {crash_at}"


@pytest.mark.parametrize("seed", range(6))
async def test_dropped_messages_harm_no_other_after_a_crash_at_any_step(seed):
    """Every third is for a deleted subject; the others are stored once, and none of these."""
    rng = random.Random(seed)
    for crash_at in range(1 + seed, 100, 6):
        disk, subjects = SimDisk(), AcceptingSubjects()
        subjects.deleted = {9}
        machine = StoppingMachine(disk)
        disk.crash_at = disk.steps + crash_at
        acked: set[bytes] = set()

        async def work(machine: StoppingMachine = machine, acked: set[bytes] = acked) -> None:
            for number in range(MESSAGES):
                value = b"%d" % number
                kept = ScheduledMessageRecord(
                    value.rjust(16, b"-"), CLOCK.wall_ms() + 1, "s", 1, value, b""
                )
                await machine.scheduler.schedule([bind_to_subject(kept, 8 + (number % 3 == 0))])
                acked.add(value)
            while machine.scheduler.view()["count"]:
                await asyncio.sleep(0.001)

        tasks = [
            asyncio.create_task(machine.scheduler.run(subjects, subjects)),
            asyncio.create_task(work()),
            asyncio.create_task(machine.stopped.wait()),
        ]
        await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED, timeout=20)
        alive = asyncio.all_tasks() - {asyncio.current_task()}
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)
        scheduler = StoppingMachine(disk.disk_after_crash(rng)).scheduler
        assert scheduler.problem == ""
        async with running(scheduler, subjects):
            async with asyncio.timeout(20):
                while scheduler.view()["count"]:
                    await asyncio.sleep(0.002)
        stored = Counter(subjects.values)
        dropped = {b"%d" % number for number in range(0, MESSAGES, 3)}
        assert all(count == 1 for count in stored.values()), f"crash at step {crash_at}"
        assert acked - dropped <= stored.keys(), f"crash at step {crash_at}"
        assert not dropped & stored.keys(), f"crash at step {crash_at}"

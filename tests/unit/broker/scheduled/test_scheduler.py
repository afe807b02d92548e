"""The scheduler on a simulated disk, with a scripted subject: kept, delivered, canceled, over
faults and restarts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from keylane.broker.scheduled.records import ScheduledMessageRecord, bind_to_subject
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    CorruptLogError,
    DiskFullError,
    FlushFailedError,
    NotSentError,
    OutcomeUnknownError,
    OverloadedError,
    Reason,
    StorageError,
    SubjectDeletedError,
)
from keylane.protocol.http.posted import PostedMessage
from keylane.protocol.scheduled.receipt import CancelOutcome
from keylane.testing.machines.disk import SimDisk
from keylane.testing.machines.loop import SimLoop
from support.raising import raises
from support.scheduling import (
    CLOCK,
    ScriptedSubjects,
    close_scheduler,
    message,
    open_scheduler,
    remove_old_log,
    running,
    until,
)


async def test_messages_are_delivered_at_their_times_and_settled():
    subjects, scheduler = ScriptedSubjects(), open_scheduler(SimDisk())
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"a", 60), message(b"b", 20)])
        assert subjects.values == []
        assert scheduler.view()["count"] == 2
        await until(lambda: scheduler.view()["count"] == 0)
        assert subjects.values == [b"b", b"a"]
        assert await scheduler.cancel(b"a".rjust(16, b"-")) is CancelOutcome.DELIVERED


class GatedSubjects(ScriptedSubjects):
    """A store goes on once `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def store(self, subject: str, messages: Sequence[PostedMessage], **named: Any) -> None:
        self.asked.set()
        await self.gate.wait()
        await super().store(subject, messages, **named)


@pytest.mark.parametrize(
    ("errors", "outcome", "values"),
    [
        ([], CancelOutcome.DELIVERED, [b"a"]),
        ([(OverloadedError("not now"), False)], CancelOutcome.CANCELED, []),
    ],
    ids=["stored", "given back"],
)
async def test_cancel_waits_for_the_end_of_a_delivery_when_one_is_under_way(
    errors, outcome, values
):
    """Its outcome is the last one: what is told to be delivered is never canceled later."""
    subjects, scheduler = GatedSubjects(), open_scheduler(SimDisk())
    subjects.errors = errors
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"a", 0)])
        await subjects.asked.wait()
        canceling = asyncio.create_task(scheduler.cancel(b"a".rjust(16, b"-")))
        await asyncio.sleep(0.05)
        assert not canceling.done()
        subjects.gate.set()
        assert await canceling is outcome
        await until(lambda: scheduler.view()["count"] == 0)
    assert subjects.values == values


async def test_cancel_is_refused_when_a_delivery_does_not_end(monkeypatch):
    monkeypatch.setattr("keylane.broker.scheduled.scheduler.DELIVERY_S", 0.05)
    subjects, scheduler = GatedSubjects(), open_scheduler(SimDisk())
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"a", 0)])
        await subjects.asked.wait()
        with raises(Reason.SCHEDULED_TAKEN):
            await scheduler.cancel(b"a".rjust(16, b"-"))


def test_messages_are_stored_within_100_ms_of_their_times():
    """In simulated time, where each store takes 30 ms: single ones far apart, and many that are due
    together.
    """
    loop = SimLoop(random.Random(1))
    rng = random.Random(2)

    class SimulatedCalendar(SystemClock):
        def wall_ms(self) -> int:
            return int(loop.now * 1000)

    class SlowSubjects(ScriptedSubjects):
        async def store(
            self, subject: str, messages: Sequence[PostedMessage], **named: Any
        ) -> None:
            await asyncio.sleep(0.03)
            await super().store(subject, messages, **named)
            late_ms.extend(loop.now * 1000 - int(message.value) for message in messages)

    late_ms: list[float] = []
    due_ms = sorted([*(rng.randrange(1_000, 600_000) for _ in range(200)), *[60_000] * 300])

    async def main() -> None:
        subjects, scheduler = SlowSubjects(), open_scheduler(SimDisk(), clock=SimulatedCalendar())
        async with running(scheduler, subjects):
            await scheduler.schedule(
                [
                    ScheduledMessageRecord(b"%016d" % number, at_ms, "s", 1, b"%d" % at_ms, b"")
                    for number, at_ms in enumerate(due_ms)
                ]
            )
            await asyncio.sleep(601)

    try:
        loop.run_until_complete(main())
    finally:
        loop.dispose()
    assert len(late_ms) == len(due_ms)
    assert min(late_ms) >= 0
    assert max(late_ms) <= 100


async def test_repeated_message_is_kept_once():
    """Also one that is not durable yet, and one that is delivered."""
    subjects, scheduler = ScriptedSubjects(), open_scheduler(SimDisk())
    once = message(b"a")
    async with running(scheduler, subjects):
        await asyncio.gather(scheduler.schedule([once]), scheduler.schedule([once]))
        await scheduler.schedule([once])
        await until(lambda: scheduler.view()["count"] == 0)
        await scheduler.schedule([once])
        assert scheduler.view()["count"] == 0
    assert subjects.values == [b"a"]


async def test_subject_of_a_message_is_known_while_it_is_written():
    """Whose right to cancel it counts; a caller with a right on another subject knew of no subject
    until then.
    """
    scheduler = open_scheduler(SimDisk())
    kept = message(b"a", 60_000)
    writing = asyncio.create_task(scheduler.schedule([kept]))
    await asyncio.sleep(0)
    told = scheduler.subject_of(kept.scheduled_id)
    await writing
    assert (told, scheduler.subject_of(kept.scheduled_id)) == ("s", "s")
    assert not scheduler._pending_messages
    await scheduler.close()


@pytest.mark.parametrize("is_stored", [False, True])
async def test_delivery_without_an_answer_is_repeated_under_its_key(is_stored):
    """Newer messages of the subject are not delayed by it."""
    subjects, scheduler = ScriptedSubjects(), open_scheduler(SimDisk())
    subjects.errors = [(OutcomeUnknownError(), is_stored), (NotSentError(), False)]
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"a")])
        await until(lambda: scheduler.view()["count"] == 0)
    assert subjects.values == [b"a"]
    assert len(set(subjects.tries)) == 1
    assert len(subjects.tries) == 3


async def test_messages_of_which_nothing_is_stored_may_be_canceled_again():
    subjects, scheduler = ScriptedSubjects(), open_scheduler(SimDisk())
    subjects.errors = [(NotSentError("no broker"), False)]
    kept = message(b"a")
    async with running(scheduler, subjects):
        await scheduler.schedule([kept])
        await until(lambda: bool(scheduler.view()["late"]))
        assert scheduler.view()["late"] == {"s": "no broker"}
        assert await scheduler.cancel(kept.scheduled_id) is CancelOutcome.CANCELED
        await asyncio.sleep(0.1)
    assert subjects.values == []


async def test_messages_of_an_unknown_subject_delay_no_other():
    subjects, scheduler = ScriptedSubjects(), open_scheduler(SimDisk())
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"a", subject="unknown"), message(b"b")])
        await until(lambda: scheduler.view()["count"] == 1)
        assert subjects.values == [b"b"]
        assert list(scheduler.view()["late"]) == ["unknown"]


async def test_restart_repeats_an_open_delivery_with_the_same_messages():
    """It was stored, and its answers were lost until the crash."""
    disk, subjects = SimDisk(), ScriptedSubjects()
    subjects.errors = [(OutcomeUnknownError(), True)] * 10_000
    scheduler = open_scheduler(disk)
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"a"), message(b"b")])
        await until(lambda: bool(subjects.tries))
    subjects.errors.clear()
    tries_before = len(subjects.tries)
    scheduler = open_scheduler(disk)
    await scheduler.schedule([message(b"c")])
    async with running(scheduler, subjects):
        await until(lambda: scheduler.view()["count"] == 0)
    assert sorted(subjects.values) == [b"a", b"b", b"c"]
    assert subjects.tries[0] in subjects.tries[tries_before:]


async def test_overdue_messages_are_delivered_at_a_start_in_the_order_of_their_times():
    disk, subjects = SimDisk(), ScriptedSubjects()
    scheduler = open_scheduler(disk)
    await scheduler.schedule([message(b"%d" % each, 90 - 10 * each) for each in range(9)])
    await scheduler.close()
    await asyncio.sleep(0.1)
    scheduler = open_scheduler(disk)
    async with running(scheduler, subjects):
        await until(lambda: scheduler.view()["count"] == 0)
    assert subjects.values == [b"%d" % each for each in reversed(range(9))]
    assert len(subjects.tries) == 1


async def test_full_disk_refuses_messages_and_cancels_until_it_has_room():
    disk, subjects = SimDisk(), ScriptedSubjects()
    scheduler = open_scheduler(disk, bytes_max=1 << 24)
    kept = message(b"a", 200)
    async with running(scheduler, subjects):
        await scheduler.schedule([kept])
        disk.free_space = 10
        with pytest.raises(DiskFullError):
            await scheduler.schedule([large(b"b"), large(b"c")])  # more than the log has reserved
        with pytest.raises(BrokerReadOnlyError, match="the disk is full"):
            await scheduler.cancel(kept.scheduled_id)
        disk.free_space = None
        scheduler._commit._disk_full_until_ms = 1  # a second later
        await scheduler.schedule([message(b"d")])
        await until(lambda: scheduler.view()["count"] == 0)
    assert sorted(subjects.values) == [b"a", b"d"]


def large(name: bytes) -> ScheduledMessageRecord:
    due_ms = CLOCK.wall_ms() + 10_000_000
    return ScheduledMessageRecord(name.rjust(16, b"-"), due_ms, "s", 1, bytes((1 << 20) - 200), b"")


async def test_failed_sync_ends_all_writes():
    disk = SimDisk()
    scheduler = open_scheduler(disk)
    await scheduler.schedule([message(b"a", 60_000)])
    disk.failing_operation = "fdatasync"
    with pytest.raises(FlushFailedError):
        await scheduler.schedule([message(b"b")])
    disk.failing_operation = ""
    with pytest.raises(BrokerReadOnlyError, match="takes no writes"):
        await scheduler.schedule([message(b"c")])
    # A refusal would say that it is not kept, and it would be sent again under another id.
    assert await scheduler.schedule([message(b"a")]) == [True]
    assert scheduler.problem
    assert scheduler.view()["count"] == 1


async def test_callers_are_told_when_the_log_meets_a_bug(monkeypatch):
    """No call waits for ever, and nothing is written behind what may be half written."""

    def broken(_records: object) -> None:
        raise ValueError("impossible")

    scheduler = open_scheduler(SimDisk())
    monkeypatch.setattr(scheduler._store.log, "write", broken)
    async with running(scheduler, ScriptedSubjects()), asyncio.timeout(10):
        with pytest.raises(FlushFailedError, match="a bug in the broker: ValueError"):
            await scheduler.schedule([message(b"a")])
        with pytest.raises(BrokerReadOnlyError):
            await scheduler.schedule([message(b"b")])
        assert "impossible" in scheduler.problem


async def test_damaged_log_serves_and_delivers_no_scheduled_message():
    """A record that is lost may say that a message was canceled. The damage is shown again after a
    snapshot, until the folder of scheduled messages is moved away.
    """
    disk, subjects = SimDisk(), ScriptedSubjects()
    scheduler = open_scheduler(disk)
    for name in (b"a", b"b", b"c"):
        await scheduler.schedule([message(name, 60_000)])
    await close_scheduler(scheduler)
    (path,) = (f"log/{name}" for name in disk.list("log") if name.endswith(".log"))
    second = bytes(disk.contents[path].data).index(b"b".rjust(16, b"-"))
    disk.contents[path].data[second] ^= 1
    for _ in range(2):
        scheduler = open_scheduler(disk)
        async with running(scheduler, subjects):
            await asyncio.sleep(0.05)
            with pytest.raises(CorruptLogError, match="damaged"):
                await scheduler.schedule([message(b"d")])
            with pytest.raises(CorruptLogError):
                await scheduler.cancel(b"a".rjust(16, b"-"))
        assert await scheduler._store.snapshotter.write()
    assert subjects.values == []
    disk.remove("scheduled/agenda.snap")
    disk.folders.remove("scheduled")
    scheduler = open_scheduler(disk)
    assert scheduler.problem == ""
    assert scheduler.view()["count"] == 0


async def test_scheduled_messages_are_read_from_the_log_when_only_their_copy_is_gone():
    """Somebody who gives them up moves the folder away, not a file in it."""
    disk = SimDisk()
    scheduler = open_scheduler(disk)
    await scheduler.schedule([message(b"a", 60_000)])
    assert await scheduler._store.snapshotter.write()
    await close_scheduler(scheduler)
    disk.remove("scheduled/agenda.snap")
    assert open_scheduler(disk).view()["count"] == 1


async def test_waiting_messages_are_kept_when_the_log_is_removed():
    """Also those that are due at that moment; a start finds each where it is now."""
    disk, subjects = SimDisk(), ScriptedSubjects()
    scheduler = open_scheduler(disk, segment_bytes=4_096)
    waiting = [message(b"wait-%d" % each, 60_000) for each in range(5)]
    async with running(scheduler, subjects):
        await scheduler.schedule(waiting)
        for turn in range(100):
            await scheduler.schedule([message(b"%d-%d" % (turn, each), 1) for each in range(5)])
            if turn % 10 == 9:
                await remove_old_log(scheduler)
        await until(lambda: scheduler.view()["count"] == len(waiting))
        await remove_old_log(scheduler)
    assert sum(disk.size(f"log/{name}") or 0 for name in disk.list("log")) < 40_000
    scheduler = open_scheduler(disk, segment_bytes=4_096)
    assert scheduler.problem == ""
    index = scheduler._schedule_index
    assert index.entries.keys() == {each.scheduled_id for each in waiting}
    read = await scheduler._read_messages(list(index.entries.values()))
    assert {each.scheduled_id: each for each in read} == {
        each.scheduled_id: each for each in waiting
    }
    assert len(subjects.values) == len(set(subjects.values)) == 500


async def test_large_messages_are_found_at_a_start_when_they_were_written_again():
    disk = SimDisk()
    scheduler = open_scheduler(disk, bytes_max=1 << 28, segment_bytes=1 << 22)
    for number in range(18):
        await scheduler.schedule([large(b"%d" % number)])
    removing = asyncio.create_task(remove_old_log(scheduler))
    await asyncio.sleep(0)
    await scheduler.schedule([large(b"%d" % number) for number in range(18, 21)])
    await removing
    await close_scheduler(scheduler)
    scheduler = open_scheduler(disk, bytes_max=1 << 28, segment_bytes=1 << 22)
    assert scheduler.problem == ""
    entries = list(scheduler._schedule_index.entries.values())
    assert len(await scheduler._read_messages(entries)) == len(entries) == 21


async def test_settled_messages_are_known_when_their_records_were_removed():
    """A sender without an answer repeats a message, and the broker was started anew meanwhile."""
    disk, subjects = SimDisk(), ScriptedSubjects()
    subjects.deleted = {9}
    scheduler = open_scheduler(disk, segment_bytes=4_096)
    delivered, canceled = message(b"delivered", 1), message(b"canceled", 60_000)
    dropped = bind_to_subject(message(b"dropped", 1), 9)
    async with running(scheduler, subjects):
        await scheduler.schedule([delivered, canceled, dropped])
        await scheduler.cancel(canceled.scheduled_id)
        for turn in range(200):
            await scheduler.schedule([message(b"%d-%d" % (turn, each), 1) for each in range(5)])
        await until(lambda: scheduler.view()["count"] == 0)
        await remove_old_log(scheduler)
    assert scheduler._store.log.first_position > 20 * 4_096
    disk.remove("scheduled/agenda.snap")  # the log alone knows it
    for name in disk.list("snapshot"):
        disk.remove(f"snapshot/{name}")
    scheduler = open_scheduler(disk, segment_bytes=4_096)
    async with running(scheduler, subjects):
        assert await scheduler.schedule([delivered, canceled, dropped]) == [True] * 3
        await asyncio.sleep(0.05)
        outcomes = [
            await scheduler.cancel(each.scheduled_id) for each in (delivered, canceled, dropped)
        ]
    assert outcomes == [CancelOutcome.DELIVERED, CancelOutcome.CANCELED, CancelOutcome.DROPPED]
    assert subjects.values.count(b"delivered") == 1
    assert len(subjects.values) == 1_001


async def test_messages_of_a_deleted_subject_are_dropped_and_told_so(caplog):
    """Those of a later subject of the name are delivered; the outcome is known after a restart."""
    subjects, disk = ScriptedSubjects(), SimDisk()
    scheduler = open_scheduler(disk)
    subjects.deleted = {7}
    gone, later = bind_to_subject(message(b"gone"), 7), bind_to_subject(message(b"later", 30), 8)
    async with running(scheduler, subjects):
        await scheduler.schedule([gone, later])
        await until(lambda: scheduler.view()["count"] == 0)
        assert scheduler.view()["dropped"] == 1
        assert await scheduler.cancel(gone.scheduled_id) is CancelOutcome.DROPPED
        assert await scheduler.cancel(later.scheduled_id) is CancelOutcome.DELIVERED
    assert subjects.values == [b"later"]
    (line,) = [record.getMessage() for record in caplog.records if "dropped" in record.message]
    assert line.startswith("1 scheduled message of s dropped")
    assert gone.scheduled_id.hex() in line
    scheduler = open_scheduler(disk)
    assert scheduler.view()["count"] == 0
    assert await scheduler.cancel(gone.scheduled_id) is CancelOutcome.DROPPED
    await scheduler.close()


@pytest.mark.parametrize("before", [[], [(OutcomeUnknownError("lost"), False)]])
async def test_subject_that_is_deleted_during_a_delivery_gets_nothing(before):
    subjects, scheduler = ScriptedSubjects(), open_scheduler(SimDisk())
    subjects.errors = [*before, (SubjectDeletedError("s was deleted"), False)]
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"a"), message(b"b")])
        await until(lambda: scheduler.view()["count"] == 0)
    assert (subjects.values, scheduler.dropped_count) == ([], 2)


@pytest.mark.parametrize("before", [[], [(OutcomeUnknownError("lost"), False)]])
async def test_messages_over_the_limit_are_dropped_and_others_delivered(before):
    subjects, scheduler = ScriptedSubjects(), open_scheduler(SimDisk())
    subjects.errors, subjects.limit_bytes = [*before], 2
    large = message(b"abc")
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"a"), large, message(b"bc")])
        await until(lambda: scheduler.view()["count"] == 0)
        assert await scheduler.cancel(large.scheduled_id) is CancelOutcome.DROPPED
    assert (sorted(subjects.values), scheduler.dropped_count) == ([b"a", b"bc"], 1)


async def test_message_waits_when_its_drop_cannot_be_written():
    """As on a full disk: it may be canceled when there is room."""
    subjects, disk = ScriptedSubjects(), SimDisk()
    scheduler = open_scheduler(disk, bytes_max=1 << 24)
    subjects.deleted = {7}
    gone = bind_to_subject(message(b"gone", 60), 7)
    async with running(scheduler, subjects):
        await scheduler.schedule([gone])
        disk.free_space = 10
        with pytest.raises(DiskFullError):
            await scheduler.schedule([large(b"b"), large(b"c")])
        await until(lambda: bool(scheduler.view()["late"]))
        assert (scheduler.view()["count"], scheduler.dropped_count) == (1, 0)
        disk.free_space = None
        scheduler._commit._disk_full_until_ms = 1  # a second later
        assert await scheduler.cancel(gone.scheduled_id) is CancelOutcome.CANCELED


class UnreadableDisk(SimDisk):
    """A disk of which reads fail while `broken`."""

    broken = False

    def pread(self, path: str, position: int, size: int) -> bytes:
        if self.broken:
            raise StorageError(f"{path}: input/output error")
        return super().pread(path, position, size)


async def test_open_delivery_is_repeated_whole_when_a_read_fails_after_a_restart(monkeypatch):
    """What cannot be read now may be stored already, so it is in no other delivery; the others are
    no less due.
    """
    monkeypatch.setattr("keylane.broker.scheduled.scheduler.UNREADABLE_MS", 50)
    disk, subjects = UnreadableDisk(), ScriptedSubjects()
    subjects.errors = [(OutcomeUnknownError(), True)] * 10_000
    scheduler = open_scheduler(disk)
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"a", 0)])
        await scheduler.schedule([message(b"b", 0)])
        await until(lambda: bool(subjects.tries))
    subjects.errors.clear()
    scheduler = open_scheduler(disk)
    disk.broken = True
    async with running(scheduler, subjects):
        await asyncio.sleep(0.02)
        disk.broken = False
        await until(lambda: scheduler.view()["count"] == 0)
    assert sorted(subjects.values) == [b"a", b"b"]


class SteppedClock(SystemClock):
    """A calendar that is set by hand."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def wall_ms(self) -> int:  # type: ignore[override]
        return SystemClock.wall_ms() + self.ahead_ms


async def test_message_that_waits_for_its_next_try_is_stored_soon_when_the_calendar_is_set_back():
    """Its time has come by both calendars; only the pause between two tries was counted on the
    first.
    """
    clock, subjects = SteppedClock(), ScriptedSubjects()
    clock.ahead_ms = 3 * 3_600_000
    subjects.errors = [(OverloadedError("not now"), False)]
    scheduler = open_scheduler(SimDisk(), clock=clock)
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"a", 0)])
        await until(lambda: bool(subjects.tries))
        clock.ahead_ms = 0
        await until(lambda: scheduler.view()["count"] == 0)
    assert subjects.values == [b"a"]


@pytest.mark.parametrize("ending", ["set right", "believed"])
async def test_message_is_not_due_early_when_the_calendar_is_set_forward_by_hours(
    ending: str, caplog: pytest.LogCaptureFixture
):
    """Nothing takes an early delivery back. An operator's word, or a day, has the calendar
    believed.
    """
    clock, subjects = SteppedClock(), ScriptedSubjects()
    scheduler = open_scheduler(SimDisk(), clock=clock)
    async with running(scheduler, subjects):
        await scheduler.schedule([message(b"later", 3_600_000), message(b"soon", 200)])
        clock.ahead_ms = 30 * 24 * 3_600_000
        await until(lambda: subjects.values == [b"soon"])
        assert scheduler.view()["count"] == 1
        assert "set forward by 720.0 hours" in str(scheduler.view()["calendar"])
        assert caplog.text.count("set forward by 720.0 hours") == 1
        if ending == "believed":
            scheduler.calendar.trust_now()
            await until(lambda: scheduler.view()["count"] == 0)
        else:
            clock.ahead_ms = 0
            await until(lambda: scheduler.view()["calendar"] == "")
            assert scheduler.view()["count"] == 1

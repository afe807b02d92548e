"""Group commit: one sync for everything that waits, and what happens when the disk says no."""

from __future__ import annotations

import asyncio
import random

import pytest

from keylane.broker.copies.commitment import Commitment
from keylane.broker.partition.records import encode_body
from keylane.broker.storage.log.commit_log import segment_bases, segment_path
from keylane.broker.store import group_commit as admission
from keylane.broker.store.group_commit import RETRY_FULL_MS, Entry
from keylane.broker.store.store import Store
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    DiskFullError,
    FencedError,
    FlushFailedError,
    OverloadedError,
    PartitionUnknownError,
)
from keylane.protocol.limits import BATCH_BYTES_MAX
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.quick_sync import HostQuickSync
from sim.machines.store import Desk, batch, in_place, open_store


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["thread", "kernel"])
async def desk(request, disk, clock) -> Desk:
    """Commits are synced by a thread, or small ones without."""
    quick = HostQuickSync(in_place, lambda: None) if request.param == "kernel" else None
    desk = Desk(open_store(disk, clock=clock, quick=quick), clock)
    await desk.host()
    return desk


async def test_waiting_appends_share_a_sync(desk, disk):
    """Appends that come while another commit is at the disk are made durable by one sync
    together.
    """
    syncs = disk.syncs
    answers = await asyncio.gather(
        *(desk.append(batch(sequence=2 * number)) for number in range(50))
    )

    assert [answer.base_offset for answer in answers] == list(range(0, 100, 2))
    assert disk.syncs - syncs == 1


async def test_append_is_answered_after_the_sync(desk, disk):
    """At the moment of the answer the batch is on the platter, not only in the page cache."""
    seen: list[str] = []
    disk.on_step = seen.append
    task = asyncio.create_task(desk.append(batch()))
    task.add_done_callback(lambda _: seen.append("answered"))
    await task
    await asyncio.sleep(0)

    assert seen == ["write", "fdatasync", "synced", "write", "answered"]  # the last one: the trail


async def test_acks_between_two_commits_are_one_record(desk, disk):
    """However many acks come, a commit carries one cursor per partition and group."""
    await desk.append(batch(count=100))
    await desk.acquire(1)
    end = desk.store.log.end
    await desk.ack(1, (0, 1))
    length = desk.store.log.end - end
    await asyncio.gather(*(desk.ack(1, (number, number + 1)) for number in range(1, 100)))

    assert desk.store.log.end - end < 3 * length
    assert desk.store.state.partition(1).groups["audit"].acked.cursor == 100


async def test_too_much_waiting_is_refused(monkeypatch):
    """Beyond the limit of queued bytes an append waits, and then is refused: nothing of it is
    decided.
    """
    monkeypatch.setattr(admission, "WAIT_MS", 50)
    disk, clock = SimDisk(), ManualClock()
    gate = asyncio.Event()

    async def slow(function, /, *args):
        await gate.wait()
        return function(*args)

    store = open_store(disk, clock=clock, queued_bytes_max=BATCH_BYTES_MAX)
    desk = Desk(store, clock)
    await desk.host()
    store.commit._run_blocking = slow
    large = [batch(sequence=n, count=1, value=b"x" * 400_000) for n in range(3)]
    first = [asyncio.create_task(desk.append(record)) for record in large[:2]]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await desk.append(large[2])
    owner = asyncio.create_task(desk.acquire(1))  # an owner is let in all the same

    gate.set()
    assert [answer.base_offset for answer in await asyncio.gather(*first)] == [0, 1]
    assert (await owner).cursor == 0
    assert (await desk.append(large[2])).base_offset == 2


async def test_progress_never_comes_before_what_was_decided_before_it():
    """Progress acked while the state of its partition waits behind a full commit is not undone by
    that state.
    """
    disk, clock = SimDisk(), ManualClock()
    turns = asyncio.Queue()

    async def in_turn(function, /, *args):
        await turns.get()
        return function(*args)

    changes = {"commit_bytes_max": BATCH_BYTES_MAX, "segment_bytes": 4096}
    store = open_store(disk, clock=clock, **changes)
    desk = Desk(store, clock)
    await desk.host()
    for number in range(3):
        await desk.append(batch(sequence=number, count=1, value=b"x" * 4000))
    await desk.acquire(1)
    store.commit._run_blocking = in_turn
    large = [batch(sequence=n, count=1, value=b"x" * 700_000) for n in range(3, 6)]
    tasks = [asyncio.create_task(desk.append(large[0]))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(desk.append(record)) for record in large[1:]]
    tasks += [asyncio.create_task(store.carry_over.rewrite_described(store.log.bases[1]))]
    await asyncio.sleep(0)
    acked = asyncio.create_task(desk.ack(1, (0, 2)))
    while not acked.done():
        turns.put_nowait(None)
        await asyncio.sleep(0)
    for _ in range(10):  # what was left then
        turns.put_nowait(None)
        await asyncio.sleep(0)
    left = disk.disk_after_crash(random.Random(0))
    for name in left.list("snapshot"):
        left.remove(f"snapshot/{name}")
    again = open_store(left, clock=clock, **changes)

    assert (await acked).cursor == 2
    assert again.state.partition(1).groups["audit"].acked.cursor == 2
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("operation", ["write", "fdatasync"])
async def test_failed_write_ends_writing(desk, disk, operation):
    """After a failed write or sync nothing is written again; reads go on, and health says why."""
    await desk.append(batch())
    await desk.acquire(1)
    disk.failing_operation = operation
    waiting = [asyncio.create_task(desk.append(batch(sequence=n))) for n in (2, 4)]
    failed = await asyncio.gather(*waiting, return_exceptions=True)
    disk.failing_operation = ""
    steps = disk.steps

    assert [type(error) for error in failed] == [FlushFailedError, FlushFailedError]
    assert {error.fate.value for error in failed} == {"unknown"}
    for again in (
        lambda: desk.append(batch(sequence=2)),
        lambda: desk.acquire(2),
        lambda: desk.ack(1, (0, 1)),
        lambda: desk.host(2),
    ):
        with pytest.raises(BrokerReadOnlyError):
            await again()
    assert disk.steps == steps
    assert desk.store.commit.refusal_reason
    assert (await desk.pull(1, 0))[0].upto == 2
    assert (await desk.ack(1)).cursor == 0


@pytest.mark.parametrize("operation", ["write", "fdatasync"])
async def test_decisions_are_undone_when_their_write_fails(desk, disk, operation):
    """A fence or a partition whose write failed is gone: asking again does not find it as if it
    were durable.
    """
    await desk.append(batch())
    await desk.acquire(1)
    disk.failing_operation = operation
    calls = [desk.acquire(2, "b" * 16), desk.host(2), desk.append(batch(sequence=2))]
    failed = await asyncio.gather(*calls, return_exceptions=True)
    disk.failing_operation = ""

    assert [type(error) for error in failed] == [FlushFailedError] * 3
    for again in (lambda: desk.acquire(2, "b" * 16), lambda: desk.host(2)):
        with pytest.raises(BrokerReadOnlyError):
            await again()
    assert (await desk.acquire(1)).cursor == 0
    await desk.host(1)
    assert desk.store.state.partition(1).next_offset == 2


async def test_waiting_appends_are_refused_when_the_write_before_them_fails(disk, clock):
    """A batch that had not reached the disk when a write failed is refused, not unknown."""
    desk = Desk(open_store(disk, clock=clock, commit_bytes_max=BATCH_BYTES_MAX), clock)
    await desk.host()
    disk.failing_operation = "fdatasync"
    large = [batch(sequence=n, count=1, value=b"x" * 900_000) for n in range(3)]
    failed = await asyncio.gather(*map(desk.append, large), return_exceptions=True)

    assert [type(error) for error in failed] == [
        FlushFailedError,
        FlushFailedError,
        BrokerReadOnlyError,
    ]


async def test_full_disk_keeps_nothing_and_heals(desk, disk, clock):
    """ENOSPC undoes all that was decided; when there is room the same batches are stored at the
    same offsets.
    """
    await desk.append(batch())
    await desk.acquire(1)
    size = disk.size("log/" + "0" * 20 + ".log")
    disk.free_space = 300
    calls = [desk.append(batch(sequence=2)), desk.append(batch(sequence=4)), desk.acquire(2)]
    failed = await asyncio.gather(*calls, desk.host(2), return_exceptions=True)

    assert [type(error) for error in failed] == [DiskFullError] * 4
    assert all(str(error).startswith("broker group 'g1': ") for error in failed)
    assert disk.size("log/" + "0" * 20 + ".log") == size
    with pytest.raises(BrokerReadOnlyError):
        await desk.append(batch(sequence=2))
    with pytest.raises(PartitionUnknownError):
        await desk.read(0, partition_id=2)

    disk.free_space = None
    clock.advance(RETRY_FULL_MS)
    assert (await desk.append(batch(sequence=2))).base_offset == 2
    assert (await desk.append(batch(sequence=4))).base_offset == 4
    assert (await desk.ack(1, (0, 1))).cursor == 1
    assert not desk.store.commit.refusal_reason
    reopened = open_store(disk)
    assert reopened.state.partition(1).next_offset == 6


async def test_ack_lost_to_a_full_disk_is_durable_before_it_is_answered(desk, disk, clock):
    """An ack repeated after a full disk writes the cursor that the first try could not."""
    await desk.append(batch(count=10))
    await desk.acquire(1)
    disk.free_space = 10
    with pytest.raises(DiskFullError):
        await desk.ack(1, (0, 5))
    disk.free_space = None
    clock.advance(RETRY_FULL_MS)
    await desk.ack(1, (0, 5))

    assert open_store(disk).state.partition(1).groups["audit"].acked.cursor == 5


async def test_full_disk_across_a_roll_leaves_no_segment(clock):
    """The segments a failed commit had begun are gone, and the log goes on where it was."""
    disk = SimDisk()
    desk = Desk(open_store(disk, clock=clock, segment_bytes=4096), clock)
    await desk.host()
    disk.free_space = 5000
    calls = [desk.append(batch(sequence=20 * n, count=20)) for n in range(20)]
    failed = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in failed} == {DiskFullError}
    assert segment_bases(disk) == [0]

    disk.free_space = None
    clock.advance(RETRY_FULL_MS)
    await asyncio.gather(*(desk.append(batch(sequence=20 * n, count=20)) for n in range(20)))
    assert len(segment_bases(disk)) > 2
    assert open_store(disk).state.partition(1).next_offset == 400


async def test_fence_undone_by_a_full_disk_gives_the_owner_back(desk, disk, clock):
    """A grant that could not be made durable has not happened: the owner before goes on."""
    await desk.acquire(1)
    disk.free_space = 1
    with pytest.raises(DiskFullError):
        await desk.acquire(2, "b" * 16)
    disk.free_space = None

    assert (await desk.ack(1)).cursor == 0
    with pytest.raises(FencedError):
        await desk.ack(1, session="b" * 16)


async def test_faulty_index_never_acks(desk):
    """A fault of our own while committing fails the append as unknown and ends writing."""
    store: Store = desk.store

    def broken(_units: object) -> None:
        raise ZeroDivisionError

    store.queues.dispatch = broken
    with pytest.raises(FlushFailedError):
        await desk.append(batch())
    with pytest.raises(BrokerReadOnlyError):
        await desk.append(batch(sequence=2))


# ── segments ──────────────────────────────────────────────────────────────────────────────────────
async def test_answer_says_fsync(desk):
    """The answer to an append names how durable the batch is."""
    assert (await desk.append(batch())).durable == "fsync"


async def test_segments_are_synced_before_the_next_one_is_created(disk, clock):
    """Every batch that is answered is on the platter, in whichever segment it lies."""
    desk = Desk(open_store(disk, clock=clock, segment_bytes=4096), clock)
    await desk.host()
    for number in range(100):
        await desk.append(batch(sequence=2 * number))
    bases = segment_bases(disk)
    assert len(bases) > 3
    assert all(not disk.contents[segment_path(base)].written for base in bases)
    await desk.store.close()
    assert open_store(disk).state.partition(1).next_offset == 200


# ── room ──────────────────────────────────────────────────────────────────────────────────────────
async def test_full_disk_is_tried_again_when_there_is_room(desk, disk, clock):
    """As long as what did not fit would not fit, nothing is written; with room it goes on by
    itself.
    """
    disk.free_space = 100
    with pytest.raises(DiskFullError):
        await desk.append(batch())
    steps = disk.steps
    for _ in range(3):
        clock.advance(RETRY_FULL_MS)
        assert desk.store.commit.refusal_reason == "the disk is full"
        with pytest.raises(BrokerReadOnlyError):
            await desk.append(batch())
    assert disk.steps == steps
    disk.free_space = 100_000
    clock.advance(RETRY_FULL_MS)
    assert not desk.store.commit.refusal_reason
    assert (await desk.append(batch())).base_offset == 0


async def test_writes_can_be_held_back(desk):
    """Writing that is held back says why, and goes on when it is let go."""
    desk.store.commit.refuse_messages("for a reason")
    assert desk.store.commit.refusal_reason == "for a reason"
    with pytest.raises(BrokerReadOnlyError, match="for a reason"):
        await desk.append(batch())
    desk.store.commit.refuse_messages("")
    assert (await desk.append(batch())).base_offset == 0


async def test_late_record_is_refused_after_a_failed_sync(desk, disk):
    """Nothing is written behind bytes whose sync has failed, also where no room is asked for."""
    await desk.append(batch(count=2))
    await desk.acquire(1)
    disk.failing_operation = "fdatasync"
    with pytest.raises(FlushFailedError):
        await desk.append(batch(sequence=2))
    disk.failing_operation = ""
    partition = desk.store.state.partition(1)
    group = partition.groups["audit"]
    steps: list[str] = []
    disk.on_step = steps.append
    with pytest.raises(BrokerReadOnlyError):
        await desk.store.save_progress(partition, group)
    assert not steps


async def test_record_that_cannot_be_told_of_leaves_the_others_of_its_commit(desk, caplog):
    """Who waits for a record, or what applies it, raises: only that one has an error, and the log
    is written on.
    """
    told: list[object] = []

    def raises(*_args: object) -> None:
        raise ValueError("a fault")

    commit = desk.store.commit
    for ended, on_durable in ((raises, None), (told.append, raises), (told.append, None)):
        commit.add(Entry(encode_body(1, None), partition_id=1, on_durable=on_durable), ended)
    await commit.wait_flushed()
    failed, durable = told
    assert isinstance(failed, FlushFailedError)
    assert durable is None
    assert not commit.has_failed
    assert (await desk.append(batch())).base_offset == 0


# ── copies ────────────────────────────────────────────────────────────────────────────────────────
async def test_append_waits_until_all_copies_have_it(desk):
    """It is written and synced here meanwhile, and neither answered nor readable."""
    commit, log = desk.store.commit, desk.store.log
    commitment = commit.copy_wait.copies = Commitment(frozenset({"a"}))
    woken: list[int] = []
    commit.copy_wait.on_write = lambda: woken.append(log.written_end)
    appending = asyncio.ensure_future(desk.append(batch(sequence=0)))
    await asyncio.sleep(0.01)
    assert not appending.done()
    assert woken == [log.written_end]
    assert log.end < log.written_end
    commitment.synced["a"] = log.written_end - 1
    commit.copy_wait.check()
    await asyncio.sleep(0)
    assert not appending.done()
    commitment.synced["a"] = log.written_end
    commit.copy_wait.check()
    assert (await appending).base_offset == 0
    assert log.end == log.written_end


async def test_copies_read_a_commit_that_waits_for_them(desk):
    """Also one that begins a segment, which a thread writes."""
    commit, log = desk.store.commit, desk.store.log
    commitment = commit.copy_wait.copies = Commitment(frozenset({"a"}))
    read: list[bytes | None] = []

    def send() -> None:
        read.append(log.read_unsynced(log.end + 3, log.written_end - log.end - 3))
        commitment.synced["a"] = log.written_end

    commit.copy_wait.on_write = send
    for begins in (False, True):
        if begins:
            commit._must_begin_segment = True
        start = log.end
        await desk.append(batch(sequence=2 * begins))
        assert read.pop() == log.read(start + 3, log.end - start - 3)


async def test_append_that_waits_for_a_copy_fails_when_the_broker_stops(desk):
    """Its fate is unknown: the copy may have it, and may take the broker's place."""
    commit = desk.store.commit
    commit.copy_wait.copies = Commitment(frozenset({"a"}))
    appending = asyncio.ensure_future(desk.append(batch(sequence=0)))
    await asyncio.sleep(0.01)
    commit.copy_wait.give_up("the broker stops")
    with pytest.raises(FlushFailedError):
        await appending


async def test_commit_that_copies_have_is_decided_before_it_is_durable(desk):
    """A copy that joins meanwhile was not asked for it, and must have it."""
    commit, log = desk.store.commit, desk.store.log
    commitment = commit.copy_wait.copies = Commitment(frozenset({"a"}))
    appending = asyncio.ensure_future(desk.append(batch(sequence=0)))
    await asyncio.sleep(0.01)
    seen: list[tuple[int, int]] = []
    end_write = log.end_write

    def end(plan):
        seen.append((commit.copy_wait.decided_end(log.end), log.end))
        end_write(plan)

    log.end_write = end
    commitment.synced["a"] = log.written_end
    commit.copy_wait.check()
    await appending
    [(decided_end, end_before)] = seen
    assert decided_end == log.end > end_before

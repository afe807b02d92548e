"""Small commits without a thread: when they go that way, what the kernel's sync says, and when the
thread helps.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random

import pytest

from keylane.broker.storage.append_file import SyncNotStartedError
from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.kernel_syncs import KernelSyncs
from keylane.broker.storage.log.commit_log import SMALL_BYTES_MAX
from keylane.broker.store.quick_sync import PAUSE_MS, SLOW_WRITE_MS, KernelQuickSync
from keylane.protocol.errors import BrokerReadOnlyError, FlushFailedError, StorageError
from keylane.rpc.threads.worker_thread import WorkerThread
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store


class SlowSync:
    """Syncs when it is told to; counts what it is given."""

    def __init__(self) -> None:
        self.ready = True
        self.waiting: list[asyncio.Future[None]] = []
        self.writes = 0

    def is_ready(self) -> bool:
        return self.ready

    def write(self, function, /, *args):
        self.writes += 1
        return function(*args)

    def sync(self, file, done) -> None:
        def ended(_told) -> None:
            try:
                file.fdatasync()
            except StorageError as error:
                done(error)
            else:
                done(None)

        self.waiting.append(asyncio.get_running_loop().create_future())
        self.waiting[-1].add_done_callback(ended)


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def quick() -> SlowSync:
    return SlowSync()


@pytest.fixture
async def desk(disk, quick) -> Desk:
    """Its log has a segment, so that the next commit may go without a thread."""
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock, quick=quick, segment_bytes=1 << 20), clock)
    await desk.host()
    return desk


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_append_is_answered_after_the_sync_and_not_before(desk, quick, disk):
    """What is written and not synced is neither acked nor read."""
    syncs = disk.syncs
    appending = asyncio.create_task(desk.append(batch()))
    await turns()
    assert len(quick.waiting) == 1
    assert not appending.done()
    assert desk.store.state.partition(1).readable_offset == 0

    quick.waiting[0].set_result(None)
    answer = await appending

    assert (answer.base_offset, disk.syncs - syncs) == (0, 1)
    assert (await desk.read(0))[0].next_offset == 2


async def test_appends_during_a_sync_share_the_next_one(desk, quick):
    """Nothing is written while a sync is under way, which would not be part of it."""
    first = asyncio.create_task(desk.append(batch()))
    await turns()
    others = [asyncio.create_task(desk.append(batch(sequence=2 * n))) for n in range(1, 6)]
    await turns()
    assert len(quick.waiting) == 1
    quick.waiting[0].set_result(None)
    await first
    await turns()
    assert len(quick.waiting) == 2
    quick.waiting[1].set_result(None)
    assert [(await other).base_offset for other in others] == [2, 4, 6, 8, 10]


async def test_large_commit_goes_to_the_thread(desk, quick):
    """Its copy would hold the event loop."""
    await desk.append(batch(value=b"v" * SMALL_BYTES_MAX))
    assert not quick.waiting


async def test_commit_goes_to_the_thread_while_that_writes(desk, quick):
    """So two never write at once."""
    quick.ready = False
    assert (await desk.append(batch())).base_offset == 0
    assert not quick.waiting


async def test_end_of_a_commit_goes_to_the_thread_if_that_has_begun_to_write(desk, quick):
    """The index is changed by one at a time."""
    writes = quick.writes
    appending = asyncio.create_task(desk.append(batch()))
    await turns()
    quick.ready = False
    quick.waiting[0].set_result(None)
    assert (await appending).base_offset == 0
    assert quick.writes - writes == 1


async def test_commit_that_begins_a_segment_goes_to_the_thread(disk, quick):
    """It creates files, and syncs the folder."""
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock, quick=quick, segment_bytes=4096), clock)
    await desk.host()
    quick.ready = False
    await desk.append(batch(value=b"v" * 1500))
    quick.ready = True
    assert (await desk.append(batch(sequence=2, value=b"v" * 1500))).base_offset == 2
    assert not quick.waiting
    assert len(desk.store.log.bases) == 2


async def test_commit_of_the_index_of_a_library_goes_to_the_thread(disk, quick, tmp_path):
    """RocksDB may wait for its own disk."""
    files = RealFiles(str(tmp_path))
    files.lock()
    clock = ManualClock()
    desk = Desk(open_store(files, clock=clock, quick=quick, index="rocksdb"), clock)
    await desk.host()
    await desk.append(batch())
    assert not quick.waiting
    await desk.store.close()
    files.close()


async def test_failed_sync_ends_writing_with_an_unknown_outcome(desk, quick, disk):
    """A second sync might succeed and say nothing of what the first one lost."""
    appending = asyncio.create_task(desk.append(batch()))
    await turns()
    disk.failing_operation = "fdatasync"
    quick.waiting[0].set_result(None)
    with pytest.raises(FlushFailedError):
        await appending
    disk.failing_operation = ""
    assert desk.store.commit.has_failed
    assert desk.store.state.partition(1).next_offset == 0


async def test_cancelled_commit_of_the_thread_is_the_last_one(desk, quick):
    """Its bytes may be in the file, and may be durable or not."""
    quick.ready = False
    writing = asyncio.get_running_loop().create_future()
    desk.store.commit._run_blocking = lambda _function, *_args: writing
    appending = asyncio.create_task(desk.append(batch()))
    await turns()
    writing.cancel()
    with pytest.raises(FlushFailedError):
        await appending
    with pytest.raises(BrokerReadOnlyError):
        await desk.append(batch(sequence=2))


async def test_commit_goes_on_when_the_sync_ends_at_once(desk, quick, monkeypatch):
    """A queue of the kernel may say so before `sync` returns."""
    monkeypatch.setattr(quick, "sync", lambda _file, done: done(None))
    offsets = [(await desk.append(batch(sequence=2 * number))).base_offset for number in range(3)]
    assert offsets == [0, 2, 4]
    await desk.store.commit.close()


async def test_fault_of_what_is_told_leaves_the_next_commits(desk, quick, monkeypatch):
    """It is a bug of ours, which the event loop logs; what is appended behind it is still
    written.
    """
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, told: faults.append(told))
    monkeypatch.setattr(desk.store.commit, "on_commit", [lambda: 1 // 0])
    first = asyncio.create_task(desk.append(batch()))
    await turns()
    quick.waiting[-1].set_result(None)
    assert (await first).base_offset == 0
    monkeypatch.undo()
    second = asyncio.create_task(desk.append(batch(sequence=2)))
    await turns()
    quick.waiting[-1].set_result(None)
    assert (await second).base_offset == 2
    assert [type(told["exception"]) for told in faults] == [ZeroDivisionError]


async def test_commit_goes_to_the_thread_while_the_index_is_copied(desk, quick):
    """The event loop does not wait for a lock."""
    with desk.store.queues._lock:
        assert not desk.store.queues.dispatches_in_memory
    await turns()
    assert desk.store.queues.dispatches_in_memory


async def test_full_disk_refuses_a_small_commit_and_leaves_a_whole_log(desk, quick, disk):
    """The torn record is cut off before the next commit is written behind it."""
    disk.free_space = 40
    with pytest.raises(Exception, match="No space left"):
        await desk.append(batch())
    disk.free_space = None
    desk.clock.advance(2_000)
    appending = asyncio.create_task(desk.append(batch()))
    await turns()
    for future in quick.waiting:
        future.set_result(None)
    await appending
    reopened = open_store(disk.disk_after_crash(random.Random(1)))
    assert reopened.state.partition(1).readable_offset == 2


# ── the kernel ────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
async def real(tmp_path):
    """The way by the kernel, its thread and clock, and a file."""
    thread, clock = WorkerThread("commit"), ManualClock()
    quick = KernelQuickSync(KernelSyncs(), thread, clock)
    files = RealFiles(str(tmp_path))
    files.lock()
    file = files.open_append("log")
    yield quick, thread, clock, file
    quick.close()
    file.close()
    files.close()
    thread.close()


async def until_synced(quick: KernelQuickSync, file) -> None:
    """Sync a file, and wait for it."""
    ended = asyncio.get_running_loop().create_future()
    quick.sync(file, lambda error: ended.set_exception(error) if error else ended.set_result(None))
    await ended


async def test_kernel_syncs_a_file(real):
    """Many in turn; the event loop goes on meanwhile."""
    quick, _thread, _clock, file = real
    for number in range(50):
        file.append([b"%d\n" % number])
        await until_synced(quick, file)
    assert file.size == sum(len(b"%d\n" % number) for number in range(50))
    assert quick.is_ready()


async def test_kernel_that_takes_no_sync_leaves_all_further_ones_to_the_thread(real, monkeypatch):
    """As kernels and sandboxes without io_submit do; nothing failed, so the thread may sync."""
    quick, _thread, _clock, file = real
    synced = []
    monkeypatch.setattr(file, "fdatasync", lambda: synced.append(True))

    def refuse(_descriptor, _done, _error_of):
        raise OSError(errno.ENOSYS, "no")

    monkeypatch.setattr(quick._syncs, "begin", refuse)
    await until_synced(quick, file)
    assert synced == [True]
    assert not quick.is_ready()


async def test_cancelled_sync_of_the_thread_is_a_failed_flush(real, monkeypatch):
    """What it has made durable is not known; without this error the commit would have no end."""
    quick, _thread, _clock, file = real

    def refuse(_descriptor, _done, _error_of):
        raise OSError(errno.ENOSYS, "no")

    def begin(_function):
        syncing.append(asyncio.get_running_loop().create_future())
        return syncing[0]

    syncing: list[asyncio.Future[None]] = []
    monkeypatch.setattr(quick._syncs, "begin", refuse)
    monkeypatch.setattr(quick, "_thread", begin)
    ending = asyncio.create_task(until_synced(quick, file))
    await turns()
    syncing[0].cancel()
    async with asyncio.timeout(5):
        with pytest.raises(FlushFailedError, match="cancelled"):
            await ending


async def test_sync_of_a_file_that_cannot_be_synced_is_refused_and_not_failed(real):
    """A pipe has no sync: EINVAL says that none has begun."""
    quick, _thread, _clock, file = real
    reader, writer = os.pipe()
    told = []
    file._descriptor, kept = writer, file._descriptor
    try:
        file.begin_sync(quick._syncs, told.append)
        quick._syncs.collect()
    except SyncNotStartedError as error:
        told.append(error)
    finally:
        file._descriptor = kept
        os.close(reader)
        os.close(writer)
    assert [type(error) for error in told] == [SyncNotStartedError]


async def test_error_of_the_kernels_sync_is_a_failed_flush(real, monkeypatch):
    """EIO is told once, and never tried again."""
    quick, _thread, _clock, file = real
    monkeypatch.setattr(
        quick._syncs, "begin", lambda _file, done, error_of: done(error_of(errno.EIO))
    )
    with pytest.raises(FlushFailedError, match="Input/output error"):
        await until_synced(quick, file)


async def test_slow_write_sends_commits_to_the_thread_for_a_while(real):
    """The machine has more to write than its disk takes: a write to memory waits then."""
    quick, _thread, clock, _file = real
    quick.write(lambda: clock.advance(SLOW_WRITE_MS))
    assert not quick.is_ready()
    clock.advance(PAUSE_MS)
    assert quick.is_ready()
    quick.write(lambda: None)
    assert quick.is_ready()


async def test_commits_wait_for_the_thread_until_its_function_has_ended(real):
    """Also one whose caller has forgotten it."""
    quick, thread, _clock, _file = real
    running = thread(in_place_sync)
    assert not quick.is_ready()
    await running
    assert quick.is_ready()
    forgotten = thread(in_place_sync)
    forgotten.cancel()
    assert not quick.is_ready()
    async with asyncio.timeout(5):
        while not quick.is_ready():
            await asyncio.sleep(0.001)


def in_place_sync() -> None:
    """A function of the thread."""

"""What a copy serves: messages that no promotion cuts away, over restarts, retention and damage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from keylane.broker.copies import folding
from keylane.broker.copies.copy_reads import CopyReads
from keylane.broker.copies.folding import Folding
from keylane.broker.metrics import collect_copy_reads
from keylane.broker.storage.files import Files
from keylane.broker.storage.log.commit_log import segment_path
from keylane.broker.storage.log.log_reader import read_segment_headers
from keylane.broker.store.agenda import EmptyAgenda
from keylane.protocol.errors import (
    CorruptIndexError,
    InvalidRequestError,
    WrongBrokerError,
)
from keylane.protocol.frames import Batches, Read, Release
from keylane.protocol.record import Kind
from keylane.testing.machines.disk import SimDisk, disk_of
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, in_place, open_store
from support.cluster import eventually

SEGMENT_BYTES = 4_096
COUNT = 100
BYTES_MAX = 600
"""A few batches."""


class CopiedFolder:
    """A broker's log with messages of two partitions in turn, and the folder of a copy of it."""

    def __init__(self) -> None:
        self.clock, self.disk = ManualClock(), SimDisk()
        self.desk = Desk(
            open_store(self.disk, clock=self.clock, segment_bytes=SEGMENT_BYTES), self.clock
        )
        self.sequences = {1: 0, 2: 0}

    async def send(self, count: int) -> None:
        for number in range(count):
            partition_id = 1 + number % 2
            data = batch(partition_id=partition_id, sequence=self.sequences[partition_id])
            await self.desk.append(data, partition_id)
            self.sequences[partition_id] += 2

    def folder(self) -> SimDisk:
        """Return a folder that has the log, and nothing that the broker has made of it."""
        return disk_of(self.segments())

    def segments(self) -> dict[str, bytes]:
        paths = [segment_path(base) for base in self.bases]
        return {path: self.disk.pread(path, 0, SEGMENT_BYTES) for path in paths}

    @property
    def bases(self) -> list[int]:
        return self.desk.store.log.bases

    @property
    def end(self) -> int:
        return self.desk.store.log.end

    def copy(self, folder: SimDisk | None = None) -> Copy:
        return Copy(self.folder() if folder is None else folder, self.clock)

    async def check_equal(self, copy: Copy, *, upto: int = 2 * COUNT) -> None:
        """Check that the copy answers what the broker answers, from every offset below `upto`."""
        for partition_id in (1, 2):
            for offset in range(self.desk.store.state.partition(partition_id).first_offset, upto):
                answer, data = await copy.read(partition_id, offset)
                said, stored = await self.desk.ask(Read(partition_id, offset, BYTES_MAX))
                assert data == stored[: len(data)]
                assert offset < answer.upto <= said.upto
                assert (answer.first_offset, answer.sealed) == (said.first_offset, False)
            with pytest.raises(WrongBrokerError):
                await copy.read(partition_id, upto)


class Copy:
    """A copy that serves reads. What is durable is set by hand."""

    def __init__(self, folder: SimDisk, clock: ManualClock) -> None:
        self.durable: tuple[Sequence[int], int] = (), -1
        self.folding = Folding(
            folder, "file", make_agenda=EmptyAgenda, clock=clock, run_blocking=in_place
        )
        self.reads = CopyReads(
            folder,
            lambda: self.durable,
            lambda: self.folding.queues,
            broker_group="g1",
            run_read=in_place,
        )

    def apply(self, bases: Sequence[int], end: int) -> None:
        self.durable = bases, end
        while self.folding._fold(bases, end):
            pass

    async def read(
        self, partition_id: int, offset: int, bytes_max: int = BYTES_MAX
    ) -> tuple[Batches, bytes]:
        read = Read(partition_id, offset, bytes_max)
        answer, data = await self.reads.handle(read, memoryview(b""))
        assert isinstance(answer, Batches)
        return answer, bytes(data)


@pytest.fixture
async def copied() -> CopiedFolder:
    copied = CopiedFolder()
    await copied.desk.host(1)
    await copied.desk.host(2)
    await copied.send(COUNT)
    return copied


def record_ends(files: Files, copied: CopiedFolder) -> list[int]:
    return [
        header.position + header.length
        for base in copied.bases
        for header in read_segment_headers(files, base)
    ]


@pytest.mark.parametrize("folded_bytes", [400, 5_000, 1 << 20])
async def test_copy_answers_what_its_broker_answers(
    copied: CopiedFolder, monkeypatch: pytest.MonkeyPatch, folded_bytes: int
):
    """However much of the log is applied at once."""
    monkeypatch.setattr(folding, "FOLDED_BYTES", folded_bytes)
    assert len(copied.bases) > 3
    copy = copied.copy()
    copy.apply(copied.bases, copied.end)
    await copied.check_equal(copy, upto=COUNT)


async def test_copy_serves_nothing_above_what_is_durable_at_the_broker(copied: CopiedFolder):
    """The folder has it already."""
    folder = copied.folder()
    copy = copied.copy(folder)
    copy.apply((), -1)
    with pytest.raises(WrongBrokerError):
        await copy.read(1, 0)
    ends = record_ends(folder, copied)
    for end in (ends[50], ends[51], ends[70]):
        copy.apply(copied.bases, end)
        upto = {1: 0, 2: 0}
        for base in copied.bases:
            for header in read_segment_headers(folder, base):
                if header.kind == Kind.MESSAGES and header.position + header.length <= end:
                    upto[header.partition_id] = header.next_offset
        for partition_id, first_missing in upto.items():
            answer, _ = await copy.read(partition_id, first_missing - 1, 1)
            assert answer.next_offset == first_missing
            with pytest.raises(WrongBrokerError):
                await copy.read(partition_id, first_missing)


@pytest.mark.parametrize("is_closed", [True, False])
async def test_copy_serves_again_after_a_restart(copied: CopiedFolder, is_closed: bool):
    """Also if it was killed."""
    folder = copied.folder()
    copy = copied.copy(folder)
    copy.apply(copied.bases, copied.end)
    if is_closed:
        copy.folding.close()
    await copied.send(COUNT)
    for path, data in copied.segments().items():
        if folder.size(path) is not None:
            folder.remove(path)
        folder.open_append(path).append([data])
    copy = copied.copy(folder)
    copy.apply(copied.bases, copied.end)
    await copied.check_equal(copy, upto=COUNT + COUNT)


async def test_copy_serves_no_offset_that_was_removed_with_its_segment(copied: CopiedFolder):
    copy = copied.copy()
    copy.apply(copied.bases, copied.end)
    copy.apply(copied.bases[2:], copied.end)
    assert copy.folding.queues is not None
    bounds = copy.folding.queues.bounds(1)
    assert bounds is not None
    assert bounds[0] > 0
    with pytest.raises(WrongBrokerError):
        await copy.read(1, bounds[0] - 1)
    assert (await copy.read(1, bounds[0]))[0].first_offset == bounds[0]


@pytest.mark.parametrize("is_begun_again", [True, False])
async def test_copy_serves_the_rest_when_the_log_between_was_removed(
    copied: CopiedFolder, is_begun_again: bool
):
    """The copy was begun again, or retention was quicker than what applies the log."""
    folder = copied.folder()
    copy = copied.copy(folder)
    copy.apply(copied.bases, copied.bases[2])
    if is_begun_again:
        copy.folding.begin_anew()
        copy.apply((), -1)
        with pytest.raises(WrongBrokerError):
            await copy.read(1, 0)
    for base in copied.bases[:3]:
        folder.remove(segment_path(base))
    copy.apply(copied.bases[3:], copied.end)
    assert copy.folding.queues is not None
    bounds = copy.folding.queues.bounds(1)
    assert bounds is not None
    assert bounds[0] > 0
    _, data = await copy.read(1, bounds[0])
    assert data == (await copied.desk.ask(Read(1, bounds[0], BYTES_MAX)))[1][: len(data)]


async def test_broker_begins_with_the_log_when_what_follows_the_applied_state_was_removed(
    copied: CopiedFolder,
):
    """Otherwise it would find a hole."""
    folder = copied.folder()
    copy = copied.copy(folder)
    copy.apply(copied.bases, copied.bases[2])
    for base in copied.bases[:3]:
        folder.remove(segment_path(base))
    assert await copy.folding.finish() is None


async def test_copy_serves_what_was_applied_before_its_index_failed(
    copied: CopiedFolder, monkeypatch: pytest.MonkeyPatch
):
    """A broker that starts on the folder makes the index again."""
    copy = copied.copy()
    copy.apply(copied.bases, copied.bases[2])
    assert copy.folding.queues is not None

    def fail(*_: object) -> None:
        raise CorruptIndexError("a block is damaged")

    with monkeypatch.context() as patched:
        patched.setattr(copy.folding.queues, "dispatch", fail)
        copy.apply(copied.bases, copied.end)
    _, data = await copy.read(1, 0)
    assert data == (await copied.desk.ask(Read(1, 0, BYTES_MAX)))[1][: len(data)]
    assert await copy.folding.finish() is None
    assert copy.folding.queues is None


async def test_damaged_message_is_not_served(copied: CopiedFolder):
    """Nor what comes after it; a client asks the broker for it."""
    position = record_ends(copied.folder(), copied)[60]
    base = max(each for each in copied.bases if each <= position)
    segments = copied.segments()
    damaged = bytearray(segments[segment_path(base)])
    damaged[position - base + 100] ^= 1
    copy = copied.copy(disk_of(segments | {segment_path(base): bytes(damaged)}))
    copy.apply(copied.bases, copied.end)
    served = 0
    for partition_id in (1, 2):
        for offset in range(COUNT):
            try:
                _, data = await copy.read(partition_id, offset)
            except WrongBrokerError:
                continue
            served += 1
            stored = (await copied.desk.ask(Read(partition_id, offset, BYTES_MAX)))[1]
            assert data == stored[: len(data)]
    assert COUNT < served < 2 * COUNT


async def test_copy_answers_reads_and_refuses_everything_else(copied: CopiedFolder):
    copy = copied.copy()
    task = asyncio.ensure_future(copy.folding.run(lambda: copy.durable))
    with pytest.raises(WrongBrokerError):
        await copy.read(1, 0)
    copy.durable = copied.bases, copied.end
    await eventually(lambda: copy.folding.queues is not None)
    _, data = await copy.read(1, 0)
    assert data == (await copied.desk.ask(Read(1, 0, BYTES_MAX)))[1]
    with pytest.raises(WrongBrokerError, match="only serves reads"):
        await copy.reads.handle(Release(1, "g", "s", 1), memoryview(b""))
    for wrong in (Read(1, -1, 100), Read(1, 0, 0)):
        with pytest.raises(InvalidRequestError):
            await copy.reads.handle(wrong, memoryview(b""))
    [metric] = await collect_copy_reads(copy.reads)
    assert metric.samples[0].value == len(data)
    task.cancel()
    await asyncio.wait((task,))

"""What a copy serves: messages that no promotion cuts away, over restarts, retention and damage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from keylane.broker.copies import copied_batches
from keylane.broker.copies.copied_batches import CopiedBatches
from keylane.broker.copies.copy_reads import CopyReads
from keylane.broker.metrics import collect_copy_reads
from keylane.broker.storage.files import Files
from keylane.broker.storage.log.commit_log import segment_path
from keylane.broker.storage.log.log_reader import read_segment_headers
from keylane.protocol.errors import (
    CorruptIndexError,
    CorruptLogError,
    InvalidRequestError,
    WrongBrokerError,
)
from keylane.protocol.frames import Read, Release
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

    async def check_equal(self, batches: CopiedBatches, *, upto: int = 2 * COUNT) -> None:
        """Check that the copy answers what the broker answers, from every offset below `upto`."""
        for partition_id in (1, 2):
            for offset in range(self.desk.store.state.partition(partition_id).first_offset, upto):
                answer, data = batches.read(partition_id, offset, BYTES_MAX)
                said, stored = await self.desk.ask(Read(partition_id, offset, BYTES_MAX))
                assert data == stored[: len(data)]
                assert offset < answer.upto <= said.upto
                assert (answer.first_offset, answer.sealed) == (said.first_offset, False)
            with pytest.raises(WrongBrokerError):
                batches.read(partition_id, upto, BYTES_MAX)


@pytest.fixture
async def copied() -> CopiedFolder:
    copied = CopiedFolder()
    await copied.desk.host(1)
    await copied.desk.host(2)
    await copied.send(COUNT)
    return copied


def advance(batches: CopiedBatches, bases: Sequence[int], end: int) -> None:
    while batches.advance(bases, end):
        pass


def record_ends(files: Files, copied: CopiedFolder) -> list[int]:
    return [
        header.position + header.length
        for base in copied.bases
        for header in read_segment_headers(files, base)
    ]


@pytest.mark.parametrize("step_bytes", [400, 5_000, 1 << 20])
async def test_copy_answers_what_its_broker_answers(
    copied: CopiedFolder, monkeypatch: pytest.MonkeyPatch, step_bytes: int
):
    """However much of the log is indexed at once."""
    monkeypatch.setattr(copied_batches, "STEP_BYTES", step_bytes)
    assert len(copied.bases) > 3
    batches = CopiedBatches(copied.folder(), "file")
    for _ in range(copied.end // 100):
        batches.advance(copied.bases, copied.end)
    assert batches.position == copied.end
    await copied.check_equal(batches, upto=COUNT)


async def test_copy_serves_nothing_above_what_is_durable_at_the_broker(copied: CopiedFolder):
    """The folder has it already."""
    folder = copied.folder()
    batches = CopiedBatches(folder, "file")
    with pytest.raises(WrongBrokerError):
        batches.read(1, 0, BYTES_MAX)
    assert not batches.advance((), -1)
    ends = record_ends(folder, copied)
    for end in (ends[50], ends[51], ends[70]):
        advance(batches, copied.bases, end)
        assert batches.position == end
        upto = {1: 0, 2: 0}
        for base in copied.bases:
            for header in read_segment_headers(folder, base):
                if header.kind == Kind.MESSAGES and header.position + header.length <= end:
                    upto[header.partition_id] = header.next_offset
        for partition_id, first_missing in upto.items():
            assert batches.read(partition_id, first_missing - 1, 1)[0].next_offset == first_missing
            with pytest.raises(WrongBrokerError):
                batches.read(partition_id, first_missing, BYTES_MAX)


@pytest.mark.parametrize("is_closed", [True, False])
async def test_copy_goes_on_with_its_index_after_a_restart(copied: CopiedFolder, is_closed: bool):
    """Also if it was killed, or has cut its log since, which is never below what was served."""
    folder = copied.folder()
    batches = CopiedBatches(folder, "file")
    advance(batches, copied.bases, copied.end)
    if is_closed:
        batches.close()
    await copied.send(COUNT)
    for path, data in copied.segments().items():
        if folder.size(path) is not None:
            folder.remove(path)
        folder.open_append(path).append([data])
    batches = CopiedBatches(folder, "file")
    advance(batches, copied.bases, copied.end)
    await copied.check_equal(batches, upto=COUNT + COUNT)


async def test_copy_serves_no_offset_that_was_removed_with_its_segment(copied: CopiedFolder):
    batches = CopiedBatches(copied.folder(), "file")
    advance(batches, copied.bases, copied.end)
    kept = copied.bases[2:]
    advance(batches, kept, copied.end)
    first = batches._queues.bounds(1)[0]
    assert first > 0
    with pytest.raises(WrongBrokerError):
        batches.read(1, first - 1, BYTES_MAX)
    assert batches.read(1, first, BYTES_MAX)[0].first_offset == first


async def test_index_begins_anew_when_the_copy_does(copied: CopiedFolder):
    """The broker has removed what would have come next."""
    folder = copied.folder()
    batches = CopiedBatches(folder, "file")
    advance(batches, copied.bases, copied.bases[2])
    later = copied.bases[3:]
    advance(batches, later, copied.end)
    first = batches._queues.bounds(1)[0]
    assert first > 0
    data = batches.read(1, first, BYTES_MAX)[1]
    assert data == (await copied.desk.ask(Read(1, first, BYTES_MAX)))[1][: len(data)]


async def test_index_begins_anew_when_it_is_damaged(
    copied: CopiedFolder, monkeypatch: pytest.MonkeyPatch
):
    batches = CopiedBatches(copied.folder(), "file")
    advance(batches, copied.bases, copied.bases[2])

    def fail(*_: object) -> None:
        raise CorruptIndexError("a block is damaged")

    with monkeypatch.context() as patched:
        patched.setattr(batches._queues, "dispatch", fail)
        with pytest.raises(CorruptIndexError):
            batches.advance(copied.bases, copied.end)
    advance(batches, copied.bases, copied.end)
    await copied.check_equal(batches, upto=COUNT)


async def test_damaged_message_is_not_served(copied: CopiedFolder):
    """Those behind it are; a client asks the broker for it."""
    folder = copied.folder()
    position = record_ends(folder, copied)[60]
    base = max(each for each in copied.bases if each <= position)
    segments = copied.segments()
    data = bytearray(segments[segment_path(base)])
    data[position - base + 100] ^= 1
    batches = CopiedBatches(disk_of(segments | {segment_path(base): bytes(data)}), "file")
    advance(batches, copied.bases, copied.end)
    damaged = 0
    for partition_id in (1, 2):
        for offset in range(COUNT):
            try:
                data = batches.read(partition_id, offset, BYTES_MAX)[1]
            except CorruptLogError:
                damaged += 1
            else:
                stored = (await copied.desk.ask(Read(partition_id, offset, BYTES_MAX)))[1]
                assert data == stored[: len(data)]
    assert damaged == 2, "the messages of one batch"


class Served:
    """The reads of a copy."""

    def __init__(self, copied: CopiedFolder) -> None:
        self.durable: tuple[Sequence[int], int] = (), -1
        self.batches = CopiedBatches(copied.folder(), "file")
        self.reads = CopyReads(
            self.batches,
            lambda: self.durable,
            broker_group="g1",
            run_read=in_place,
            run_index=in_place,
            clock=copied.clock,
        )


async def test_copy_answers_reads_and_refuses_everything_else(copied: CopiedFolder):
    served = Served(copied)
    task = asyncio.ensure_future(served.reads.run())
    read = Read(1, 0, BYTES_MAX)
    with pytest.raises(WrongBrokerError):
        await served.reads.handle(read, memoryview(b""))
    served.durable = copied.bases, copied.end
    await eventually(lambda: served.batches.position == copied.end)
    _, data = await served.reads.handle(read, memoryview(b""))
    assert data == (await copied.desk.ask(read))[1]
    with pytest.raises(WrongBrokerError, match="only serves reads"):
        await served.reads.handle(Release(1, "g", "s", 1), memoryview(b""))
    for wrong in (Read(1, -1, 100), Read(1, 0, 0)):
        with pytest.raises(InvalidRequestError):
            await served.reads.handle(wrong, memoryview(b""))
    [metric] = await collect_copy_reads(served.reads)
    assert metric.samples[0].value == len(data)
    task.cancel()
    await asyncio.wait((task,))

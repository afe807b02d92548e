"""Recovery: a torn tail is cut, damage never is, and what remains is exactly what was there."""

from __future__ import annotations

import asyncio
import copy
import random

import crc32c
import pytest

from keylane.broker.storage.log.commit_log import segment_bases, segment_path
from keylane.broker.storage.log.trail import trail_bases, trail_path
from keylane.protocol.batch import batch_starts
from keylane.protocol.errors import CorruptLogError, DataFolderError
from keylane.protocol.record import HEADER_BYTES
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store


def written(
    count: int = 6, *, together: bool = False, segment_bytes: int = 1 << 20
) -> tuple[SimDisk, list[bytes]]:
    """A disk with a partition and `count` batches, each in a commit of its own or all in one."""
    disk, clock = SimDisk(), ManualClock()
    sent = [batch(sequence=2 * number) for number in range(count)]

    async def fill() -> None:
        desk = Desk(open_store(disk, clock=clock, segment_bytes=segment_bytes), clock)
        await desk.host()
        if together:
            await asyncio.gather(*map(desk.append, sent))
        else:
            for data in sent:
                await desk.append(data)

    asyncio.run(fill())
    return disk, sent


def copy_of(disk: SimDisk, path: str, data: bytes) -> SimDisk:
    """Another disk with the same files, but one."""
    copied = copy.deepcopy(disk)
    copied.contents[path].data[:] = data
    copied.contents[path].sync()
    return copied


def untold(disk: SimDisk) -> SimDisk:
    """Another disk without the trail, as after a commit whose sync never ran."""
    copied = copy.deepcopy(disk)
    for base in trail_bases(copied):
        copied.remove(trail_path(base))
    return copied


async def read_all(desk: Desk) -> tuple[list[bytes], CorruptLogError | None]:
    """The bodies of partition 1 from the first offset on, and what stopped the reading."""
    read: list[bytes] = []
    if 1 not in desk.store.state.partitions:
        return read, None
    offset = 0
    while True:
        try:
            answer, payload = await desk.read(offset)
        except CorruptLogError as error:
            return read, error
        if answer.upto == offset:
            return read, None
        read += [
            payload[at + HEADER_BYTES : at + header.length] for at, header in batch_starts(payload)
        ]
        offset = answer.upto


def stored(disk: SimDisk) -> list[bytes]:
    """The bodies of partition 1, all of them whole."""
    clock = ManualClock()
    read, problem = asyncio.run(read_all(Desk(open_store(disk, clock=clock), clock)))
    assert problem is None
    return read


def stopped(disk: SimDisk) -> tuple[list[bytes], int]:
    """The bodies of partition 1 up to where it is damaged, and the position of that; it takes no
    messages.
    """

    async def look() -> tuple[list[bytes], int]:
        clock = ManualClock()
        desk = Desk(open_store(disk, clock=clock), clock)
        read, problem = await read_all(desk)
        assert problem is not None
        with pytest.raises(CorruptLogError):
            await desk.append(batch(sequence=10_000))
        assert desk.store.state.problems
        return read, problem.details["position"]

    return asyncio.run(look())


def bodies(sent: list[bytes]) -> list[bytes]:
    return [data[HEADER_BYTES:] for data in sent]


PATH = segment_path(0)


EVERY = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.whole)])
"""`make test` tries every seventh byte or bit, and the bytes beside the ends of records."""


def sizes_of(ends: list[int], first: int, last: int, every: int) -> list[int]:
    """Sizes from `first` to `last` to cut a log to."""
    edges = {end + step for end in ends for step in (-1, 0, 1)}
    return sorted({*range(first, last + 1, every), *(edges & set(range(first, last + 1)))})


@EVERY
def test_log_cut_at_any_byte_keeps_every_whole_record(every):
    """Truncated at every byte of its last records, none of them known to be durable, the log starts
    with the whole ones.
    """
    disk, sent = written(3)
    data = bytes(disk.contents[PATH].data)
    ends = [len(data) - sum(map(len, sent[index + 1 :])) for index in range(len(sent))]
    first = ends[0] - len(sent[0])
    for size in sizes_of(ends, first, len(data), every):
        hurt = untold(copy_of(disk, PATH, data[:size]))
        whole = sum(end <= size for end in ends)
        assert stored(hurt) == bodies(sent[:whole]), size
        assert hurt.size(PATH) == (ends[whole - 1] if whole else first)


@EVERY
def test_durable_records_are_never_cut_off_the_end(every):
    """A log cut at any byte of records that the trail knows to be durable: they are missed, loudly,
    and nothing else.
    """
    disk, sent = written(3)
    data = bytes(disk.contents[PATH].data)
    ends = [len(data) - sum(map(len, sent[index + 1 :])) for index in range(len(sent))]
    for size in sizes_of(ends, ends[0] - len(sent[0]), len(data) - 1, every):
        hurt = copy_of(disk, PATH, data[:size])
        whole = sum(end <= size for end in ends)
        read, position = stopped(hurt)
        assert read == bodies(sent[:whole]), size
        assert position == ends[whole] - len(sent[whole])
        assert hurt.size(PATH) == size
        assert stopped(hurt) == (read, position)  # and at every start after it


@EVERY
def test_every_flipped_bit_of_the_last_record_cuts_it(every):
    """A last record with any bit damaged, not known to be durable, is cut; the records before it
    are kept.
    """
    disk, sent = written(2)
    data = bytes(disk.contents[PATH].data)
    for bit in range(0, 8 * len(sent[-1]), every):
        hurt = bytearray(data)
        at = len(data) - len(sent[-1]) + bit // 8
        hurt[at] ^= 1 << bit % 8
        assert stored(untold(copy_of(disk, PATH, bytes(hurt)))) == bodies(sent[:-1]), bit


@pytest.mark.parametrize("trail", [True, False])
def test_damage_before_durable_records_is_never_cut(trail):
    """A damaged record with a later commit behind it stops the partition there, by position, and
    changes no byte.
    """
    disk, sent = written(4)
    data = bytes(disk.contents[PATH].data)
    start = len(data) - sum(map(len, sent[1:]))
    rng = random.Random(1)
    for _ in range(200):
        hurt = bytearray(data)
        hurt[start + rng.randrange(len(sent[1]))] ^= 1 << rng.randrange(8)
        broken = copy_of(disk, PATH, bytes(hurt))
        broken = broken if trail else untold(broken)
        assert stopped(broken) == (bodies(sent[:1]), start)
        assert bytes(broken.contents[PATH].data) == bytes(hurt)


@pytest.mark.parametrize("what", ["zeros", "missing", "twice", "swapped"])
def test_blocks_that_are_not_where_they_belong_are_found(what):
    """Zeroed, lost, doubled or exchanged records in the middle are damage."""
    disk, sent = written(5)
    data = bytes(disk.contents[PATH].data)
    size = len(sent[0])
    first = len(data) - 4 * size
    left, right = data[first : first + size], data[first + size : first + 2 * size]
    middle = {
        "zeros": bytes(size) + right,
        "missing": right,
        "twice": left + left + right,
        "swapped": right + left,
    }
    broken = copy_of(disk, PATH, data[:first] + middle[what] + data[first + 2 * size :])
    kept = 2 if what == "twice" else 1
    assert stopped(broken)[0] == bodies(sent[:kept])
    if what in {"missing", "twice"}:
        # What follows is at a wrong position, so nothing behind is whole where it is: without a
        # trail, a torn tail.
        broken = copy_of(disk, PATH, data[:first] + middle[what] + data[first + 2 * size :])
        assert stored(untold(broken)) == bodies(sent[:kept])


def test_hole_in_a_commit_that_never_finished_is_cut():
    """An unfinished commit may lack any record; its whole records behind the hole were never acked,
    and are kept aside.
    """
    disk, sent = written(1)
    before = bytes(disk.contents[PATH].data)
    other, more = written(5, together=True)
    data = bytes(other.contents[PATH].data)
    assert data.startswith(before[: len(before) - len(sent[0])])
    start = len(data) - sum(map(len, more[1:]))
    hurt = data[:start] + bytes(len(more[1])) + data[start + len(more[1]) :]
    broken = untold(copy_of(other, PATH, hurt))

    assert stored(broken) == bodies(more[:1])
    assert broken.size(PATH) == start
    kept = [name for name in broken.list() if name.startswith("cut-")]
    assert len(kept) == 1
    assert bytes(broken.contents[kept[0]].data) == hurt[start:]


def test_damaged_or_missing_older_segment_is_never_cut():
    """At damage in a segment that is not the last, or between two segments, reading stops, and no
    byte changes.
    """
    disk, sent = written(60, segment_bytes=4096)
    bases = segment_bases(disk)
    assert len(bases) > 2
    older = segment_path(bases[1])
    data = bytes(disk.contents[older].data)
    before = stored(copy.deepcopy(disk))
    assert before == bodies(sent)
    for hurt in (data[:-1], data[:-200], b"", bytes(len(data))):
        broken = copy_of(disk, older, hurt)
        read, position = stopped(broken)
        assert read == before[: len(read)]
        assert bases[1] <= position < bases[2]
        assert bytes(broken.contents[older].data) == hurt
    lost = copy.deepcopy(disk)
    lost.remove(older)
    assert stopped(lost)[1] == bases[1]
    assert stored(copy_of(disk, older, data + b"x")) == bodies(sent)


def test_other_files_in_the_log_folder_are_left_alone():
    """Names that are no segment's are neither read nor removed."""
    disk, sent = written(2)
    for name in ("log/notes.txt", "log/1.log", "log/" + "x" * 20 + ".log"):
        disk.open_append(name).append([b"not ours"])
    assert stored(disk) == bodies(sent)
    assert len(disk.list("log")) == 5


@pytest.mark.parametrize("stop", ["clean", "crash"])
@pytest.mark.parametrize("hurt", [None, b"", b"garbage" * 100, bytes(64)])
def test_damaged_index_is_rebuilt(hurt, stop):
    """The index is derived: deleted, damaged or stale, it comes back from the log."""
    disk, sent = written(300)

    async def end() -> None:
        store = open_store(disk)
        await store.close()

    if stop == "clean":
        asyncio.run(end())
        assert disk.list("index")
    for name in disk.list("index"):
        other = copy.deepcopy(disk)
        if hurt is None:
            other.remove(f"index/{name}")
        else:
            other.contents[f"index/{name}"].data[:] = hurt
        assert stored(other) == bodies(sent)


def test_segment_size_may_change_between_starts():
    """A log written with one segment size is read and continued with another."""
    disk, sent = written(30, segment_bytes=4096)
    clock = ManualClock()

    async def go_on() -> None:
        desk = Desk(open_store(disk, clock=clock, segment_bytes=8192), clock)
        for number in range(30, 90):
            sent.append(batch(sequence=2 * number))
            await desk.append(sent[-1])

    asyncio.run(go_on())
    assert stored(disk) == bodies(sent)


def newer(record: bytes, *, at: int, value: int) -> bytes:
    """The record with another value in one byte of its header, its checksum right."""
    changed = bytearray(record)
    changed[at] = value
    changed[4:8] = crc32c.crc32c(bytes(changed[8:HEADER_BYTES])).to_bytes(4, "little")
    return bytes(changed)


@pytest.mark.parametrize(("at", "value"), [(12, 2), (13, 77)], ids=["version", "kind"])
def test_log_of_a_newer_broker_is_refused(at, value):
    """A record of a newer version or an unknown kind is no damage: the start is refused, and
    nothing is changed.
    """
    disk, sent = written(4)
    data = bytes(disk.contents[PATH].data)
    for index in range(len(sent)):
        start = len(data) - sum(map(len, sent[index:]))
        end = start + len(sent[index])
        changed = data[:start] + newer(data[start:end], at=at, value=value) + data[end:]
        broken = copy_of(disk, PATH, changed)
        with pytest.raises(DataFolderError, match="newer"):
            open_store(broken)
        assert bytes(broken.contents[PATH].data) == changed


def test_gap_after_a_lost_end_stays_a_gap():
    """After a lost end the log continues in a new segment behind it; later starts tell the same
    loss, and no other.
    """
    disk, sent = written(6)
    data = bytes(disk.contents[PATH].data)
    broken = copy_of(disk, PATH, data[: -len(sent[-1]) - 10])

    async def go_on(count: int) -> None:
        clock = ManualClock()
        desk = Desk(open_store(broken, clock=clock), clock)
        if 2 not in desk.store.state.partitions:
            await desk.host(2)
        known = desk.store.state.partition(2).next_offset
        for number in range(known, known + 2 * count, 2):
            await desk.append(batch(sequence=number, partition_id=2), 2)
        assert [loss[:2] for loss in desk.store.state.partition(1).lost] == [(8, 12)]
        assert not desk.store.state.partition(2).lost

    for _ in range(3):
        asyncio.run(go_on(5))
        for name in broken.list("snapshot"):
            broken.remove(f"snapshot/{name}")
    assert segment_bases(broken) == [0, len(data)]
    read, position = stopped(broken)
    assert read == bodies(sent[:4])
    assert position == len(data) - len(sent[-1]) - len(sent[-2])


def test_deleted_log_is_told_as_lost():
    """When every segment is deleted, the loss is told and the log continues behind it."""
    disk, sent = written(30, segment_bytes=4096)

    async def stop() -> None:
        await open_store(disk).close()

    asyncio.run(stop())
    for base in segment_bases(disk):
        disk.remove(segment_path(base))
    read, _ = stopped(disk)
    assert read == []
    assert open_store(copy.deepcopy(disk)).state.partition(1).next_offset == 2 * len(sent)

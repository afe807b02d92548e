"""Recovery: a torn tail is cut, damage is never cut, and what remains is exactly what was there."""

from __future__ import annotations

import asyncio
import copy
import random

import pytest

from keylane.broker.storage.commit_log import segment_bases, segment_path
from keylane.protocol.batch import batch_starts
from keylane.protocol.errors import CorruptLogError
from keylane.protocol.record import HEADER_BYTES
from sim.clock import ManualClock
from sim.disk import SimDisk
from sim.store import Desk, batch, open_store


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
    found = copy.deepcopy(disk)
    found.contents[path].data[:] = data
    found.contents[path].sync()
    return found


def stored(disk: SimDisk) -> list[bytes]:
    """The bodies of partition 1, from the first offset to the last."""

    async def read() -> list[bytes]:
        clock = ManualClock()
        desk = Desk(open_store(disk, clock=clock), clock)
        if 1 not in desk.store.state.partitions:
            return []
        found: list[bytes] = []
        offset = 0
        while True:
            answer, payload = await desk.read(offset, bytes_max=1 << 20)
            if answer.upto == offset:
                return found
            found += [
                payload[at + HEADER_BYTES : at + header.length]
                for at, header in batch_starts(payload)
            ]
            offset = answer.upto

    return asyncio.run(read())


def bodies(sent: list[bytes]) -> list[bytes]:
    return [data[HEADER_BYTES:] for data in sent]


PATH = segment_path(0)


def test_a_log_cut_at_any_byte_keeps_every_whole_record():
    """Truncated at every byte of its last records, the log starts with exactly the records that are whole."""
    disk, sent = written(3)
    data = bytes(disk.contents[PATH].data)
    ends = [len(data) - sum(map(len, sent[index + 1 :])) for index in range(len(sent))]
    first = ends[0] - len(sent[0])
    for size in range(first, len(data) + 1):
        hurt = copy_of(disk, PATH, data[:size])
        whole = sum(end <= size for end in ends)
        assert stored(hurt) == bodies(sent[:whole]), size
        assert hurt.size(PATH) == (ends[whole - 1] if whole else first)


def test_every_flipped_bit_of_the_last_record_cuts_it():
    """The last record with any bit damaged is cut, as an unfinished write; the ones before are all there."""
    disk, sent = written(2)
    data = bytes(disk.contents[PATH].data)
    for bit in range(8 * len(sent[-1])):
        hurt = bytearray(data)
        at = len(data) - len(sent[-1]) + bit // 8
        hurt[at] ^= 1 << bit % 8
        assert stored(copy_of(disk, PATH, bytes(hurt))) == bodies(sent[:-1]), bit


def test_damage_before_durable_records_is_never_cut():
    """A damaged record with a later commit behind it refuses the start, by position, and changes no byte."""
    disk, sent = written(4)
    data = bytes(disk.contents[PATH].data)
    start = len(data) - sum(map(len, sent[1:]))
    dice = random.Random(1)
    for _ in range(200):
        hurt = bytearray(data)
        hurt[start + dice.randrange(len(sent[1]))] ^= 1 << dice.randrange(8)
        broken = copy_of(disk, PATH, bytes(hurt))
        with pytest.raises(CorruptLogError) as caught:
            open_store(broken)
        assert caught.value.details["position"] == start
        assert bytes(broken.contents[PATH].data) == bytes(hurt)


@pytest.mark.parametrize("what", ["zeros", "missing", "twice", "swapped"])
def test_blocks_that_are_not_where_they_belong_are_found(what):
    """Zeroed, lost, doubled or exchanged records in the middle are damage."""
    disk, sent = written(5)
    data = bytes(disk.contents[PATH].data)
    size = len(sent[0])
    first = len(data) - 4 * size
    one, two = data[first : first + size], data[first + size : first + 2 * size]
    middle = {
        "zeros": bytes(size) + two,
        "missing": two,
        "twice": one + one + two,
        "swapped": two + one,
    }
    broken = copy_of(disk, PATH, data[:first] + middle[what] + data[first + 2 * size :])
    if what in {"missing", "twice"}:
        # What follows is at a wrong position, so nothing behind the damage is whole where it is: a torn tail.
        kept = 1 if what == "missing" else 2
        assert stored(broken) == bodies(sent[:kept])
        return
    with pytest.raises(CorruptLogError):
        open_store(broken)


def test_a_hole_in_a_commit_that_never_finished_is_cut():
    """Of one unfinished commit any record may be missing; the whole ones behind it were never acked, and are kept aside."""
    disk, sent = written(1)
    before = bytes(disk.contents[PATH].data)
    other, more = written(5, together=True)
    data = bytes(other.contents[PATH].data)
    assert data.startswith(before[: len(before) - len(sent[0])])
    start = len(data) - sum(map(len, more[1:]))
    hurt = data[:start] + bytes(len(more[1])) + data[start + len(more[1]) :]
    broken = copy_of(other, PATH, hurt)

    assert stored(broken) == bodies(more[:1])
    assert broken.size(PATH) == start
    kept = [name for name in broken.list() if name.startswith("cut-")]
    assert len(kept) == 1
    assert bytes(broken.contents[kept[0]].data) == hurt[start:]


def test_a_damaged_or_missing_older_segment_is_never_cut():
    """Whatever is wrong in a segment that is not the last, or between two, refuses the start."""
    disk, sent = written(60, segment_bytes=4096)
    bases = segment_bases(disk)
    assert len(bases) > 2
    older = segment_path(bases[1])
    data = bytes(disk.contents[older].data)
    for hurt in (data[:-1], data[:-200], data + b"x", b"", bytes(len(data))):
        with pytest.raises(CorruptLogError):
            open_store(copy_of(disk, older, hurt))
    lost = copy.deepcopy(disk)
    lost.remove(older)
    with pytest.raises(CorruptLogError):
        open_store(lost)
    assert stored(disk) == bodies(sent)


def test_other_files_in_the_log_folder_are_left_alone():
    """Names that are no segment's are neither read nor removed."""
    disk, sent = written(2)
    for name in ("log/notes.txt", "log/1.log", "log/" + "x" * 20 + ".log"):
        disk.open_append(name).append([b"not ours"])
    assert stored(disk) == bodies(sent)
    assert len(disk.list("log")) == 4


@pytest.mark.parametrize("hurt", [b"", b"garbage" * 100, bytes(64)], ids=["no", "bad", "zero"])
def test_a_damaged_index_is_rebuilt(hurt):
    """The index is derived: deleted, damaged or stale, it comes back from the log."""
    disk, sent = written(300)
    path = "index/1.units"
    assert disk.size(path)
    assert stored(copy_of(disk, path, hurt)) == bodies(sent)
    lost = copy.deepcopy(disk)
    lost.remove(path)
    assert stored(lost) == bodies(sent)


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

"""Two thousand damaged stores: what was acked before the damage is readable, and nothing wrong is ever served.

Each store is read back whole and compared with the list of what was appended: every message that is served is the
one that was acked at this offset; reading stops at what is missing, with its position; partitions that the damage
did not touch are complete and take appends; and a second start says the same.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from dataclasses import dataclass, field

import pytest

from keylane.broker.storage.commit_log import segment_bases, segment_path
from keylane.broker.storage.trail import trail_bases, trail_path
from keylane.protocol.batch import batch_starts, columns
from keylane.protocol.errors import CorruptLogError, OffsetOutOfRangeError, PartitionUnknownError
from keylane.protocol.record import Header, Kind, read_record
from sim.clock import ManualClock
from sim.disk import SimDisk
from sim.store import Desk, batch, open_store

PARTITIONS = (1, 2, 3)
BATCHES = 80
SEGMENT = 64 << 10
BLOCK = 4096


@dataclass
class Whole:
    """A store before the damage."""

    disk: SimDisk
    stored: dict[int, list[bytes]] = field(default_factory=dict)
    """Partition → the value at each offset."""
    headers: list[Header] = field(default_factory=list)


def fill(
    *, segment_bytes: int, snapshot: bool = False, small: bool = False, dice: random.Random
) -> Whole:
    """Batches over three partitions, several in a commit, with fences and acks between them."""
    whole = Whole(SimDisk(), {number: [] for number in PARTITIONS})

    async def go() -> None:
        clock = ManualClock()
        store = open_store(whole.disk, clock=clock, segment_bytes=segment_bytes)
        desk = Desk(store, clock)
        for number in PARTITIONS:
            await desk.host(number)
        await desk.acquire(1)
        sequences = dict.fromkeys(PARTITIONS, 0)
        for step in range(BATCHES // 4):
            calls = []
            for _ in range(4):
                number = dice.choice(PARTITIONS)
                count = 1 if small else dice.randrange(1, 6)
                first = sequences[number]
                value = b"" if small else b"x" * dice.choice((0, 10, 300))
                data = batch(partition_id=number, sequence=first, count=count, value=value)
                whole.stored[number] += [
                    b"%s %d" % (value, offset) for offset in range(first, first + count)
                ]
                sequences[number] = first + count
                calls.append(desk.append(data, number))
            await asyncio.gather(*calls)
            if step % 5 == 4:
                await desk.acquire(step)
                await desk.ack(step, (step, step + 1))
            if snapshot and step == 10:
                assert await store.snapshotter.write()

    asyncio.run(go())
    for base in segment_bases(whole.disk):
        data = bytes(whole.disk.contents[segment_path(base)].data)
        at = 0
        while at < len(data):
            header = read_record(data, at)
            assert isinstance(header, Header)
            whole.headers.append(header)
            at += header.length
    return whole


async def served(desk: Desk, number: int) -> tuple[dict[int, bytes], list[int]]:
    """Offset → value of all that can be read, and the offsets at which reading was refused."""
    values: dict[int, bytes] = {}
    refused = []
    offset = 0
    end = desk.store.state.partition(number).readable_offset
    while offset <= end:
        try:
            answer, payload = await desk.read(offset, partition_id=number)
        except (CorruptLogError, OffsetOutOfRangeError):
            # Out of range: a log whose first segment is missing is one that retention has cut.
            refused.append(offset)
            offset += 1
            continue
        if answer.upto == offset:
            break
        for at, header in batch_starts(payload):
            assert header.partition_id == number
            cut = columns(payload, header, at)
            edges = cut.value_edges
            for index in range(header.count):
                value = cut.blob[edges[index] : edges[index + 1]]
                assert values.setdefault(header.base_offset + index, value) == value
        offset = answer.upto
    return values, refused


async def check(whole: Whole, disk: SimDisk, hurt: set[int] | None, **settings: int) -> set[int]:
    """The claims of this file; `hurt`: the partitions that may have lost something.  Those that did."""
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock, **settings), clock)
    lossy = set()
    for number in PARTITIONS:
        expected = dict(enumerate(whole.stored[number]))
        try:
            values, refused = await served(desk, number)
        except (PartitionUnknownError, CorruptLogError):
            lossy.add(number)  # what it is was lost as well
            continue
        assert values.items() <= expected.items()
        missing = expected.keys() - values.keys()
        if not missing and not refused:
            answer = await desk.append(
                batch(partition_id=number, sequence=len(expected), count=1), number
            )
            assert answer.base_offset == len(expected)
            continue
        lossy.add(number)
        # Every missing message is missed loudly, or was cut off with the end of the log.
        assert all(offset in refused for offset in missing if offset <= max(values, default=-1))
    assert hurt is None or lossy <= hurt
    return lossy


def touched(whole: Whole, start: int, end: int) -> set[int]:
    """Partitions that have a batch in these positions."""
    return {
        one.partition_id
        for one in whole.headers
        if one.kind == Kind.MESSAGES and one.position < end and start < one.position + one.length
    }


def copied(disk: SimDisk) -> SimDisk:
    """The same files, as they are when the machine comes up."""
    found = SimDisk()
    found.folders = set(disk.folders)
    for path, content in disk.contents.items():
        copy_of = copy.copy(content)
        copy_of.data = bytearray(content.data)
        copy_of.synced = bytes(content.data)
        copy_of.written = []
        found.contents[path] = copy_of
    return found


def without_trail(disk: SimDisk) -> SimDisk:
    for base in trail_bases(disk):
        disk.remove(trail_path(base))
    return disk


def put(disk: SimDisk, at: int, data: bytes) -> None:
    """Write over positions of the log, across segments."""
    for base in segment_bases(disk):
        content = disk.contents[segment_path(base)].data
        for index, byte in enumerate(data):
            if base <= at + index < base + len(content):
                content[at + index - base] = byte


@pytest.fixture(autouse=True)
def quiet(caplog) -> None:
    """What thousands of damaged stores have to say is not kept."""
    caplog.set_level(logging.CRITICAL, logger="keylane.broker")


@pytest.fixture(scope="module")
def whole() -> Whole:
    return fill(segment_bytes=SEGMENT, dice=random.Random(1))


@pytest.mark.parametrize("trail", [True, False])
def test_truncated_at_every_byte_of_the_last_records(trail):
    """Cut anywhere in the last 64 records, what lies before is served; what was durable by the trail is missed loudly."""
    whole = fill(segment_bytes=SEGMENT, dice=random.Random(2), small=True)
    path = segment_path(0)
    data = bytes(whole.disk.contents[path].data)
    last = whole.headers[-64:]
    edges = {one.position + change for one in last for change in (0, 1, 96)}
    for size in range(last[0].position, len(data)):
        if trail and size not in edges and size % 3:
            continue
        disk = copied(whole.disk)
        del disk.contents[path].data[size:]
        disk = disk if trail else without_trail(disk)
        counts = dict.fromkeys(PARTITIONS, 0)
        for one in whole.headers:
            if one.kind == Kind.MESSAGES and one.position + one.length <= size:
                counts[one.partition_id] = one.next_offset
        if size in edges:
            asyncio.run(truncated(whole, disk, counts, trail=trail))
            continue
        state = open_store(disk).state
        for number, count in counts.items():
            partition = state.partition(number)
            short = count < len(whole.stored[number])
            assert [one.start for one in partition.lost][:1] == ([count] if trail and short else [])
            assert partition.next_offset == (len(whole.stored[number]) if trail else count)


async def truncated(whole: Whole, disk: SimDisk, counts: dict[int, int], *, trail: bool) -> None:
    clock = ManualClock()
    desk = Desk(open_store(disk, clock=clock), clock)
    for number, count in counts.items():
        values, refused = await served(desk, number)
        assert values == dict(enumerate(whole.stored[number][:count]))
        assert bool(refused) == (trail and count < len(whole.stored[number]))


def test_every_flipped_bit_of_one_record(whole):
    """Every bit of a batch in the middle, each in a store of its own: its partition stops there, the others go on."""
    record = next(
        one
        for one in whole.headers[40:]
        if one.kind == Kind.MESSAGES and one.count == 1 and one.length < 140
    )
    number = record.partition_id
    for bit in range(8 * record.length):
        disk = copied(whole.disk)
        content = disk.contents[segment_path(0)].data
        content[record.position + bit // 8] ^= 1 << bit % 8
        assert asyncio.run(check(whole, disk, {number})) == {number}


@pytest.mark.parametrize("kind", ["zeros", "twice", "swapped", "noise"])
def test_blocks_of_the_log(whole, kind):
    """Zeroed, doubled, swapped and overwritten blocks: only partitions with batches in them lose anything."""
    dice = random.Random(kind)
    end = whole.headers[-1].position + whole.headers[-1].length
    data = bytes(whole.disk.contents[segment_path(0)].data)
    for _ in range(60):
        one, two = (BLOCK * dice.randrange(end // BLOCK) for _ in range(2))
        first, second = data[one : one + BLOCK], data[two : two + BLOCK]
        disk = copied(whole.disk)
        hurt = touched(whole, one, one + BLOCK)
        if kind == "zeros":
            put(disk, one, bytes(BLOCK))
        elif kind == "noise":
            put(disk, one, dice.randbytes(BLOCK))
        else:
            put(disk, one, second)
            if kind == "swapped":
                put(disk, two, first)
                hurt |= touched(whole, two, two + BLOCK)
        if one == two and kind in {"twice", "swapped"}:
            hurt = set()
        again = copied(disk)
        assert asyncio.run(check(whole, disk, hurt)) == hurt
        asyncio.run(check(whole, without_trail(again), None))


@pytest.mark.parametrize("seed", range(8))
def test_many_small_segments_with_snapshots(seed):
    """Damage of any kind at any place of a store with segments, snapshots and an index, trail or not."""
    dice = random.Random(seed)
    whole = fill(segment_bytes=4096, snapshot=True, dice=dice)
    for _ in range(40):
        disk = copied(whole.disk)
        for _ in range(dice.randrange(1, 4)):
            spoil(disk, dice)
        twice = copied(disk)
        found = asyncio.run(check(whole, disk, None))
        assert asyncio.run(check(whole, twice, None)) == found


def spoil(disk: SimDisk, dice: random.Random) -> None:
    """One of the things that happen to files; of the newest segment only a little, as a crash leaves it."""
    path = dice.choice(sorted(disk.contents))
    data = disk.contents[path].data
    if not data:
        return
    at = dice.randrange(len(data))
    match dice.randrange(6):
        case 0:
            data[at] ^= 1 << dice.randrange(8)
        case 1:
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        case 2:
            data[at : at + 64] = dice.randbytes(len(data[at : at + 64]))
        case 3:
            del data[at:]
        case 4:
            disk.remove(path)
        case 5:
            other = dice.randrange(len(data))
            size = min(256, len(data) - max(at, other))
            one, two = data[at : at + size], data[other : other + size]
            data[other : other + size] = one
            data[at : at + size] = two

"""A store in the shape of a broker's, its files as bytes, and what its readers must still get after
any damage.

    segments     0 ──────── 1 ──────── 2 ──────── 3 ──────── 4 ───     each with its trail snapshots
    ▲ whole          ▲ changes                 and the index on disk as of the second

What readers must get is worked out from the bytes that differ, not by the code that is tested.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import cached_property

from keylane.broker.storage.files import Files
from keylane.broker.storage.log.commit_log import BARRIER, segment_path
from keylane.broker.storage.log.trail import trail_path
from keylane.protocol.batch import columns
from keylane.protocol.errors import (
    CorruptIndexError,
    CorruptLogError,
    DataFolderError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
)
from keylane.protocol.record import HEADER_BYTES, Header, Kind, read_record
from keylane.testing.machines.disk import SimDisk, disk_of
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store

PARTITIONS = (1, 2, 3)
WEIGHTS = (16, 2, 2)
COMMITS = 64
COMMIT_BATCHES = 4
SEGMENT = 8 << 10
SNAPSHOTS_AT = (30, 46)
FIRST_SNAPSHOT = "snapshot/0000000001.snap"
Found = dict[str, bytes]
"""The files of a store: path → bytes."""


@dataclass
class Whole:
    """A store before the damage."""

    files: Found = field(default_factory=dict)
    early: Found = field(default_factory=dict)
    """As it was just after the first snapshot."""
    records: list[Header] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    """Positions that the snapshots stand for."""
    values: dict[int, list[bytes]] = field(
        default_factory=lambda: {number: [] for number in PARTITIONS}
    )
    """Partition → the value at each offset, as it was appended."""

    @property
    def end(self) -> int:
        last = self.records[-1]
        return last.position + last.length

    @cached_property
    def bases(self) -> list[int]:
        return log_bases(self.files)

    @cached_property
    def base_of(self) -> list[int]:
        """The segment of each record."""
        return [
            max(base for base in self.bases if base <= record.position) for record in self.records
        ]

    @cached_property
    def batches(self) -> dict[int, list[tuple[int, bytes]]]:
        """Partition → (index of the record, its bytes) for each offset."""
        stored: dict[int, list[tuple[int, bytes]]] = {number: [] for number in PARTITIONS}
        for index, record in enumerate(self.records):
            if record.kind == Kind.MESSAGES:
                stored[record.partition_id] += [(index, self.bytes_of(index))] * record.count
        return stored

    def bytes_of(self, index: int) -> bytes:
        record, base = self.records[index], self.base_of[index]
        at = record.position - base
        return self.files[segment_path(base)][at : at + record.length]


def log_bases(files: Found) -> list[int]:
    return sorted(
        int(path[4:24]) for path in files if path.startswith("log/") and path[-4:] == ".log"
    )


def image(files: Files) -> Found:
    """The files of a store that damage is done to, by path."""
    paths = [
        f"{folder}/{name}" for folder in ("log", "snapshot", "index") for name in files.list(folder)
    ]
    return {path: files.pread(path, 0, files.size(path) or 0) for path in paths}


async def fill(files: Files, rng: random.Random, *, index: str = "file", count: int = 1) -> Whole:
    """Batches of up to `count` messages over three partitions, with fences and acks between
    them.
    """
    whole = Whole()
    clock = ManualClock()
    store = open_store(files, clock=clock, index=index, segment_bytes=SEGMENT)
    desk = Desk(store, clock)
    for number in PARTITIONS:
        await desk.host(number)
    await desk.acquire(1)
    for step in range(COMMITS):
        calls = []
        for number in rng.choices(PARTITIONS, WEIGHTS, k=COMMIT_BATCHES):
            values = whole.values[number]
            first, size = len(values), rng.randint(1, count)
            value = rng.choice((b"x", b"yy"))
            values += [b"%s %d" % (value, first + n) for n in range(size)]
            data = batch(partition_id=number, sequence=first, count=size, value=value)
            calls.append(desk.append(data, number))
        await asyncio.gather(*calls)
        if step % 10 == 9:
            await desk.acquire(step)
            await desk.ack(step, (step // 2, step // 2 + 1))
        if step in SNAPSHOTS_AT:
            assert await store.snapshotter.write()
            whole.reached.append(store.snapshotter.position)
            whole.early = whole.early or image(files)
    store.queues.close_unflushed()
    store.log.close()
    whole.files = image(files)
    assert len(whole.bases) > 3
    assert index != "file" or any(data for path, data in whole.files.items() if ".blocks" in path)
    for base in whole.bases:
        data, at = whole.files[segment_path(base)], 0
        while at < len(data):
            header = read_record(data, at)
            assert isinstance(header, Header)
            whole.records.append(header)
            at += header.length
    check_values(whole)
    return whole


def check_values(whole: Whole) -> None:
    """What is in the log is what was appended, so that bytes can be compared from here on."""
    for number, values in whole.values.items():
        read = []
        for index, record in enumerate(whole.records):
            if record.kind == Kind.MESSAGES and record.partition_id == number:
                cut = columns(whole.bytes_of(index), record, 0)
                edges = cut.value_edges
                assert record.base_offset == len(read)
                read += [cut.blob[edges[at] : edges[at + 1]] for at in range(record.count)]
        assert read == values


class Owed:
    """What a damaged store must still serve, by the files it was left with."""

    def __init__(self, whole: Whole, files: Found) -> None:
        self.whole = whole
        self.files = files
        self.bases = log_bases(files)
        self.broken = {
            index
            for index, record in enumerate(whole.records)
            if self._differs(segment_path(whole.base_of[index])) and self._is_broken(index, record)
        }
        self.hurt = {whole.records[index].partition_id for index in self._messages(self.broken)}
        """Partitions that have lost a message."""
        trails = [trail_path(base) for base in whole.bases]
        self.explained = not any(map(self._differs, trails)) and self.bases[:1] == whole.bases[:1]
        """The trail tells of all that is lost."""
        self.index_hurt = any(
            data not in (whole.files.get(path), whole.early.get(path))
            for path, data in files.items()
            if path.startswith("index/")
        )
        """Something wrong is in it: one that is stale, or not there, refuses nothing."""
        self.cut_from = self._cut_from()
        """Position from which on records may be gone and nothing says so."""

    def _differs(self, path: str) -> bool:
        return self.files.get(path) != self.whole.files.get(path)

    def _differ(self, folder: str) -> bool:
        return any(self._differs(path) for path in self.whole.files if path.startswith(folder))

    def _is_broken(self, index: int, record: Header) -> bool:
        base = self.whole.base_of[index]
        at = record.position - base
        data = self.files.get(segment_path(base), b"")
        return data[at : at + record.length] != self.whole.bytes_of(index)

    def _messages(self, indexes: set[int]) -> list[int]:
        return [index for index in indexes if self.whole.records[index].kind == Kind.MESSAGES]

    def _cut_from(self) -> int:
        """Behind the last barrier that is whole, the first record that is not: a commit never made
        durable, to all looks.
        """
        records = self.whole.records
        last = self.bases[-1] if self.bases else 0
        proven = max(
            (
                record.position
                for index, record in enumerate(records)
                if record.flags & BARRIER and record.position >= last and index not in self.broken
            ),
            default=last,
        )
        behind = (
            records[index].position for index in self.broken if records[index].position >= proven
        )
        return max(self._durable(), min(behind, default=self.whole.end))

    def _durable(self) -> int:
        """The position up to which the trail and the snapshots prove the log durable."""
        paths = sorted(path for path in self.whole.files if path.startswith("snapshot/"))
        position = 0
        for path, reached in zip(paths, self.whole.reached, strict=True):
            if self._differs(path):
                break
            position = reached
        bases = self.whole.bases
        trails = [base for base in bases if trail_path(base) in self.files]
        if trails and not self._differs(trail_path(trails[-1])):
            position = max(position, [*bases, self.whole.end][bases.index(trails[-1]) + 1])
        return position

    def may_be_unknown(self, number: int) -> bool:
        """Whether the partition's facts were in a broken record only."""
        (index,) = (
            index
            for index, record in enumerate(self.whole.records)
            if record.kind == Kind.PARTITION and record.partition_id == number
        )
        return index in self.broken and not (self.explained and not self._differ("snapshot/"))

    def may_be_refused(self) -> bool:
        """Whether the log is missing, or its whole last segment."""
        last = self.bases[-1] if self.bases else -1
        base_of = self.whole.base_of
        return {index for index, base in enumerate(base_of) if base == last} <= self.broken


async def check(
    owed: Owed, files: Files, *, append: bool = True, again: bool = False, **settings: object
) -> dict[int, tuple[int, bytes]]:
    """One start: everything that is whole is served, nothing else is, and what is missing is missed
    loudly. Appended now.
    """
    appended: dict[int, tuple[int, bytes]] = {}
    clock = ManualClock()
    settings = {"segment_bytes": SEGMENT, "cache_bytes": 0} | settings
    try:
        store = open_store(files, clock=clock, **settings)
    except DataFolderError:
        assert owed.may_be_refused()
        return appended
    desk = Desk(store, clock)
    index_hurt = owed.index_hurt and not again
    for number in PARTITIONS:
        try:
            store.state.partition(number)
        except (PartitionUnknownError, CorruptLogError):
            assert owed.may_be_unknown(number)
            continue
        await _check_partition(owed, desk, number, index_hurt=index_hurt)
        if append:
            owes = owed.explained and number not in owed.hurt and not index_hurt
            sequence = store.state.partition(number).readable_offset
            try:
                data = batch(partition_id=number, sequence=sequence, value=b"new")
                answer = await desk.append(data, number)
            except CorruptLogError:
                assert not owes
                continue
            assert answer.base_offset == sequence
            assert not owes or sequence == len(owed.whole.values[number])
            appended[number] = sequence, data[HEADER_BYTES:]
    store.queues.close_unflushed()
    store.log.close()
    return appended


async def _check_partition(owed: Owed, desk: Desk, number: int, *, index_hurt: bool) -> None:
    batches = owed.whole.batches[number]
    partition = desk.store.state.partition(number)
    end = partition.readable_offset
    served, refused = await _served(desk, number, batches, index_hurt=index_hurt)
    for offset, (index, _) in enumerate(batches):
        position = owed.whole.records[index].position
        if offset in served:
            assert index not in owed.broken
            continue
        if offset in refused or (end <= offset and end in refused):
            assert index in owed.broken or index_hurt or position >= owed.cut_from
            continue
        assert position >= owed.cut_from, f"offset {offset} of partition {number} is lost silently"


async def _served(
    desk: Desk, number: int, batches: list[tuple[int, bytes]], *, index_hurt: bool
) -> tuple[set[int], set[int]]:
    """Offsets that are served, each byte as it was appended, and those at which reading is
    refused.
    """
    served: set[int] = set()
    refused: set[int] = set()
    offset, end = 0, desk.store.state.partition(number).readable_offset
    assert end <= len(batches)
    while offset <= end:
        try:
            answer, payload = await desk.read(offset, partition_id=number)
        except (CorruptLogError, OffsetOutOfRangeError) as error:
            # Out of range: a log whose first segment is missing is one that retention has cut.
            if isinstance(error, CorruptIndexError) and not index_hurt:
                raise
            refused.add(offset)
            offset += 1
            continue
        if answer.upto == offset:
            break
        parts = dict(batches[offset : answer.upto])
        assert payload == b"".join(parts.values())
        served |= set(range(offset, answer.upto))
        offset = answer.upto
    return served, refused


def started(files: Found) -> SimDisk:
    """The files as they are when the machine starts: sealed segments are read-only."""
    disk = disk_of(files)
    disk.protected = {segment_path(base) for base in log_bases(files)[:-1]}
    return disk


async def check_twice(owed: Owed) -> None:
    """The same holds for the next start, with a damaged index made anew; messages acked in it are
    there at the start after it.
    """
    disk = started(owed.files)
    await check(owed, disk, append=False)
    appended = await check(owed, disk, again=True)
    if appended:
        clock = ManualClock()
        desk = Desk(open_store(disk, clock=clock, segment_bytes=SEGMENT, cache_bytes=0), clock)
        for number, (offset, body) in appended.items():
            _, payload = await desk.read(offset, partition_id=number)
            assert payload[HEADER_BYTES:] == body

"""Thousands of damaged stores: what was acked before the damage is readable, and nothing wrong is
ever served.

Each store has the shape of a real one (segments, trails, snapshots, the index on disk) and is read
back whole: every byte that is served is the one that was acked at this offset; what is whole is
served, whatever happened elsewhere; what is missing is missed loudly, but for the end of a log of
which nothing proves that it was durable; partitions that the damage did not touch take appends.

`make test` cuts the log at the edges of all fields of every seventh record and at every 32nd byte,
flips every 11th bit, and draws a third of the damages; `make proof` leaves out no byte, no bit and
no damage.
"""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path

import pytest

from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.log.commit_log import segment_path
from keylane.protocol.record import HEADER_BYTES, Kind
from keylane.testing.machines.disk import SimDisk
from sim.damage import FIRST_SNAPSHOT, Found, Owed, Whole, check, check_twice, fill, image, started

BLOCK = 4096
LAST = 64
FIELDS = (0, 4, 8, 12, 13, 14, 15, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 84, 88, HEADER_BYTES)
"""Where the fields of a record's header begin, and its body."""
_STORES: dict[int, Whole] = {}


async def whole_store(count: int = 1) -> Whole:
    """A store with up to `count` messages in a batch, made once."""
    if count not in _STORES:
        _STORES[count] = await fill(SimDisk(), random.Random(count), count=count)
    return _STORES[count]


@pytest.fixture(autouse=True)
def quiet(caplog) -> None:
    """The log lines of thousands of damaged stores are not kept."""
    caplog.set_level(logging.CRITICAL, logger="keylane.broker")


# ── what happens to files ─────────────────────────────────────────────────────────────────────────
def truncated(whole: Whole, position: int) -> Found:
    """The log ends at this position: what follows of its segment is gone, and the segments behind
    it.
    """
    files = dict(whole.files)
    for base in whole.bases:
        path = segment_path(base)
        if base > position:
            del files[path]
        else:
            files[path] = files[path][: position - base]
    return files


def beginning(whole: Whole, position: int) -> Found:
    """The segments before this position are gone."""
    gone = {segment_path(base) for base in whole.bases if base < position}
    return {path: data for path, data in whole.files.items() if path not in gone}


def without(files: Found, ending: str) -> Found:
    return {path: data for path, data in files.items() if not path.endswith(ending)}


def index_of(files: Found, state: str, whole: Whole) -> Found:
    """The index as it is, as it was long before, or deleted."""
    if state == "whole":
        return files
    rest = {path: data for path, data in files.items() if not path.startswith("index/")}
    early = {path: data for path, data in whole.early.items() if path.startswith("index/")}
    return rest | early if state == "stale" else rest


def snapshots_of(files: Found, state: str) -> Found:
    """The snapshots as they are, the older one only, or none."""
    if state == "whole":
        return files
    rest = without(files, ".snap")
    return rest | {FIRST_SNAPSHOT: files[FIRST_SNAPSHOT]} if state == "stale" else rest


def flipped(files: Found, path: str, bit: int) -> Found:
    data = bytearray(files[path])
    data[bit // 8] ^= 1 << bit % 8
    return files | {path: bytes(data)}


def spread(whole: Whole, kind: str, rng: random.Random) -> Found:
    """One or two 4 KiB blocks of the log are not what they were."""
    places = [
        (segment_path(base), at)
        for base in whole.bases
        for at in range(0, len(whole.files[segment_path(base)]), BLOCK)
    ]
    here, there = rng.sample(places, 2)
    first, second = (whole.files[path][at : at + BLOCK] for path, at in (here, there))
    files = dict(whole.files)
    match kind:
        case "zeros":
            put(files, here, bytes(len(first)))
        case "noise":
            put(files, here, rng.randbytes(len(first)))
        case "twice":
            put(files, here, second)
        case "swapped":
            put(files, here, second)
            put(files, there, first)
    return files


def put(files: Found, place: tuple[str, int], block: bytes) -> None:
    path, at = place
    data = files[path]
    size = min(len(block), len(data) - at)
    files[path] = data[:at] + block[:size] + data[at + size :]


def spoiled(files: Found, rng: random.Random) -> Found:
    """One of the things that happen to files, in any of them."""
    path = rng.choice(sorted(files))
    data = bytearray(files[path])
    if not data:
        return files
    at, other = rng.randrange(len(data)), rng.randrange(len(data))
    match rng.randrange(6):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        case 2:
            data[at : at + 64] = rng.randbytes(len(data[at : at + 64]))
        case 3:
            del data[at:]
        case 4:
            return {name: kept for name, kept in files.items() if name != path}
        case 5:
            size = min(256, len(data) - max(at, other))
            left, right = data[at : at + size], data[other : other + size]
            data[other : other + size] = left
            data[at : at + size] = right
    return files | {path: bytes(data)}


# ── the claims ────────────────────────────────────────────────────────────────────────────────────
def edges(whole: Whole) -> set[int]:
    """Of every seventh of the last records: where each field and the body begin, and the bytes
    beside the ends of header and body.
    """
    last = whole.records[-LAST::7]
    fields = {record.position + field for record in last for field in FIELDS}
    ends = [record.position + end for record in last for end in (HEADER_BYTES, record.length)]
    return fields | {end + step for end in ends for step in (-1, 1)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [32, pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize("trail", [True, False])
async def test_store_serves_all_before_the_cut_when_its_log_is_truncated(trail, every):
    """Cut anywhere in the last 64 records, all before is served; the rest is missed loudly if a
    trail proves it.
    """
    whole = await whole_store()
    first = whole.records[-LAST].position
    assert len(set(whole.base_of[-LAST:])) > 1
    positions = range(first, whole.end)
    chosen = sorted({*positions[::every], *(edges(whole) & set(positions))})
    stores = 0
    for position in chosen:
        files = truncated(whole, position)
        owed = Owed(whole, files if trail else without(files, ".trail"))
        assert owed.cut_from == whole.end if trail else owed.cut_from <= position
        if position % 16:
            await check(owed, started(owed.files), append=False)
        else:
            await check_twice(owed)
        stores += 1
    assert stores == len(chosen) > 2000 // every
    assert every > 1 or stores == whole.end - first > 2000


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize("part", ["before the snapshots", "after them"])
async def test_store_misses_one_batch_when_a_bit_of_it_is_flipped(part, every):
    """Every bit of a batch, each in a store of its own: only that batch is missed."""
    whole = await whole_store()
    start = 0 if part == "before the snapshots" else whole.reached[-1]
    index = next(
        index
        for index, record in enumerate(whole.records)
        if record.position > start + 2000 and record.kind == Kind.MESSAGES
    )
    record, base = whole.records[index], whole.base_of[index]
    first = 8 * (record.position - base)
    for bit in range(first, first + 8 * record.length, every):
        owed = Owed(whole, flipped(whole.files, segment_path(base), bit))
        assert (owed.broken, owed.hurt) == ({index}, {record.partition_id})
        assert owed.cut_from == whole.end
        await check(owed, started(owed.files), append=bit % 8 == 0)


@pytest.mark.parametrize("count", [13, pytest.param(40, marks=pytest.mark.whole)])
@pytest.mark.parametrize("kind", ["zeros", "twice", "swapped", "noise"])
async def test_store_serves_all_other_blocks_when_blocks_of_the_log_are_damaged(kind, count):
    """Zeroed, doubled, swapped and overwritten blocks: what is in no such block is served, trail or
    not.
    """
    whole = await whole_store(count=4)
    rng = random.Random(kind)
    for _ in range(count):
        files = spread(whole, kind, rng)
        await check_twice(Owed(whole, files))
        await check_twice(Owed(whole, without(files, ".trail")))


@pytest.mark.parametrize("snapshot", ["whole", "stale", "deleted"])
@pytest.mark.parametrize("index", ["whole", "stale", "deleted"])
async def test_store_loses_nothing_more_with_stale_or_deleted_parts(index, snapshot):
    """An older or no snapshot, with an older or no index, with damage to the log or none: nothing
    more is lost by it.
    """
    whole = await whole_store(count=4)
    rng = random.Random(index + snapshot)
    damages = [whole.files]
    damages += [truncated(whole, rng.randrange(whole.end)) for _ in range(6)]
    damages += [spread(whole, kind, rng) for kind in ("zeros", "twice", "swapped", "noise")]
    damages += [flipped(whole.files, segment_path(base), 999) for base in whole.bases]
    damages += [beginning(whole, base) for base in whole.bases[1:]]
    for files in damages:
        left = snapshots_of(index_of(files, index, whole), snapshot)
        await check_twice(Owed(whole, left))
        await check_twice(Owed(whole, without(left, ".trail")))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(2, 8))]
)
async def test_store_serves_what_is_whole_after_any_damage(seed):
    """Up to three damages to any files of a store, the snapshots, trails and index among them."""
    whole = await whole_store(count=4)
    rng = random.Random(seed)
    for _ in range(60):
        files = whole.files
        for _ in range(rng.randint(1, 3)):
            files = spoiled(files, rng)
        await check_twice(Owed(whole, files))


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.whole)])
async def test_real_folder_with_rocksdb_serves_what_is_whole_after_damage(tmp_path, count):
    """The same with the other index and real files: the log truncated, flipped, its blocks zeroed
    and swapped.
    """
    root = tmp_path / "whole"
    real = RealFiles(root)
    real.lock()
    whole = await fill(real, random.Random(7), index="rocksdb", count=4)
    real.close()
    rng = random.Random(8)
    for number in range(count):
        match number % 4:
            case 0:
                files = truncated(whole, rng.randrange(whole.end))
            case 1:
                base = rng.choice(whole.bases)
                path = segment_path(base)
                files = flipped(whole.files, path, rng.randrange(8 * len(whole.files[path])))
            case 2:
                files = spread(whole, "zeros", rng)
            case 3:
                files = spread(whole, "swapped", rng)
        files = snapshots_of(files, rng.choice(["whole", "stale", "deleted"]))
        await check_in_a_folder(Owed(whole, files), root, tmp_path / str(number))


async def check_in_a_folder(owed: Owed, root: Path, folder: Path) -> None:
    shutil.copytree(root, folder)
    for path in owed.whole.files.keys() - owed.files.keys():
        (folder / path).unlink()
    for path, data in owed.files.items():
        (folder / path).chmod(0o644)
        (folder / path).write_bytes(data)
    files = RealFiles(folder)
    files.lock()
    assert image(files) == owed.files
    await check(owed, files, append=False, index="rocksdb")
    await check(owed, files, again=True, index="rocksdb")
    files.close()
    shutil.rmtree(folder)

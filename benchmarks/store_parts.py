"""The measured parts of a broker's store, each to be run in a process of its own: `store_parts.py PART JSON`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import crc32c

from keylane.broker.app import tune_interpreter
from keylane.broker.service import BrokerService
from keylane.broker.settings import BrokerSettings
from keylane.broker.storage.append_file import RealAppendFile
from keylane.broker.storage.consume_queue import Unit
from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.index_kinds import open_index
from keylane.broker.store import Store
from keylane.protocol.batch import encode_batch
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import HostPartition, TimeBound
from keylane.protocol.frames import Append
from keylane.protocol.record import HEADER_BYTES
from keylane.protocol.routing import Partition, PartitionState

KIB = 1 << 10
MIB = 1 << 20
PER_CLIENT = 5
"""Batches that a client has under way; the producer's default."""


# ── what is measured with ─────────────────────────────────────────────────────────────────────────────
class Batches:
    """Batches of one producer, of about `size` bytes, made by copying one and stamping its sequence."""

    def __init__(self, size: int, *, producer_id: int = 7) -> None:
        count = max(1, min(128, size // KIB))
        value = os.urandom((size - HEADER_BYTES - 20 * count) // count)
        self._count = count
        self._template = encode_batch(
            partition_id=1, sent_at_ns=[10**18] * count, keys=[b""] * count, values=[value] * count,
            producer_id=producer_id, producer_epoch=0, sequence=0,
        )  # fmt: skip

    def make(self, partition_id: int, number: int) -> memoryview:
        """The batch of this number of a partition."""
        data = bytearray(self._template)
        struct.pack_into("<Q", data, 24, partition_id)
        struct.pack_into("<Q", data, 88, number * self._count)
        struct.pack_into("<I", data, 4, crc32c.crc32c(memoryview(data)[8:HEADER_BYTES]))
        return memoryview(bytes(data))


def facts(partition_id: int) -> HostPartition:
    partition = Partition(
        partition_id=partition_id, name=f"p{partition_id}", queue=0, range_start=0, range_end=1024,
        broker_group="g1", state=PartitionState.OPEN,
    )  # fmt: skip
    return HostPartition(subject="bench", partition=partition)


def settings(folder: str, index: str, **changes: Any) -> BrokerSettings:
    values = {"group": "g1", "data": Path(folder), "meta": ("127.0.0.1:1",), "index": index}
    return BrokerSettings(**(values | {"snapshot_bytes": 1 << 40} | changes))


def opened(
    files: RealFiles, folder: str, index: str, pool: ThreadPoolExecutor, **changes: Any
) -> Store:
    files.lock()
    readers = ThreadPoolExecutor(2)
    snapshots = ThreadPoolExecutor(1)

    def run(executor: ThreadPoolExecutor) -> Any:
        return lambda function, *args: asyncio.get_running_loop().run_in_executor(
            executor, function, *args
        )

    return Store.open(
        files,
        settings(folder, index, **changes),
        clock=SystemClock(),
        run_commit=run(pool),
        run_read=run(readers),
        run_background=run(snapshots),
    )


@asynccontextmanager
async def serving(folder: str, index: str, **changes: Any) -> Any:
    """A store and its service; closed cleanly."""
    pool = ThreadPoolExecutor(1)
    files = RealFiles(folder)
    store = opened(files, folder, index, pool, **changes)
    yield store, BrokerService(store, clock=SystemClock())
    await store.close()
    files.close()


async def host(store: Store, partition_ids: range) -> None:
    for start in range(0, len(partition_ids), 1000):
        await asyncio.gather(
            *(store.host(facts(one))[1] for one in partition_ids[start : start + 1000])
        )


async def append_all(
    service: BrokerService, batches: Iterator[tuple[int, memoryview]], *, clients: int
) -> float:
    """Append with so many calls under way; seconds."""
    started = time.perf_counter()

    async def client() -> None:
        for partition_id, data in batches:
            await service.handle(Append(1, partition_id), data)

    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - started


def drop_cache(folder: str) -> None:
    """Have the page cache forget the files of a folder."""
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_seconds(folder: str) -> float:
    """What the disk needs for the log from one end to the other."""
    drop_cache(folder)
    started = time.perf_counter()
    buffer = bytearray(4 * MIB)
    for path in sorted(Path(folder, "log").glob("*.log")):
        descriptor = os.open(path, os.O_RDONLY)
        while os.readv(descriptor, [buffer]):
            pass
        os.close(descriptor)
    return time.perf_counter() - started


def memory_mb() -> tuple[float, float]:
    """Resident now, and at most so far."""
    text = Path("/proc/self/status").read_text()
    found = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if "kB" in line}
    return round(found["VmRSS"] / 1024, 1), round(found["VmHWM"] / 1024, 1)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# ── parts ─────────────────────────────────────────────────────────────────────────────────────────────
class Cadence:
    """Notes what each group commit writes, and writes the same again without a broker."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []
        self._append = RealAppendFile.append

    def __enter__(self) -> Self:
        cadence = self

        def append(self: RealAppendFile, buffers: Any) -> None:
            if self._path.endswith(".log"):
                cadence.sizes.append([len(one) for one in buffers])
            cadence._append(self, buffers)

        RealAppendFile.append = append
        return self

    def __exit__(self, *_: object) -> None:
        RealAppendFile.append = self._append

    def again(self, path: Path) -> float:
        """Seconds for the same writes and syncs to one file."""
        data = os.urandom(2 * MIB)
        plans = [[memoryview(data)[:size] for size in sizes] for sizes in self.sizes]
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        started = time.perf_counter()
        at = 0
        for buffers in plans:
            at += os.pwritev(descriptor, buffers, at)
            os.fdatasync(descriptor)
        seconds = time.perf_counter() - started
        os.close(descriptor)
        path.unlink()
        return seconds


async def append(folder: str, index: str, *, count: int, rounds: int) -> dict[str, Any]:
    """128 KiB batches of 40 clients, and the same bytes written raw right after, some rounds of each."""
    batches = Batches(128 * KIB)
    ratios, rates = [], []
    async with serving(folder, index) as (store, service):
        await host(store, range(1, 41))
        numbers = itertools.count()
        for _ in range(rounds):
            made = (
                (1 + n % 40, batches.make(1 + n % 40, n // 40))
                for n in itertools.islice(numbers, count)
            )
            with Cadence() as cadence:
                seconds = await append_all(service, made, clients=40 * PER_CLIENT)
            raw = await asyncio.to_thread(cadence.again, Path(folder, "raw"))
            written = sum(map(sum, cadence.sizes))
            ratios.append(raw / seconds)
            rates.append(written / seconds / 1e6)
    return {
        "append_vs_raw": statistics.median(ratios),
        "append_mb_s": statistics.median(rates),
        "append_bytes_per_commit": written // len(cadence.sizes),
    }


async def commits(folder: str, index: str, *, count: int, rounds: int) -> dict[str, Any]:
    """1 KiB batches of 64 clients, synced and not, in turns."""
    batches = Batches(KIB)
    rates: dict[str, list[float]] = {"sync": [], "async": []}
    carried = []
    for number in range(rounds):
        for flush, found in rates.items():
            async with serving(f"{folder}/{flush}{number}", index, flush=flush) as (store, service):
                await host(store, range(1, 65))
                before = store.commit.commits
                made = ((1 + n % 64, batches.make(1 + n % 64, n // 64)) for n in range(count))
                seconds = await append_all(service, made, clients=64 * PER_CLIENT)
                found.append(count / seconds)
                if flush == "sync":
                    carried.append(count / (store.commit.commits - before))
    sync, later = (statistics.median(rates[flush]) for flush in ("sync", "async"))
    return {
        "batches_per_commit": statistics.median(carried),
        "sync_vs_async": sync / later,
        "sync_batches_s": sync,
        "async_batches_s": later,
    }


async def reading(
    folder: str, index: str, *, alone: int, rows: int, partitions: int, rounds: int
) -> dict[str, Any]:
    """A partition of 128 KiB batches, and 1,000 of 16 KiB ones that take turns; from the page cache."""
    batches, small = Batches(128 * KIB), Batches(16 * KIB)
    async with serving(folder, index, cache_bytes=0) as (store, service):
        await host(store, range(1, partitions + 2))
        made = ((1, batches.make(1, n)) for n in range(alone))
        await append_all(service, made, clients=64)
        turns = ((p, small.make(p, n)) for n in range(rows) for p in range(2, partitions + 2))
        await append_all(service, turns, clients=512)

        async def rate(partition_ids: list[int]) -> float:
            size = 0
            started = time.perf_counter()
            for one in partition_ids:
                partition = store.state.partition(one)
                offset = 0
                while offset < partition.readable_offset:
                    data, offset = await store.read(partition, offset, bytes_max=2 * MIB)
                    size += len(data)
            return size / (time.perf_counter() - started) / 1e6

        dice = random.Random(1)
        some = [dice.randint(2, partitions + 1) for _ in range(100)]
        await rate([1]), await rate(some)
        warm = [await rate([1]) for _ in range(rounds)]
        mixed = [await rate(some) for _ in range(rounds)]
    return {
        "read_warm_mb_s": statistics.median(warm),
        "read_interleaved_mb_s": statistics.median(mixed),
    }


async def many(
    folder: str, index: str, *, partitions: int, window: int, rounds: int
) -> dict[str, Any]:
    """
    Medians of some fillings; the folder keeps the last.

    A second of work says little of a rate, and a disk that was idle is faster: short ones come after one that does
    not count.
    """
    found = [
        await fill_many(f"{folder}/{number}", index, partitions=partitions, window=window)
        for number in range(rounds + (rounds > 1))
    ]
    os.rename(f"{folder}/{len(found) - 1}", f"{folder}/last")
    counted = found[-rounds:]
    result = {key: statistics.median(one[key] for one in counted) for key in found[0]}
    return result | {"append_ratio": result["late_appends_s"] / result["early_appends_s"]}


async def fill_many(folder: str, index: str, *, partitions: int, window: int) -> dict[str, Any]:
    """So many partitions with one small batch each; the rate of appends after the thousandth and after the last."""
    batches = Batches(200)

    async def one_each(service: BrokerService, numbers: range) -> float:
        made = ((one, batches.make(one, 0)) for one in numbers)
        return len(numbers) / await append_all(service, made, clients=64 * PER_CLIENT)

    most_files = 0
    started = time.perf_counter()
    async with serving(folder, index, snapshot_bytes=256 * MIB) as (store, service):
        await host(store, range(1, 1001))
        await one_each(service, range(1, 1001))
        await host(store, range(1001, 1001 + window))
        early = await one_each(service, range(1001, 1001 + window))
        for start in range(1001 + window, partitions + 1, 10_000):
            numbers = range(start, min(start + 10_000, partitions + 1))
            await host(store, numbers)
            await one_each(service, numbers)
            most_files = max(most_files, open_files())
        await host(store, range(partitions + 1, partitions + 1 + window))
        late = await one_each(service, range(partitions + 1, partitions + 1 + window))
        most_files = max(most_files, open_files())
        stopping = time.perf_counter()
    return {
        "early_appends_s": early,
        "late_appends_s": late,
        "fill_s": stopping - started,
        "stop_s": time.perf_counter() - stopping,
        "rss_mb": memory_mb()[1],
        "open_files": most_files,
    }


async def restart(folder: str, index: str, *, partitions: int) -> dict[str, Any]:
    """Open what is there, and read and append at once."""
    started = time.perf_counter()
    pool = ThreadPoolExecutor(1)
    store = opened(RealFiles(folder), folder, index, pool)
    service = BrokerService(store, clock=SystemClock())
    partition = store.state.partition(partitions // 2)
    await service.handle(Append(1, partitions // 2), Batches(200).make(partitions // 2, 1))
    _, upto = await store.read(partition, 0, bytes_max=1)
    seconds = time.perf_counter() - started
    assert upto > 0
    assert len(store.state.partitions) >= partitions
    print(json.dumps({"restart_s": seconds, "rss_mb": memory_mb()[1], "open_files": open_files()}))
    sys.stdout.flush()
    os._exit(0)  # a crash: the next start has this batch to find


async def fill(folder: str, index: str, *, count: int, size: int, clean: bool) -> dict[str, Any]:
    """A log of so many batches on 100 partitions, without a snapshot, ended by a clean stop or not."""
    batches = Batches(size)
    async with serving(folder, index) as (store, service):
        await host(store, range(1, 101))
        await store.snapshotter.write()
        made = ((1 + n % 100, batches.make(1 + n % 100, n // 100)) for n in range(count))
        await append_all(service, made, clients=16 * PER_CLIENT)
        if not clean:
            print(json.dumps({"end": store.log.end}))
            sys.stdout.flush()
            os._exit(0)
    return {"end": store.log.end}


async def start(folder: str, index: str, *, size: int) -> dict[str, Any]:
    """Seconds to open a store that is cold, and those that the disk alone needs."""
    disk = [read_seconds(folder)]
    drop_cache(folder)
    began = time.perf_counter()
    store = opened(folder, index, ThreadPoolExecutor(1))
    seconds = time.perf_counter() - began
    del size
    bytes_ = store.log.end
    os.sync()
    disk.append(read_seconds(folder))
    print(json.dumps({"start_s": seconds, "disk_s": statistics.mean(disk), "log_mb": bytes_ / 1e6}))
    sys.stdout.flush()
    os._exit(0)


async def lookup(folder: str, index: str, *, units: int, lookups: int) -> dict[str, Any]:
    """Lookups by time in one partition of so many batches."""
    files = RealFiles(folder)
    files.lock()
    queues = open_index(files, index)
    queues.recover(0)
    step = 5_000
    for start_ in range(0, units, step):
        queues.dispatch(
            [
                (1, Unit(3 * n, 3, n * 1000, 1000, 7 * n))
                for n in range(start_, min(start_ + step, units))
            ]
        )
    queues.checkpoint(units * 1000)
    queues.close()
    queues = open_index(files, index)
    queues.recover(units * 1000)
    dice = random.Random(1)
    took: list[float] = []
    cpu: list[float] = []
    for number in range(lookups + 1000):
        at_ms, bound = dice.randrange(7 * units), dice.choice(list(TimeBound))
        began, computed = time.perf_counter(), time.thread_time()
        found = queues.by_time(1, at_ms, bound)
        if number >= 1000:
            took.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - computed)
        assert found is not None or bound is TimeBound.LOWER
    took.sort()
    cpu.sort()
    queues.close()
    return {
        "time_lookup_p99_ms": took[len(took) * 99 // 100] * 1000,
        "time_lookup_p99_cpu_ms": cpu[len(cpu) * 99 // 100] * 1000,
        "time_lookup_p50_ms": took[len(took) // 2] * 1000,
    }


PARTS = {
    one.__name__: one for one in (append, commits, reading, many, restart, fill, start, lookup)
}


def main() -> None:
    part, folder, index, arguments = sys.argv[1:]
    tune_interpreter()  # as the program does
    Path(folder).mkdir(parents=True, exist_ok=True)
    print(json.dumps(asyncio.run(PARTS[part](folder, index, **json.loads(arguments)))))


if __name__ == "__main__":
    main()

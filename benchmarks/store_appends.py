"""Measures appends: large batches beside raw writes of the same bytes, and small batches."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any, Self

from store_rig import KIB, MIB, PER_CLIENT, BatchMaker, append_all, host, serving

from keylane.broker.storage.append_file import RealAppendFile

RAW_TRIES = 3


class Cadence:
    """Notes what each group commit writes, and writes the same again without a broker."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []
        self._append = RealAppendFile.append

    def __enter__(self) -> Self:
        cadence = self

        def append(self: RealAppendFile, buffers: Any) -> None:
            if self._path.endswith(".log"):
                cadence.sizes.append([len(buffer) for buffer in buffers])
            cadence._append(self, buffers)

        RealAppendFile.append = append
        return self

    def __exit__(self, *_: object) -> None:
        RealAppendFile.append = self._append

    def repeat_without_broker(self, path: Path) -> tuple[float, float]:
        """Repeat the same writes and syncs in one file, and return the least wall and processor
        time in seconds.
        """
        data = os.urandom(2 * MIB)
        plans = [[memoryview(data)[:size] for size in sizes] for sizes in self.sizes]
        return min(written_seconds(path, plans) for _ in range(RAW_TRIES))


def written_seconds(path: Path, plans: list[list[memoryview]]) -> tuple[float, float]:
    """
    Seconds, and seconds of processor time, to write plans to a new file, each with a sync; the file
    is removed.

    The memory of its pages is free afterwards. A file that is written next gets it, which is
    several times as fast as memory that the kernel has not used yet: the first try pays for what
    the broker took before.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        started, processor = time.perf_counter(), time.thread_time()
        at = 0
        for buffers in plans:
            at += os.pwritev(descriptor, buffers, at)
            os.fdatasync(descriptor)
        return time.perf_counter() - started, time.thread_time() - processor
    finally:
        os.close(descriptor)
        path.unlink()


async def append(folder: str, index: str, *, count: int, rounds: int) -> dict[str, Any]:
    """128 KiB batches of 40 clients, and the same bytes written raw right after, some rounds of
    each.
    """
    batches = BatchMaker(128 * KIB)
    # No copy of a batch is made for the broker, nor memory taken: that is a client's work, and the
    # raw side has none of it. What is acked is on the disk, and commits keep the order, so twice
    # the batches in flight are enough.
    batches.reserve_places(2 * 40 * PER_CLIENT)
    block = memoryview(os.urandom(MIB))
    # So that the broker's first round, too, gets memory that was used before.
    await asyncio.to_thread(written_seconds, Path(folder, "raw"), [[block]] * (count // 8))
    ratios, rates, raw_rates = [], [], []
    processor, raw_processor = [], []
    async with serving(folder, index) as (store, service):
        await host(store, range(1, 41))
        numbers = itertools.count()
        for _ in range(rounds):
            numbered_batches = (
                (1 + number % 40, batches.make_in_place(1 + number % 40, number // 40))
                for number in itertools.islice(numbers, count)
            )
            with Cadence() as cadence:
                before = time.process_time()
                seconds = await append_all(service, numbered_batches, clients=40 * PER_CLIENT)
                cpu_s = time.process_time() - before
            raw_s, raw_cpu_s = await asyncio.to_thread(
                cadence.repeat_without_broker, Path(folder, "raw")
            )
            written = sum(map(sum, cadence.sizes))
            ratios.append(raw_s / seconds)
            rates.append(written / seconds / 1e6)
            raw_rates.append(written / raw_s / 1e6)
            processor.append(cpu_s / written * 1e12)
            raw_processor.append(raw_cpu_s / written * 1e12)
    return {
        "append_vs_raw": statistics.median(ratios),
        "append_mb_s": statistics.median(rates),
        "append_raw_mb_s": statistics.median(raw_rates),
        "append_us_per_mb": statistics.median(processor),
        "append_raw_us_per_mb": statistics.median(raw_processor),
        "append_bytes_per_commit": written // len(cadence.sizes),
    }


async def commits(folder: str, index: str, *, count: int, rounds: int) -> dict[str, Any]:
    """Measure 1 KiB batches of 64 clients: how many share a commit, and how many are stored per
    second.
    """
    batches = BatchMaker(KIB)
    rates: list[float] = []
    carried: list[float] = []
    for number in range(rounds):
        async with serving(f"{folder}/{number}", index) as (store, service):
            await host(store, range(1, 65))
            before = store.commit.commits
            numbered_batches = (
                (1 + n % 64, batches.make(1 + n % 64, n // 64)) for n in range(count)
            )
            seconds = await append_all(service, numbered_batches, clients=64 * PER_CLIENT)
            rates.append(count / seconds)
            carried.append(count / (store.commit.commits - before))
    return {
        "batches_per_commit": statistics.median(carried),
        "batches_s": statistics.median(rates),
    }

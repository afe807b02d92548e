"""Measures reads of the log, and lookups by time."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from store_rig import KIB, MIB, BatchMaker, append_all, host, serving

from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.index.interface import Unit
from keylane.broker.storage.index.kinds import open_index
from keylane.protocol.control import TimeBound


async def reading(
    folder: str, index: str, *, alone: int, rows: int, partitions: int, rounds: int
) -> dict[str, Any]:
    """Measure reads from the page cache: of one partition with 128 KiB batches, and of interleaved
    partitions with 16 KiB batches.
    """
    batches, small = BatchMaker(128 * KIB), BatchMaker(16 * KIB)
    async with serving(folder, index, cache_bytes=0) as (store, service):
        await host(store, range(1, partitions + 2))
        numbered_batches = ((1, batches.make(1, number)) for number in range(alone))
        await append_all(service, numbered_batches, clients=64)
        turns = (
            (partition_id, small.make(partition_id, number))
            for number in range(rows)
            for partition_id in range(2, partitions + 2)
        )
        await append_all(service, turns, clients=512)

        async def rate(partition_ids: list[int]) -> float:
            size = 0
            started = time.perf_counter()
            for partition_id in partition_ids:
                partition = store.state.partition(partition_id)
                offset = 0
                while offset < partition.readable_offset:
                    data, offset = await store.read(partition, offset, bytes_max=2 * MIB)
                    size += len(data)
            return size / (time.perf_counter() - started) / 1e6

        rng = random.Random(1)
        partition_ids = [rng.randint(2, partitions + 1) for _ in range(100)]
        await rate([1]), await rate(partition_ids)
        warm_rate = [await rate([1]) for _ in range(rounds)]
        mixed_rate = [await rate(partition_ids) for _ in range(rounds)]
    return {
        "read_warm_mb_s": statistics.median(warm_rate),
        "read_interleaved_mb_s": statistics.median(mixed_rate),
    }


async def lookup(folder: str, index: str, *, units: int, lookups: int) -> dict[str, Any]:
    """Measure lookups by time in a partition with many batches."""
    files = RealFiles(folder)
    files.lock()
    queues = open_index(files, index)
    queues.recover(0)
    step = 5_000
    for start_ in range(0, units, step):
        queues.dispatch(
            [
                (1, Unit(3 * number, 3, number * 1000, 1000, 7 * number))
                for number in range(start_, min(start_ + step, units))
            ]
        )
    queues.checkpoint(units * 1000)
    queues.close()
    queues = open_index(files, index)
    queues.recover(units * 1000)
    rng = random.Random(1)
    times: list[float] = []
    cpu: list[float] = []
    for number in range(lookups + 1000):
        at_ms, bound = rng.randrange(7 * units), rng.choice(list(TimeBound))
        began, computed = time.perf_counter(), time.thread_time()
        unit = queues.find_by_time(1, at_ms, bound)
        if number >= 1000:
            times.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - computed)
        assert unit is not None or bound is TimeBound.LOWER
    times.sort()
    cpu.sort()
    queues.close()
    return {
        "time_lookup_p99_ms": times[len(times) * 99 // 100] * 1000,
        "time_lookup_p99_cpu_ms": cpu[len(cpu) * 99 // 100] * 1000,
        "time_lookup_p50_ms": times[len(times) // 2] * 1000,
    }

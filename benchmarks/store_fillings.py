"""Measures very many partitions: the rate of appends, memory, open files, restart."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from store_rig import MIB, PER_CLIENT, BatchMaker, append_all, host, opened, serving

from keylane.broker.service import BrokerService
from keylane.broker.storage.files import RealFiles
from keylane.protocol.clock import SystemClock
from keylane.protocol.frames import Append


def memory_mb() -> tuple[float, float]:
    """Return the current and the peak resident memory."""
    text = Path("/proc/self/status").read_text()
    fields = {
        line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if "kB" in line
    }
    return round(fields["VmRSS"] / 1024, 1), round(fields["VmHWM"] / 1024, 1)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def many(
    folder: str, index: str, *, partitions: int, window: int, rounds: int
) -> dict[str, Any]:
    """
    Medians of `rounds` fillings; the folder keeps the last.

    An idle disk is faster at first, so several short fillings follow one that does not count.
    """
    fillings = [
        await fill_many(f"{folder}/{number}", index, partitions=partitions, window=window)
        for number in range(rounds + (rounds > 1))
    ]
    os.rename(f"{folder}/{len(fillings) - 1}", f"{folder}/last")
    counted = fillings[-rounds:]
    result = {key: statistics.median(filling[key] for filling in counted) for key in fillings[0]}
    return result | {"append_ratio": result["late_appends_s"] / result["early_appends_s"]}


async def fill_many(folder: str, index: str, *, partitions: int, window: int) -> dict[str, Any]:
    """Fill many partitions with a small batch each; return the append rate after 1,000 partitions
    and after all.
    """
    batches = BatchMaker(200)

    async def one_each(service: BrokerService, numbers: range) -> float:
        made = ((partition_id, batches.make(partition_id, 0)) for partition_id in numbers)
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
    """Open a filled folder, then append and read at once."""
    started = time.perf_counter()
    pool = ThreadPoolExecutor(1)
    store = opened(RealFiles(folder), folder, index, pool)
    service = BrokerService(store, clock=SystemClock())
    partition = store.state.partition(partitions // 2)
    await service.handle(Append(partitions // 2), BatchMaker(200).make(partitions // 2, 1))
    _, upto = await store.read(partition, 0, bytes_max=1)
    seconds = time.perf_counter() - started
    assert upto > 0
    assert len(store.state.partitions) >= partitions
    print(json.dumps({"restart_s": seconds, "rss_mb": memory_mb()[1], "open_files": open_files()}))
    sys.stdout.flush()
    os._exit(0)  # a crash: the next start has this batch to find

"""What very many partitions cost: the rate of appends, memory and files, and opening them again."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from store_rig import MIB, PER_CLIENT, Batches, append_all, host, opened, serving

from keylane.broker.service import BrokerService
from keylane.broker.storage.files import RealFiles
from keylane.protocol.clock import SystemClock
from keylane.protocol.frames import Append


def memory_mb() -> tuple[float, float]:
    """Resident now, and at most so far."""
    text = Path("/proc/self/status").read_text()
    found = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if "kB" in line}
    return round(found["VmRSS"] / 1024, 1), round(found["VmHWM"] / 1024, 1)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


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
    """Many partitions with one small batch each; the rate of appends after the thousandth and after the last."""
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
    await service.handle(Append(partitions // 2), Batches(200).make(partitions // 2, 1))
    _, upto = await store.read(partition, 0, bytes_max=1)
    seconds = time.perf_counter() - started
    assert upto > 0
    assert len(store.state.partitions) >= partitions
    print(json.dumps({"restart_s": seconds, "rss_mb": memory_mb()[1], "open_files": open_files()}))
    sys.stdout.flush()
    os._exit(0)  # a crash: the next start has this batch to find

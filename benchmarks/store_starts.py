"""Measures the start of a store from a cold log, beside the time in which the disk alone reads the
log.
"""

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

from keylane.broker.storage.files import RealFiles


def drop_cache(folder: str) -> None:
    """Evict a folder's files from the page cache."""
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_seconds(folder: str) -> float:
    """Return the seconds that the disk alone takes to read the whole log."""
    drop_cache(folder)
    started = time.perf_counter()
    buffer = bytearray(4 * MIB)
    for path in sorted(Path(folder, "log").glob("*.log")):
        descriptor = os.open(path, os.O_RDONLY)
        while os.readv(descriptor, [buffer]):
            pass
        os.close(descriptor)
    return time.perf_counter() - started


async def fill(folder: str, index: str, *, count: int, size: int, clean: bool) -> dict[str, Any]:
    """Write a log of many batches on 100 partitions, without a snapshot, with or without a clean
    stop.
    """
    batches = BatchMaker(size)
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
    """Return the seconds to open a cold store, and those for the disk alone to read its log."""
    disk = [read_seconds(folder)]
    drop_cache(folder)
    began = time.perf_counter()
    store = opened(RealFiles(folder), folder, index, ThreadPoolExecutor(1))
    seconds = time.perf_counter() - began
    del size
    bytes_ = store.log.end
    os.sync()
    disk.append(read_seconds(folder))
    print(json.dumps({"start_s": seconds, "disk_s": statistics.mean(disk), "log_mb": bytes_ / 1e6}))
    sys.stdout.flush()
    os._exit(0)

"""Helpers of the store's benchmarks: batches, a store with its service, timed appends."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import crc32c

from keylane.broker.service import BrokerService
from keylane.broker.settings import BrokerSettings
from keylane.broker.storage.files import RealFiles
from keylane.broker.store.store import Store
from keylane.protocol.batch import encode_batch
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import HostPartition
from keylane.protocol.frames import Append
from keylane.protocol.record import HEADER_BYTES
from keylane.protocol.routing import Partition, PartitionState

KIB = 1 << 10
MIB = 1 << 20
PER_CLIENT = 5
"""Batches that a client has in flight; the producer's default."""


class BatchMaker:
    """Makes batches of one producer, of about `size` bytes: copies of a template with their own
    sequence.
    """

    def __init__(self, size: int, *, producer_id: int = 7) -> None:
        count = max(1, min(128, size // KIB))
        value = os.urandom((size - HEADER_BYTES - 20 * count) // count)
        self._count = count
        self._room: list[bytearray] = []
        self._turn = 0
        self._template = encode_batch(
            partition_id=1,
            sent_at_ns=[10**18] * count,
            keys=[b""] * count,
            values=[value] * count,
            producer_id=producer_id,
            producer_epoch=0,
            sequence=0,
        )

    def make(self, partition_id: int, number: int) -> memoryview:
        """Return the batch with this number for a partition."""
        return memoryview(bytes(self._stamped(bytearray(self._template), partition_id, number)))

    def reserve_places(self, count: int) -> None:
        """Take memory for `count` batches of `make_in_place`."""
        self._room = [bytearray(self._template) for _ in range(count)]

    def make_in_place(self, partition_id: int, number: int) -> memoryview:
        """Make the batch in reserved memory, without a copy; it is valid until all reserved places
        are reused.
        """
        self._turn += 1
        data = self._room[self._turn % len(self._room)]
        return memoryview(self._stamped(data, partition_id, number)).toreadonly()

    def _stamped(self, data: bytearray, partition_id: int, number: int) -> bytearray:
        struct.pack_into("<Q", data, 24, partition_id)
        struct.pack_into("<Q", data, 88, number * self._count)
        struct.pack_into("<I", data, 4, crc32c.crc32c(memoryview(data)[8:HEADER_BYTES]))
        return data


def partition_facts(partition_id: int) -> HostPartition:
    partition = Partition(
        partition_id=partition_id,
        name=f"p{partition_id}",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group="g1",
        state=PartitionState.OPEN,
    )
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
    """Open a store and its service, and close them cleanly."""
    pool = ThreadPoolExecutor(1)
    files = RealFiles(folder)
    store = opened(files, folder, index, pool, **changes)
    yield store, BrokerService(store, clock=SystemClock())
    await store.close()
    files.close()


async def host(store: Store, partition_ids: range) -> None:
    for start in range(0, len(partition_ids), 1000):
        await asyncio.gather(
            *(
                store.host(partition_facts(partition_id))[1]
                for partition_id in partition_ids[start : start + 1000]
            )
        )


async def append_all(
    service: BrokerService, batches: Iterator[tuple[int, memoryview]], *, clients: int
) -> float:
    """Append with `clients` calls in flight, and return the seconds it took."""
    started = time.perf_counter()

    async def client() -> None:
        for partition_id, data in batches:
            await service.handle(Append(partition_id), data)

    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - started

"""The open reads of a reader: each partition that is read to its end has one, a long poll.

begin ─▶ (other partitions are read) ─▶ reply: wakes the reader ─▶ read
  ╰──────▶ its broker moved, or the partition is not read any more: cancelled
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from ...protocol.clock import Clock
from ...protocol.errors import ClosedError
from ...protocol.frames import Answer, Batches, Read
from ...protocol.limits import READ_WAIT_MS
from ...rpc.client import BrokerClient
from ...rpc.copied_reads import CopiedReads
from ...rpc.race import start_task

POLL_MS = 200
"""The minimum interval, in milliseconds, between reads of a partition that has nothing new, because
a broker that is shutting down replies at once.
"""

ReadTask = asyncio.Task[tuple[Answer, memoryview]]


@dataclass(frozen=True, slots=True)
class _OpenRead:
    """A long poll of one partition, and the address of its broker."""

    address: str
    task: ReadTask


class OpenReads:
    """
    The open reads of one reader, by partition.

    Args:
        copies: reads what is stored from copies; None if only brokers are asked. Long polls wait at
            brokers.
    """

    def __init__(self, clock: Clock, copies: CopiedReads | None = None) -> None:
        self._clock = clock
        self._copies = copies
        self._reads: dict[int, _OpenRead] = {}
        self._replied = asyncio.Event()

    def retain(self, addresses: dict[int, str | None]) -> None:
        """Cancel reads of partitions that are not in `addresses`, and reads whose broker now has a
        different address.
        """
        for partition_id, read in list(self._reads.items()):
            if addresses.get(partition_id) != read.address and not read.task.done():
                del self._reads[partition_id]
                read.task.cancel()
            elif partition_id not in addresses:
                del self._reads[partition_id]

    def begin(
        self, broker: BrokerClient, partition_id: int, offset: int, *, bytes_max: int
    ) -> None:
        """Open a read of a partition from `offset` on, unless one is already open."""
        if partition_id in self._reads:
            return
        request = Read(partition_id, offset, bytes_max, wait_ms=READ_WAIT_MS)
        task = start_task(self._read(broker, request), name=f"read {partition_id}")
        task.add_done_callback(self._on_reply)
        self._reads[partition_id] = _OpenRead(broker.address, task)

    async def read(
        self, broker: BrokerClient, partition_id: int, offset: int, *, bytes_max: int
    ) -> tuple[Answer, memoryview]:
        """
        Return the finished read of a partition, or read from `offset` on.

        If the caller is cancelled, the read stays open: a program that gives up early, and tries
        again, hears of a broker that never replies.

        Raises:
            ClosedError: the reader was closed meanwhile.
            KeylaneError: the read failed.
        """
        read = self._reads.get(partition_id)
        if read is None:
            request = Read(partition_id, offset, bytes_max)
            call = (
                broker.call(request)
                if (copies := self._copies) is None
                else copies.call(broker, request)
            )
            task = start_task(call, name="read")
            read = self._reads[partition_id] = _OpenRead(broker.address, task)
        try:
            if not read.task.done():
                await asyncio.wait((read.task,))
        except asyncio.CancelledError:
            read.task.add_done_callback(self._on_reply)  # the next caller may wait for others
            raise
        if self._reads.get(partition_id) is read:
            del self._reads[partition_id]
        if read.task.cancelled():
            raise ClosedError("the reader was closed while it read")
        return read.task.result()

    async def _read(self, broker: BrokerClient, request: Read) -> tuple[Answer, memoryview]:
        started_ms = self._clock.boot_ms()
        reply, payload = await broker.call(request, wait_ms=request.wait_ms)
        if isinstance(reply, Batches) and not payload and not reply.sealed:
            elapsed_ms = self._clock.boot_ms() - started_ms
            await asyncio.sleep(max(0, POLL_MS - elapsed_ms) / 1000)
        return reply, payload

    def _on_reply(self, task: ReadTask) -> None:
        if not task.cancelled():
            task.exception()  # mark it as retrieved, because possibly nobody takes this result
        self._replied.set()

    def find_due(self, partition_ids: Collection[int]) -> list[int]:
        """Return those of `partition_ids` that have no open read. Replies that arrive after this
        call wake `wait`.
        """
        self._replied.clear()
        reads = self._reads
        return [
            partition_id
            for partition_id in partition_ids
            if partition_id not in reads or reads[partition_id].task.done()
        ]

    def pending(self, partition_id: int) -> bool:
        """Return True while a partition's read is open: its broker had no more messages, and has
        not replied yet.
        """
        read = self._reads.get(partition_id)
        return read is not None and not read.task.done()

    async def wait(self, wait_ms: int | None) -> None:
        """Wait until a read finishes, for at most `wait_ms`, or without a limit if that is None."""
        try:
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                await self._replied.wait()
        except TimeoutError:
            pass

    def __len__(self) -> int:
        return len(self._reads)

    async def end(self) -> None:
        """Cancel all reads, and wake the waiting reader."""
        reads = self._reads
        self._reads = {}
        for read in reads.values():
            read.task.cancel()
        self._replied.set()
        await asyncio.gather(*(read.task for read in reads.values()), return_exceptions=True)

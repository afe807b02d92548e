"""The open reads of partitions that a reader has read to their end: one read for each waits at its
broker for messages.

begin ─▶ (rounds of other partitions) ─▶ answered: news ─▶ take
  ╰──────▶ its broker has another address, or the partition is not read any more: ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from ...protocol.clock import Clock
from ...protocol.frames import Answer, Batches, Read
from ...protocol.limits import READ_WAIT_MS
from ...rpc.client import BrokerClient
from ...rpc.race import start_task

LOOK_MS = 200
"""The milliseconds between two checks for new messages at a broker that answers at once, because it
is stopping.
"""

Answered = asyncio.Task[tuple[Answer, memoryview]]


@dataclass(frozen=True, slots=True)
class _Wait:
    address: str
    task: Answered


class OpenReads:
    """The waiting reads of one reader, by partition."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: dict[int, _Wait] = {}
        self._news = asyncio.Event()

    def keep(self, addresses: dict[int, str | None]) -> None:
        """End the waits of other partitions than these, and those at an address other than
        theirs.
        """
        for partition_id, wait in list(self._waits.items()):
            if addresses.get(partition_id) != wait.address and not wait.task.done():
                del self._waits[partition_id]
                wait.task.cancel()
            elif partition_id not in addresses:
                del self._waits[partition_id]

    def begin(
        self, broker: BrokerClient, partition_id: int, offset: int, *, bytes_max: int
    ) -> None:
        """Wait for messages of a partition from `offset` on, if that is not done yet."""
        if partition_id in self._waits:
            return
        asked = Read(partition_id, offset, bytes_max, wait_ms=READ_WAIT_MS)
        task = start_task(self._ask(broker, asked), name=f"read {partition_id}")
        task.add_done_callback(self._answered)
        self._waits[partition_id] = _Wait(broker.address, task)

    async def _ask(self, broker: BrokerClient, asked: Read) -> tuple[Answer, memoryview]:
        began_ms = self._clock.boot_ms()
        answer, payload = await broker.call(asked, wait_ms=asked.wait_ms)
        if isinstance(answer, Batches) and not payload and not answer.sealed:
            took_ms = self._clock.boot_ms() - began_ms
            await asyncio.sleep(max(0, LOOK_MS - took_ms) / 1000)
        return answer, payload

    def _answered(self, task: Answered) -> None:
        if not task.cancelled():
            task.exception()  # a wait that is never taken is not an error
        self._news.set()

    def due(self, partition_ids: Collection[int]) -> list[int]:
        """Return those of these partitions for which no read waits; from now on, further answers
        are news.
        """
        self._news.clear()
        waits = self._waits
        return [each for each in partition_ids if each not in waits or waits[each].task.done()]

    def pending(self, partition_id: int) -> bool:
        """Return whether a read of the partition waits: its broker had nothing more, and has not
        answered yet.
        """
        wait = self._waits.get(partition_id)
        return wait is not None and not wait.task.done()

    def take(self, partition_id: int) -> Answered | None:
        """Take the answer for a partition, once, or return None if there is none."""
        wait = self._waits.get(partition_id)
        if wait is None or not wait.task.done():
            return None
        del self._waits[partition_id]
        return wait.task

    async def wait(self, wait_ms: int | None) -> None:
        """Wait until one of the reads that `due` has left out is answered, `wait_ms` at most; None:
        without a limit.
        """
        try:
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                await self._news.wait()
        except TimeoutError:
            pass

    def __len__(self) -> int:
        return len(self._waits)

    async def end(self) -> None:
        """End all waits, and wake those that wait for news."""
        waits = self._waits
        self._waits = {}
        for wait in waits.values():
            wait.task.cancel()
        self._news.set()
        await asyncio.gather(*(wait.task for wait in waits.values()), return_exceptions=True)

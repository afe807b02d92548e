"""Reads one planned range from its broker, with the next read under way while rows are built.  Network only.

Invariants
    The rows yielded are those of the range, in order of offset, each once; or a typed error, never fewer.
    A read takes no lock and acks nothing, so it may be repeated freely, here and by Spark.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pyarrow as pa

from ..protocol.backoff import Backoff
from ..protocol.errors import CorruptBatchError, KeylaneError, OffsetOutOfRangeError, RetryRule
from ..protocol.frames import Batches, Read
from ..protocol.limits import PULL_BYTES_MAX
from ..rpc.client import BrokerClient, MetaClient
from ..rpc.http_network import HttpNetwork
from ..rpc.network import Network
from .planner import PlannedRange
from .rows import RowBuilder
from .selection import ReadOptions

TRIES_MAX = 8
"""With the waits between them about 4 s: a broker that is started again is back by then."""
_BACKOFF = Backoff()

Answered = tuple[Batches, memoryview]


def read_range(
    options: ReadOptions, planned: PlannedRange, *, rng: random.Random | None = None
) -> Iterator[pa.RecordBatch]:
    """
    Yield the rows of the range as Arrow batches.  Blocks; needs a thread without event loop.

    Raises:
        OffsetOutOfRangeError: rows of the range are no longer stored.
        CorruptBatchError: what the broker sent is damaged, or not the range.
        UnreachableError: the broker did not answer, `TRIES_MAX` times.
    """
    if planned.start >= planned.end:
        return
    builder = RowBuilder(
        subject=planned.subject,
        partition_id=planned.partition_id,
        start=planned.start,
        end=planned.end,
        columns=options.columns,
        batch_rows=options.batch_rows,
    )
    with asyncio.Runner() as runner:
        fetcher = runner.run(_open(options, planned, rng or random.Random()))
        try:
            runner.run(fetcher.begin(planned.start))
            while builder.next_offset < planned.end:
                answer, payload = runner.run(fetcher.finish())
                if answer.upto < planned.end:
                    runner.run(fetcher.begin(answer.upto))
                yield from builder.take(payload)
                _check_progress(builder, answer, planned)
            yield from builder.rest()
        finally:
            runner.run(fetcher.close())


def _check_progress(builder: RowBuilder, answer: Batches, planned: PlannedRange) -> None:
    expected = min(answer.upto, planned.end)
    if builder.next_offset != expected:
        raise CorruptBatchError(
            f"partition {planned.partition_id}: offsets up to {expected} were announced, "
            f"up to {builder.next_offset} came",
            partition_id=planned.partition_id,
            offset=builder.next_offset,
        )


async def _open(options: ReadOptions, planned: PlannedRange, rng: random.Random) -> Fetcher:
    return Fetcher(HttpNetwork(), options, planned, rng)


class Fetcher:
    """One read under way at a time, tried again while its broker is away or has moved."""

    def __init__(
        self, network: Network, options: ReadOptions, planned: PlannedRange, rng: random.Random
    ) -> None:
        self._network = network
        self._meta = MetaClient(network, options.meta)
        self._subject = planned.subject
        self._planned = planned
        self._rng = rng
        self._broker = BrokerClient(network, planned.address)
        self._under_way: asyncio.Task[Answered] | None = None

    async def begin(self, offset: int) -> None:
        """Send the read from `offset` on; its answer arrives while the caller does other things."""
        assert self._under_way is None
        self._under_way = asyncio.create_task(self._fetch(offset))
        await asyncio.sleep(0)  # the task's first step sends the frame

    async def finish(self) -> Answered:
        """The answer to the read begun: at least one batch."""
        task, self._under_way = self._under_way, None
        assert task is not None
        return await task

    async def _fetch(self, offset: int) -> Answered:
        for attempt in range(1, TRIES_MAX):
            try:
                return await self._read(offset)
            except KeylaneError as error:
                if error.retry is RetryRule.NEVER:
                    raise
            await asyncio.sleep(_BACKOFF.wait_ms(attempt, self._rng) / 1000)
            await self._look_up()
        return await self._read(offset)

    async def _read(self, offset: int) -> Answered:
        planned = self._planned
        request = Read(planned.partition_id, offset, PULL_BYTES_MAX)
        answer, payload = await self._broker.call(request)
        if not isinstance(answer, Batches) or (payload and answer.upto <= offset):
            raise CorruptBatchError("the broker answered something else", answer=str(answer))
        if answer.first_offset > offset or not payload:
            raise OffsetOutOfRangeError(
                f"offset {offset} is not stored in partition {planned.partition_id}",
                partition_id=planned.partition_id,
                offset=offset,
                first_offset=answer.first_offset,
                next_offset=answer.next_offset,
            )
        return answer, payload

    async def _look_up(self) -> None:
        """Ask where the partition is now; without an answer the address stays."""
        try:
            route = await self._meta.route(self._subject)
        except KeylaneError:
            return
        for partition in route.partitions:
            if (
                partition.partition_id == self._planned.partition_id
                and partition.address is not None
            ):
                if partition.address != self._broker.address:
                    await self._broker.close()
                    self._broker = BrokerClient(self._network, partition.address)
                return

    async def close(self) -> None:
        """Cancel the pending read and release the connections."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)
        await self._broker.close()
        await self._network.close()

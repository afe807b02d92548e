"""Reads planned ranges from their brokers, one after another, and prefetches replies while rows are
built. Performs network I/O.

    process's event loop:   Read ──▶ reply ──▶ Read ──▶ reply ──▶ …
                                       │ at most FRAMES_AHEAD
    caller's thread:                   ╰──▶ checked ──▶ Arrow batches

Connections stay open between ranges and tasks.

Invariants
    A reader yields exactly the rows of the ranges, once each and in order, or raises a typed error.
    A read takes no lock and acks nothing, so both this module and Spark may repeat it freely.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from functools import partial
from queue import SimpleQueue

import pyarrow as pa

from ..protocol.backoff import Backoff
from ..protocol.errors import (
    CorruptBatchError,
    KeylaneError,
    OffsetOutOfRangeError,
    Reason,
    RetryRule,
    UnreachableError,
)
from ..protocol.frames import Batches, Read
from ..protocol.limits import PULL_BYTES_MAX
from ..rpc.client import MetaClient
from ..rpc.copied_reads import CopiedReads
from .json_decoder import JsonDecoder, build_json_decoder
from .pace import Pace
from .planner import PlannedRange
from .process_loop import ProcessLoop
from .rows import RowBuilder, coalesce
from .selection import ReadOptions

PATIENCE_S = 60.0
"""The time in seconds that a broker may be unreachable, for example while it restarts or is
replaced.
"""
FRAMES_AHEAD = 2
"""The number of replies to prefetch, so that receiving overlaps with building rows."""
_BACKOFF = Backoff()

RangeReply = tuple[PlannedRange, Batches, memoryview]
"""A range, a broker's reply to a read in that range, and the payload of the reply."""


def read_ranges(options: ReadOptions, ranges: Sequence[PlannedRange]) -> Iterator[pa.RecordBatch]:
    """
    Yield the rows of the ranges as Arrow batches, one range after another. This blocks.

    An Arrow batch may contain rows of several small ranges. `options.bytes_per_second` limits how
    fast this call receives data.

    Raises:
        OffsetOutOfRangeError: some rows of a range are no longer stored; the details contain the
            partition and the stored offsets.
        CorruptBatchError: a broker's reply is damaged, or does not contain the range.
        UnreachableError: a broker was unreachable or kept refusing the read for PATIENCE_S; the
            cause is the last error.
        CodecError: a value does not fit `options.json_schema`.
    """
    non_empty = [
        planned_range for planned_range in ranges if planned_range.start < planned_range.end
    ]
    if not non_empty:
        return
    value_decoder = build_json_decoder(options)
    stream = RangeStream(ProcessLoop.current(), options, non_empty)
    try:
        yield from coalesce(
            _read_batches(stream, options, non_empty, value_decoder), options.batch_rows
        )
    finally:
        stream.close()


def _read_batches(
    stream: RangeStream,
    options: ReadOptions,
    ranges: Sequence[PlannedRange],
    value_decoder: JsonDecoder | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the ranges; each batch has rows from only one range."""
    for planned_range in ranges:
        builder = RowBuilder(
            planned_range,
            columns=options.columns,
            batch_rows=options.batch_rows,
            value_decoder=value_decoder,
        )
        while builder.next_offset < planned_range.end:
            try:
                source_range, reply, payload = stream.next()
            except KeylaneError:
                yield from builder.flush()  # a retry may come after their removal
                raise
            assert source_range is planned_range
            yield from builder.add(payload)
            _check_progress(builder, reply, planned_range)
        yield from builder.flush()


def _check_progress(builder: RowBuilder, reply: Batches, planned_range: PlannedRange) -> None:
    """Raise CorruptBatchError if a reply's payload does not end at the offset that it announced."""
    expected = min(reply.upto, planned_range.end)
    if builder.next_offset != expected:
        raise CorruptBatchError(
            f"partition {planned_range.partition_id}: the broker announced offsets up to "
            f"{expected}, and sent offsets up to {builder.next_offset}",
            partition_id=planned_range.partition_id,
            offset=builder.next_offset,
        )


class RangeStream:
    """Prefetches the replies to reads of several ranges, in the process's event loop."""

    def __init__(
        self, loop: ProcessLoop, options: ReadOptions, ranges: Sequence[PlannedRange]
    ) -> None:
        self._loop = loop
        self._options = options
        self._ranges = ranges
        self._rng = random.Random()
        self._addresses = {
            planned_range.partition_id: planned_range.address for planned_range in ranges
        }
        self._meta: MetaClient | None = None
        self._copies = (
            CopiedReads(partial(loop.broker, options.security), lambda: _now_s() * 1_000)
            if options.from_copies
            else None
        )
        self._replies: SimpleQueue[RangeReply | BaseException] = SimpleQueue()
        self._prefetch_slots = asyncio.Semaphore(FRAMES_AHEAD)
        self._pace = Pace(options.bytes_per_second)
        self._task = loop.start(self._receive())

    def next(self) -> RangeReply:
        """Return the next reply, or raise the error that stopped reading."""
        reply = self._replies.get()
        if isinstance(reply, BaseException):
            raise reply
        self._loop.call_soon(self._prefetch_slots.release)
        return reply

    def close(self) -> None:
        """Stop prefetching."""
        self._loop.call_soon(self._task.cancel)

    async def _receive(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            for planned_range in self._ranges:
                offset = planned_range.start
                while offset < planned_range.end:
                    await self._prefetch_slots.acquire()
                    await asyncio.sleep(self._pace.wait_s(clock()))
                    reply, payload = await self._fetch(planned_range, offset)
                    self._pace.record_received(len(payload), clock())
                    self._replies.put((planned_range, reply, payload))
                    offset = reply.upto
        except BaseException as error:
            self._replies.put(error)
            if not isinstance(error, Exception):
                raise

    async def _fetch(self, planned_range: PlannedRange, offset: int) -> tuple[Batches, memoryview]:
        """Return the reply to one read. Retries with backoff while the broker is unreachable, and
        follows the partition if it moves to another address.
        """
        pauses = _BACKOFF.pauses(self._rng)
        started_s = _now_s()
        while True:
            try:
                return await self._read(planned_range, offset)
            except KeylaneError as error:
                if error.retry is RetryRule.NEVER or isinstance(error, CorruptBatchError):
                    raise
                pause_s = pauses.next_pause_ms() / 1000
                if _now_s() + pause_s > started_s + PATIENCE_S:
                    raise _unreadable_error(
                        planned_range, offset, _now_s() - started_s, error
                    ) from error
            await asyncio.sleep(pause_s)
            await self._refresh_address(planned_range)

    async def _read(self, planned_range: PlannedRange, offset: int) -> tuple[Batches, memoryview]:
        bytes_max = min(PULL_BYTES_MAX, self._pace.bytes_max)
        request = Read(planned_range.partition_id, offset, bytes_max, background=True)
        address = self._addresses[planned_range.partition_id]
        broker = self._loop.broker(self._options.security, address)
        try:
            call = broker.call if self._copies is None else partial(self._copies.call, broker)
            reply, payload = await call(request)
        except OffsetOutOfRangeError as error:
            stored_bytes = error.first_offset, error.next_offset
            raise _out_of_range_error(planned_range, offset, *stored_bytes) from error
        if not isinstance(reply, Batches) or (payload and reply.upto <= offset):
            raise CorruptBatchError("the broker answered something else", answer=str(reply))
        if reply.first_offset > offset or not payload:
            raise _out_of_range_error(planned_range, offset, reply.first_offset, reply.next_offset)
        return reply, payload

    async def _refresh_address(self, planned_range: PlannedRange) -> None:
        """Get the partition's address from a metaserver; keep the old one if none responds."""
        if self._meta is None:
            network = self._loop.network(self._options.security)
            self._meta = MetaClient(network, self._options.meta)
        try:
            route = await self._meta.route(planned_range.subject)
        except KeylaneError:
            return
        for partition in route.partitions:
            if (
                partition.partition_id == planned_range.partition_id
                and partition.address is not None
            ):
                self._addresses[planned_range.partition_id] = partition.address


def _describe(planned_range: PlannedRange) -> str:
    start, end = planned_range.start, planned_range.end
    return f"partition {planned_range.partition_id}, offsets [{start}, {end})"


def _now_s() -> float:
    """Return the event loop's time in seconds."""
    return asyncio.get_running_loop().time()


def _unreadable_error(
    planned_range: PlannedRange, offset: int, seconds: float, error: KeylaneError
) -> UnreachableError:
    return UnreachableError(
        Reason.RANGE_UNREADABLE,
        f"{_describe(planned_range)}: no answer from offset {offset} on for {seconds:.0f} s; "
        f"the last error: {error.message}",
        subject=planned_range.subject,
        partition_id=planned_range.partition_id,
        start=planned_range.start,
        end=planned_range.end,
        offset=offset,
        seconds=round(seconds),
    )


def _out_of_range_error(
    planned_range: PlannedRange, offset: int, first_offset: int | None, next_offset: int | None
) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"{_describe(planned_range)}: offset {offset} is not stored; [{first_offset}, "
        f"{next_offset}) is",
        partition_id=planned_range.partition_id,
        offset=offset,
        first_offset=first_offset,
        next_offset=next_offset,
    )

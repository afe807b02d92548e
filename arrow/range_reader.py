"""Reads planned ranges from their brokers, one after another; the next answers are received while
rows are built. Network only.

    event loop of the process:   Read ──▶ answer ──▶ Read ──▶ answer ──▶ …
                                            │ at most FRAMES_AHEAD
    thread of the caller:                   ╰──▶ checked ──▶ Arrow batches

Connections are kept between ranges and tasks.

Invariants
    A reader yields exactly the rows of the ranges, in their order, each once, or raises a typed
    error.
    A read takes no lock and acks nothing, so it may be repeated freely, here and by Spark.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
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
from .json_values import JsonValues, json_values
from .pace import Pace
from .planner import PlannedRange
from .process_loop import ProcessLoop
from .rows import RowBuilder, joined
from .selection import ReadOptions

PATIENCE_S = 60.0
"""Seconds that a broker may be unreachable; in this time it is restarted or replaced."""
FRAMES_AHEAD = 2
"""Number of answers that are being received or wait for the caller, so that receiving and building
overlap.
"""
_BACKOFF = Backoff()

Answered = tuple[PlannedRange, Batches, memoryview]


def read_range(options: ReadOptions, planned: PlannedRange) -> Iterator[pa.RecordBatch]:
    """As `read_ranges`, of one range."""
    return read_ranges(options, (planned,))


def read_ranges(options: ReadOptions, ranges: Sequence[PlannedRange]) -> Iterator[pa.RecordBatch]:
    """
    Yield the rows of the ranges as Arrow batches, range after range in their order; this blocks.

    An Arrow batch may have rows of several ranges, if they are small.
    `options.bytes_per_second` limits the bytes that this call receives.

    Raises:
        OffsetOutOfRangeError: rows of a range are no longer stored; the details name the partition
            and the stored offsets.
        CorruptBatchError: the answer of a broker is damaged, or does not contain the range.
        UnreachableError: a broker was unreachable or refused for PATIENCE_S; the cause is the
            last error.
        CodecError: a value does not fit `options.json_schema`.
    """
    left = [planned for planned in ranges if planned.start < planned.end]
    if not left:
        return
    values = json_values(options)
    stream = RangeStream(ProcessLoop.current(), options, left)
    try:
        yield from joined(_received(stream, options, left, values), options.batch_rows)
    finally:
        stream.close()


def _received(
    stream: RangeStream,
    options: ReadOptions,
    ranges: Sequence[PlannedRange],
    values: JsonValues | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the ranges; each batch has rows of one range."""
    for planned in ranges:
        builder = RowBuilder(
            planned, columns=options.columns, batch_rows=options.batch_rows, values=values
        )
        while builder.next_offset < planned.end:
            try:
                answered, answer, payload = stream.next()
            except KeylaneError:
                yield from builder.rest()  # a broker may have these no longer
                raise
            assert answered is planned
            yield from builder.take(payload)
            _check_progress(builder, answer, planned)
        yield from builder.rest()


def _check_progress(builder: RowBuilder, answer: Batches, planned: PlannedRange) -> None:
    expected = min(answer.upto, planned.end)
    if builder.next_offset != expected:
        raise CorruptBatchError(
            f"partition {planned.partition_id}: the broker announced offsets up to {expected}, "
            f"and sent offsets up to {builder.next_offset}",
            partition_id=planned.partition_id,
            offset=builder.next_offset,
        )


class RangeStream:
    """The answers of brokers for several ranges, which the loop of the process receives ahead of
    the caller.
    """

    def __init__(
        self, loop: ProcessLoop, options: ReadOptions, ranges: Sequence[PlannedRange]
    ) -> None:
        self._loop = loop
        self._options = options
        self._ranges = ranges
        self._rng = random.Random()
        self._addresses = {planned.partition_id: planned.address for planned in ranges}
        self._meta: MetaClient | None = None
        self._answers: SimpleQueue[Answered | BaseException] = SimpleQueue()
        self._room = asyncio.Semaphore(FRAMES_AHEAD)
        self._pace = Pace(options.bytes_per_second)
        self._task = loop.start(self._receive())

    def next(self) -> Answered:
        """Wait for the next answer and return it; raise the error that ended the receiving."""
        answered = self._answers.get()
        if isinstance(answered, BaseException):
            raise answered
        self._loop.soon(self._room.release)
        return answered

    def close(self) -> None:
        """Cancel the pending read."""
        self._loop.soon(self._task.cancel)

    async def _receive(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            for planned in self._ranges:
                offset = planned.start
                while offset < planned.end:
                    await self._room.acquire()
                    await asyncio.sleep(self._pace.wait_s(clock()))
                    answer, payload = await self._fetch(planned, offset)
                    self._pace.received(len(payload), clock())
                    self._answers.put((planned, answer, payload))
                    offset = answer.upto
        except BaseException as error:
            self._answers.put(error)
            if not isinstance(error, Exception):
                raise

    async def _fetch(self, planned: PlannedRange, offset: int) -> tuple[Batches, memoryview]:
        """Return the answer to one read; retry while the broker is unreachable or the partition has
        moved.
        """
        pauses = _BACKOFF.pauses(self._rng)
        began_s = _now_s()
        while True:
            try:
                return await self._read(planned, offset)
            except KeylaneError as error:
                if error.retry is RetryRule.NEVER or isinstance(error, CorruptBatchError):
                    raise
                pause_s = pauses.next_ms() / 1000
                if _now_s() + pause_s > began_s + PATIENCE_S:
                    raise _unreadable(planned, offset, _now_s() - began_s, error) from error
            await asyncio.sleep(pause_s)
            await self._look_up(planned)

    async def _read(self, planned: PlannedRange, offset: int) -> tuple[Batches, memoryview]:
        bytes_max = min(PULL_BYTES_MAX, self._pace.bytes_max)
        request = Read(planned.partition_id, offset, bytes_max, background=True)
        address = self._addresses[planned.partition_id]
        broker = self._loop.broker(self._options.secured, address)
        try:
            answer, payload = await broker.call(request)
        except OffsetOutOfRangeError as error:
            raise _outside(planned, offset, error.first_offset, error.next_offset) from error
        if not isinstance(answer, Batches) or (payload and answer.upto <= offset):
            raise CorruptBatchError("the broker answered something else", answer=str(answer))
        if answer.first_offset > offset or not payload:
            raise _outside(planned, offset, answer.first_offset, answer.next_offset)
        return answer, payload

    async def _look_up(self, planned: PlannedRange) -> None:
        """Ask a metaserver for the partition's address; keep the old one if none answers."""
        if self._meta is None:
            network = self._loop.network(self._options.secured)
            self._meta = MetaClient(network, self._options.meta)
        try:
            route = await self._meta.route(planned.subject)
        except KeylaneError:
            return
        for partition in route.partitions:
            if partition.partition_id == planned.partition_id and partition.address is not None:
                self._addresses[planned.partition_id] = partition.address


def _named(planned: PlannedRange) -> str:
    return f"partition {planned.partition_id}, offsets [{planned.start}, {planned.end})"


def _now_s() -> float:
    """Return the time of the event loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


def _unreadable(
    planned: PlannedRange, offset: int, seconds: float, error: KeylaneError
) -> UnreachableError:
    return UnreachableError(
        Reason.RANGE_UNREADABLE,
        f"{_named(planned)}: no answer from offset {offset} on for {seconds:.0f} s; "
        f"the last error: {error.message}",
        subject=planned.subject,
        partition_id=planned.partition_id,
        start=planned.start,
        end=planned.end,
        offset=offset,
        seconds=round(seconds),
    )


def _outside(
    planned: PlannedRange, offset: int, first_offset: int | None, next_offset: int | None
) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"{_named(planned)}: offset {offset} is not stored; [{first_offset}, {next_offset}) is",
        partition_id=planned.partition_id,
        offset=offset,
        first_offset=first_offset,
        next_offset=next_offset,
    )

"""Sends the rows of one task through a lane per partition, in batches that brokers recognize.

    rows ─by range─▶ lanes ─cut─▶ batches: producer id of (job, task, partition, range),
                       │                   sequence = number of the row ─▶ broker
                       │ sealed: rows that the partition has not stored
                       └▶ lanes of its children, with new numbers

A task starts with the oldest partitions that have data, including sealed ones, because an earlier
attempt may have stored rows there. A sealed partition answers "duplicate" for rows that it already
has, and refuses the others, which go to its children. So each attempt numbers the rows of a lane in
the same way. This holds even if partitions without rows of the task have expired between two
attempts, because lanes also end where the ranges of expired partitions end, which are listed in the
subject's history. If an expired partition had rows of the task, the lanes of its children get other
rows than before, and the brokers refuse these rows.

Invariants
    Lanes cover all logical partitions, no matter which ancestors have expired, so each row has a
    lane.
    The rows of a lane are stored in order, and once, however often the task is repeated.
    A lane only passes rows to the children of its partition after every earlier batch was answered.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import TypeVar

from ...protocol import endpoints
from ...protocol.backoff import Backoff
from ...protocol.batch import encode_body
from ...protocol.clock import Clock
from ...protocol.errors import (
    KeylaneError,
    NotSentError,
    PartitionUnknownError,
    Reason,
    RetryRule,
    RowsError,
    SequenceGapError,
    SequenceReusedError,
    StaleRouteError,
    WrongBrokerError,
)
from ...protocol.frames import Append
from ...protocol.limits import BATCHES_IN_FLIGHT_MAX, LOGICAL_PARTITIONS
from ...protocol.record import FLAG_NUMBERED
from ...protocol.routing import Partition, Route
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.network import Channel, Network
from .job import check_subject_id, producer_id
from .retrying import retry_call
from .rows import BatchCutter, Body, RowColumns, Span
from .shares import KnownRanges, RangeShare, oldest_shares

CALL_TIMEOUT_MS = 10_000
QUEUE_MAX = 16
"""The number of unanswered batches in a lane above which the task waits."""
T = TypeVar("T")
_BACKOFF = Backoff()
_MOVED = (PartitionUnknownError, WrongBrokerError)


class TaskSender:
    """
    Sends the rows of a task to a subject.

    Args:
        identity: identifies the task in the same way in each attempt: the job, or the query and the
            batch, followed by the number of the task.
        sent_at_ns: the time for rows without one, in nanoseconds since 1970.
        timeout_ms: the time in milliseconds for which a batch is retried.
        subject_id: the id of the subject, so that a later subject with the same name gets no rows;
            0 for the subject that has the name now.
    """

    def __init__(
        self,
        network: Network,
        meta: MetaClient,
        subject: str,
        *,
        identity: Sequence[object],
        task: int,
        sent_at_ns: int,
        timeout_ms: int,
        clock: Clock,
        rng: random.Random,
        subject_id: int = 0,
    ) -> None:
        self.network = network
        self.meta = meta
        self.subject = subject
        self.subject_id = subject_id
        self.identity = tuple(identity)
        self.task = task
        self.sent_at_ns = sent_at_ns
        self.timeout_ms = timeout_ms
        self.clock = clock
        self.rng = rng
        self.stored: Counter[int] = Counter()
        """The number of stored rows, by partition id."""
        self._roots: list[Lane] = []
        self._lanes: list[Lane] = []
        self._route: Route | None = None
        self._known_ranges = KnownRanges()
        self._brokers: dict[str, BrokerClient] = {}

    async def open(self) -> Route:
        """Fetch the route, with retries for `timeout_ms`, and create the lanes."""
        route, shares = await self.retry(lambda: self._fetch_shares((0, LOGICAL_PARTITIONS)))
        self._roots = self.create_lanes(shares)
        return route

    async def _fetch_shares(
        self, bounds: tuple[int, int], *, after_id: int = 0
    ) -> tuple[Route, list[RangeShare]]:
        """Return the route, and the shares of the logical partitions in `bounds`."""
        route = await self._fetch_route()
        self._known_ranges.add(route.partitions)
        if self._known_ranges.needs_history(
            route.partitions
        ):  # lanes also end at merged and expired partitions
            history = await self.meta.call(endpoints.HISTORY, subject=self.subject)
            self._known_ranges.add_history(
                [each.partition for each in history.partitions], route.partitions
            )
        return route, oldest_shares(
            route.partitions, bounds, known_ranges=self._known_ranges, after_id=after_id
        )

    async def _fetch_route(self) -> Route:
        route = await self.meta.route(self.subject)
        check_subject_id(route, self.subject_id)
        self._route = route
        self.subject_id = route.subject_id
        return route

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry `call()` for `timeout_ms`; see `retry_call`."""
        return await retry_call(call, timeout_ms=self.timeout_ms, clock=self.clock, rng=self.rng)

    def create_lanes(self, shares: Sequence[RangeShare]) -> list[Lane]:
        """Create a lane for each share."""
        lanes = [Lane(self, each.partition, (each.start, each.end)) for each in shares]
        self._lanes += lanes
        return lanes

    async def put(self, rows: RowColumns) -> None:
        """Add the next rows, and wait until every lane can accept more."""
        distribute(Span(rows, 0, len(rows)), self._roots)
        for lane in list(self._lanes):
            await lane.wait_for_room()

    async def finish(self) -> None:
        """Send the remaining rows, and wait until all rows are stored."""
        finished_count = 0
        while finished_count < len(self._lanes):  # the lanes of sealed partitions add more lanes
            lane = self._lanes[finished_count]
            await lane.finish()
            finished_count += 1

    def broker_of(self, partition: Partition) -> BrokerClient:
        """Return a client for the partition's broker in the newest route. Raises NotSentError if
        there is none.
        """
        assert self._route is not None
        for each in self._route.partitions:
            if each.partition_id == partition.partition_id:
                partition = each
        if partition.address is None:
            raise NotSentError(f"broker group {partition.broker_group} is not available")
        if partition.address not in self._brokers:
            self._brokers[partition.address] = BrokerClient(self.network, partition.address)
        return self._brokers[partition.address]

    async def refresh(self) -> None:
        """Fetch the route, or keep the old one if that fails."""
        with suppress(KeylaneError):
            await self._fetch_route()

    async def shares_after(self, sealed: Partition, bounds: tuple[int, int]) -> list[RangeShare]:
        """Return the shares of a sealed partition's children in `bounds`. Waits until the route
        contains all the children.
        """
        _, shares = await self.retry(
            lambda: self._fetch_shares(bounds, after_id=int(sealed.partition_id))
        )
        return shares

    async def close(self) -> None:
        """Cancel all lanes, and close the connections."""
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(
            *(lane.task for lane in self._lanes if lane.task), return_exceptions=True
        )
        for broker in self._brokers.values():
            await broker.close()


def distribute(span: Span, lanes: Sequence[Lane]) -> None:
    """Add the rows to the lanes that cover their logical partitions, in order."""
    unassigned = span.end - span.start
    for number, part in span.split_by_bounds([lane.bounds for lane in lanes]):
        unassigned -= part.end - part.start
        lanes[number].add(part)
    assert not unassigned, f"{unassigned} rows without a lane"


class _Batch:
    """An unanswered batch: its bytes and its rows."""

    __slots__ = ("count", "data", "sequence", "spans")

    def __init__(self, body: Body, data: bytes, sequence: int) -> None:
        self.spans = body.spans
        self.count = body.count
        self.data = data
        self.sequence = sequence


class Lane:
    """Sends the rows of a task for one partition, or for its children once it is sealed."""

    def __init__(
        self,
        sender: TaskSender,
        partition: Partition,
        bounds: tuple[int, int],
    ) -> None:
        self.bounds = bounds
        self.task: asyncio.Task[None] | None = None
        self._sender = sender
        self._partition = partition
        is_whole_range = bounds == (partition.range_start, partition.range_end)
        # The name does not include the partitions that refused the rows earlier, because a repeated
        # attempt skips those that have expired.
        self._name = (int(partition.partition_id), *(() if is_whole_range else bounds))
        self._producer_id = producer_id(*sender.identity, *self._name)
        self._sequence = 0
        self._digest = 0
        self._cutter = BatchCutter()
        self._batches: deque[_Batch] = deque()
        """The unanswered batches, oldest first."""
        self._children: list[Lane] | None = None
        # Each event is only cleared by the method that waits for it.
        self._work_event = asyncio.Event()
        """Set when there is a batch to send, or a call has ended. `_stream` waits for it."""
        self._progress = asyncio.Event()
        """Set when a batch was stored or passed to children. `wait_for_room` and `finish` wait for
        it.
        """

    # ── filling ───────────────────────────────────────────────────────────────────────────────────
    def add(self, span: Span) -> None:
        """Add the next rows. Complete batches are sent."""
        if self._children is not None:
            distribute(span, self._children)
            return
        for spans in self._cutter.add(span):
            self._queue_batch(spans)

    def _queue_batch(self, spans: Sequence[Span]) -> None:
        body = Body(spans, sent_at_ns=self._sender.sent_at_ns, previous_digest=self._digest)
        data = encode_body(
            body.data,
            count=body.count,
            partition_id=self._partition.partition_id,
            first_sent_at_ns=body.first_ns,
            last_sent_at_ns=body.last_ns,
            producer_id=self._producer_id,
            producer_epoch=body.digest,
            sequence=self._sequence,
            flags=FLAG_NUMBERED,
        )
        self._digest = body.digest
        self._batches.append(_Batch(body, data, self._sequence))
        self._sequence += body.count
        if self.task is None:
            self.task = asyncio.create_task(self._run(), name=f"lane {self._name}")
        self._work_event.set()

    async def wait_for_room(self) -> None:
        """Wait until at most QUEUE_MAX batches are unanswered. Raises the lane's error, if there is
        one.
        """
        while len(self._batches) > QUEUE_MAX and self._children is None:
            await self._wait_for_progress()
        if self.task is not None and self.task.done():
            self.task.result()

    async def finish(self) -> None:
        """Send the remaining rows, and wait until each batch is stored or has been passed to the
        children of the sealed partition.
        """
        if self._children is None and (rest_spans := self._cutter.pop_rest()):
            self._queue_batch(rest_spans)
        while self._batches and self._children is None:
            await self._wait_for_progress()
        if self.task is not None and self.task.done():
            self.task.result()

    async def _wait_for_progress(self) -> None:
        assert self.task is not None
        if self.task.done():
            self.task.result()
        self._progress.clear()
        waiter = asyncio.ensure_future(self._progress.wait())
        try:
            await asyncio.wait({waiter, self.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()

    def cancel(self) -> None:
        """Cancel the lane's task."""
        if self.task is not None:
            self.task.cancel()

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    async def _run(self) -> None:
        """Send batches until the partition refuses rows because it is sealed, then pass them to its
        children.
        """
        pauses = _BACKOFF.pauses(self._sender.rng)
        failing_since: int | None = None
        while True:
            first = self._batches[0] if self._batches else None
            try:
                await self._stream()
            except StaleRouteError:
                break
            except KeylaneError as error:
                now_ms = self._sender.clock.boot_ms()
                is_same_batch = bool(self._batches) and self._batches[0] is first
                if failing_since is None or not is_same_batch:
                    failing_since = now_ms
                    pauses.reset()
                self._check_retryable(error, now_ms - failing_since, is_same_batch=is_same_batch)
                await asyncio.sleep(pauses.next_pause_ms() / 1000)
                await self._sender.refresh()
        await self._hand_to_children()

    def _check_retryable(self, error: KeylaneError, waited_ms: int, *, is_same_batch: bool) -> None:
        """
        Raise the error if it is permanent or has lasted too long.

        Args:
            is_same_batch: True if the oldest batch is the one that failed before. A later batch may
                only have been refused because the batches before it were not stored yet.
        """
        details = {"task": self._sender.task, "partition_id": self._partition.partition_id}
        if isinstance(error, SequenceReusedError):
            raise RowsError(
                Reason.ROWS_DIFFER,
                f"task {self._sender.task} was run before, and had other rows for partition "
                f"{self._partition.partition_id}",
                **details,
            ) from error
        is_forgotten = (
            is_same_batch
            and isinstance(error, SequenceGapError)
            and (error.expected is None or error.expected < self._batches[0].sequence)
        )
        is_transient = error.retry is not RetryRule.NEVER or isinstance(
            error, (*_MOVED, SequenceGapError)
        )
        if is_forgotten or not is_transient or waited_ms >= self._sender.timeout_ms:
            raise error

    async def _stream(self) -> None:
        """Send batches, several at a time, until one fails. Then wait for all pending calls, and
        raise the error.
        """
        channel = await self._sender.broker_of(self._partition).channel()
        calls_in_flight: deque[asyncio.Task[None]] = deque()
        try:
            while True:
                while calls_in_flight and calls_in_flight[0].done():
                    calls_in_flight[0].result()
                    calls_in_flight.popleft()
                    self._record_stored()
                while len(calls_in_flight) < min(len(self._batches), BATCHES_IN_FLIGHT_MAX):
                    batch = self._batches[len(calls_in_flight)]
                    call = asyncio.create_task(self._append(channel, batch))
                    call.add_done_callback(lambda _: self._work_event.set())
                    calls_in_flight.append(call)
                self._work_event.clear()
                if not calls_in_flight or not calls_in_flight[0].done():
                    await self._work_event.wait()
        except asyncio.CancelledError:
            for call in calls_in_flight:
                call.cancel()
            raise
        finally:
            for result in await asyncio.gather(*calls_in_flight, return_exceptions=True):
                if isinstance(result, BaseException):
                    break
                self._record_stored()

    async def _append(self, channel: Channel, batch: _Batch) -> None:
        request = Append(self._partition.partition_id)
        await channel.call(request, batch.data, timeout_ms=CALL_TIMEOUT_MS)

    def _record_stored(self) -> None:
        batch = self._batches.popleft()
        self._sender.stored[int(self._partition.partition_id)] += batch.count
        self._progress.set()

    async def _hand_to_children(self) -> None:
        """Pass the rows that the sealed partition has not stored to its children."""
        shares = await self._sender.shares_after(self._partition, self.bounds)
        lanes = self._sender.create_lanes(shares)
        for span in chain(*(batch.spans for batch in self._batches), self._cutter.pop_rest()):
            distribute(span, lanes)
        self._batches.clear()
        self._children = lanes
        self._progress.set()

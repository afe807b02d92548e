"""
Reads the logic queues of a static subject by logic offset, across all their partitions, without a
group or locks.

read(queue, offset) ─▶ the partition with this offset ─▶ its broker
      ▲                        │                         ─▶ messages of this partition only
      │                        │ sealed, and read to its end
      ╰────────────────────────┴─▶ the next partition, at the same logic offset, or at a higher
                                   one after a loss
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self

from ...protocol import endpoints
from ...protocol.address import parse_addresses
from ...protocol.codecs.codec import Codec, V, check_codec
from ...protocol.control import FoundOffset, PartitionStatus, TimeBound
from ...protocol.errors import (
    InvalidRequestError,
    NotFoundError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
)
from ...protocol.frames import Batches, Read
from ...protocol.http.tls_settings import TlsSettings
from ...protocol.ids import MAX_I64, check_name, check_offset
from ...protocol.message import Message
from ...protocol.queues import (
    QueueView,
    Segment,
    SegmentView,
    build_segment,
    is_behind_loss,
    logic_cursor,
    logic_offset_at,
    outside_queue_error,
    queue_max,
    queue_min,
)
from ...protocol.reading.instants import check_unit
from ...protocol.routing import Partition, PartitionState
from ...protocol.settings import is_within
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.connections import Connections, clean_up, gather_limited
from ...rpc.environment import Environment, environment_of
from ...rpc.loop_binding import LoopBoundClient
from ..decode import read_messages

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class QueueSlice(Generic[V]):
    """Messages of a queue in offset order. `next_offset` is the logic offset of the next read."""

    messages: list[Message[V]]
    next_offset: int
    lost: bool = False
    """True if an unknown number of messages between the requested offset and these messages were
    lost with a disk.
    """


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """The progress of a consumer group on a queue, in logic offsets."""

    queue: int
    cursor: int
    """All messages below the cursor are acked."""
    min_offset: int
    """The logic offset of the first stored message."""
    max_offset: int
    """One past the logic offset of the last message."""
    lag: int
    """The number of stored messages that are not acked."""


class _ReportedSegment(NamedTuple):
    """A segment of a queue as its broker reports it."""

    partition: Partition
    segment: Segment
    status: PartitionStatus


class QueueReader(LoopBoundClient, Generic[V]):
    """
    Reads the queues of a static subject.

        async with QueueReader("127.0.0.1:7000", subject="orders") as reader:
            result = await reader.read(0, 1_000)
            result.messages[0].logic_offset
            offset = await reader.offset_at(0, 1_700_000_000_000)

    All offsets are logic offsets: they count the messages of a queue across all its partitions, so
    a message keeps its offset when the queue moves.
    """

    def __init__(
        self,
        meta: str | Iterable[str],
        *,
        subject: str,
        codec: Codec[V] | None = None,
        call_timeout_ms: int = 5_000,
        wait_s: float = 0,
        tls: TlsSettings | None = None,
        token: str | None = None,
        _environment: Environment | None = None,
    ) -> None:
        """
        Create a reader; `async with` opens it.

        Args:
            meta: `host:port` of a metaserver; for several metaservers, an iterable of strings or
                one comma-separated string.
            subject: an existing static subject.
            codec: decodes values in `message.decode()`; None: it returns bytes.
            call_timeout_ms: the timeout of each call to a metaserver or broker, in milliseconds.
            wait_s: how many seconds opening waits for a metaserver that is still starting; 0:
                opening contacts no metaserver.
            tls: the certificate authority of the servers; None: the environment variable
                KEYLANE_TLS_CA, or no TLS.
            token: the token for a cluster with access control; None: the file named by
                KEYLANE_TOKEN_FILE, or the value of KEYLANE_TOKEN.

        Raises:
            ConfigError, InvalidRequestError: an argument is invalid.
        """
        check_name("subject", subject)
        self._addresses = parse_addresses(meta)
        if codec is not None:
            check_codec(codec)
        self._subject = subject
        self._codec = codec
        self._call_timeout_ms = call_timeout_ms
        self._environment = environment_of(_environment)
        self._connections = Connections(
            self._environment.network,
            timeout_ms=call_timeout_ms,
            what="reader",
            wait_s=wait_s,
            tls=tls,
            token=token,
        )
        self._views: dict[int, QueueView] = {}

    def __repr__(self) -> str:
        where, state = ", ".join(self._addresses), self._connections.loop_binding.state
        return f"<QueueReader of {self._subject} at {where}, {state}>"

    async def __aenter__(self) -> Self:
        """
        Open the reader; if `wait_s` is set, wait for a metaserver.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver replied within `wait_s`.
            UsageError: the reader is already open, or was opened before a fork.
        """
        network = self._connections.open()
        self._views = {}
        meta = MetaClient(network, self._addresses, timeout_ms=self._call_timeout_ms)
        await self._connections.wait_for(meta)
        return self

    async def close(self) -> None:
        """Close all connections. A cancellation is re-raised afterwards."""
        await clean_up(self._connections.close)

    # ── what users call ───────────────────────────────────────────────────────────────────────────
    async def queues(self) -> list[QueueView]:
        """
        Return all queues in numerical order, with their partitions.

        Raises:
            SubjectUnknownError: there is no such subject.
            ConflictError: the subject is not static.
            ClosedError, UsageError: the reader is not open, or not open in this process and event
                loop.
        """
        self._connections.loop_binding.check()
        network = self._connections.network
        assert network is not None
        meta = MetaClient(network, self._addresses, timeout_ms=self._call_timeout_ms)
        views = (await meta.call(endpoints.QUEUES, subject=self._subject)).queues
        self._views = {view.queue: view for view in views}
        return views

    async def read(self, queue: int, offset: int, *, bytes_max: int = READ_BYTES) -> QueueSlice[V]:
        """
        Return messages starting at a logic offset, all from the same partition.

        Args:
            queue: the number of the queue, from 0.
            offset: the logic offset of the first message.
            bytes_max: the maximum size of the batches to read, in bytes, from 1 to 2**63 - 1; a
                broker returns at most 2 MiB at once, but a single larger batch is returned whole.

        Returns:
            The messages; none if the queue currently ends at `offset`. If messages were lost with a
            disk, `lost` is set, and the messages are those after the loss, of which there may be
            none yet.

        Raises:
            InvalidRequestError: `bytes_max` or `offset` is out of range.
            NotFoundError: there is no such queue.
            OffsetOutOfRangeError: `offset` is below the queue's first offset or above its end,
                which are `error.first_offset` and `error.next_offset`.
            UnreachableError: the partition's broker does not reply.
        """
        check_offset(offset)
        if not is_within(bytes_max, 1, MAX_I64):
            raise InvalidRequestError(
                f"bytes_max must be a whole number from 1 to 2**63 - 1, not {bytes_max!r:.40}"
            )
        _check_queue(queue)
        is_cached = queue in self._views
        result = await self._read_segments(
            await self._queue_view(queue), offset, bytes_max, is_fresh=not is_cached
        )
        if result is None:
            view = await self._queue_view(queue, refresh=True)
            result = await self._read_segments(view, offset, bytes_max, is_fresh=True)
        assert result is not None
        return result

    async def bounds(self, queue: int) -> tuple[int, int]:
        """Return the logic offset of the first message, and one past that of the last message. They
        are equal if the queue is empty.
        """
        segments = [reported.segment for reported in await self._fetch_segments(queue)]
        return queue_min(segments), queue_max(segments)

    async def offset_at(
        self, queue: int, at_ms: int, bound: TimeBound = TimeBound.LOWER
    ) -> int | None:
        """
        Return the logic offset of a message by the time at which it was stored, according to the
        brokers' clocks.

        Args:
            at_ms: a time in milliseconds since 1970.
            bound: LOWER: the first message stored at or after that time; UPPER: the last one stored
                at or before it.

        Returns:
            The offset, or None if there is no such message.

        Raises:
            NotFoundError: there is no such queue.
            InvalidRequestError: `at_ms` is not in [0, 2**63), or looks like seconds, microseconds
                or nanoseconds; or `bound` is not a TimeBound.
            UnreachableError: the broker of a partition does not reply.
        """
        if not is_within(at_ms, 0, MAX_I64):
            raise InvalidRequestError(
                f"at_ms must be milliseconds since 1970, from 0 to 2**63 - 1, not {at_ms!r:.40}"
            )
        check_unit("at_ms", at_ms)
        if bound not in tuple(TimeBound):
            raise InvalidRequestError(f"bound must be {' or '.join(TimeBound)}, not {bound!r:.40}")
        reported_segments = await self._fetch_segments(queue)

        def offset_at(reported: _ReportedSegment) -> Awaitable[FoundOffset]:
            return self._broker(reported.partition).control(
                endpoints.OFFSET_AT,
                query={"at_ms": at_ms, "bound": bound},
                id=reported.segment.partition_id,
            )

        replies = await gather_limited(offset_at, reported_segments)
        offsets = [reply.offset for reply in replies]
        return logic_offset_at([reported.segment for reported in reported_segments], offsets, bound)

    async def progress(self, queue: int, group: str) -> QueueProgress:
        """Return a consumer group's progress. A group that has acked nothing is at the first
        message.
        """
        check_name("consumer group", group)
        reported_segments = await self._fetch_segments(queue)
        segments = [reported.segment for reported in reported_segments]
        cursors: dict[int, int] = {}
        lag = 0
        for reported in reported_segments:
            segment_lag = reported.segment.next_offset - reported.segment.first_offset
            for status in reported.status.groups:
                if status.group == group:
                    cursors[reported.segment.partition_id] = status.cursor
                    segment_lag = status.lag
            lag += segment_lag
        return QueueProgress(
            queue=queue,
            cursor=logic_cursor(segments, cursors),
            min_offset=queue_min(segments),
            max_offset=queue_max(segments),
            lag=lag,
        )

    # ── views and states ──────────────────────────────────────────────────────────────────────────
    async def _queue_view(self, queue: int, *, refresh: bool = False) -> QueueView:
        self._connections.loop_binding.check()
        _check_queue(queue)
        if refresh or queue not in self._views:
            await self.queues()
        view = self._views.get(queue)
        if view is None:
            raise NotFoundError(
                Reason.QUEUE_UNKNOWN,
                f"subject {self._subject!r} has queues 0 to {len(self._views) - 1}, not {queue}",
                queue=queue,
            )
        return view

    async def _fetch_segments(self, queue: int) -> list[_ReportedSegment]:
        """Return the segments of a queue, with the latest reports from their brokers."""
        view = await self._queue_view(queue, refresh=True)
        statuses = await gather_limited(self._status, view.segments)
        last = view.segments[-1]
        if statuses[-1].state is PartitionState.SEALED and last.logic_end is None:
            # The queue is moving, and the next partition may have been opened in the meantime.
            view = await self._queue_view(queue, refresh=True)
            statuses = await gather_limited(self._status, view.segments)
        return [
            _ReportedSegment(segment.partition, build_segment(segment, status), status)
            for segment, status in zip(view.segments, statuses, strict=True)
        ]

    async def _status(self, segment: SegmentView) -> PartitionStatus:
        return await self._broker(segment.partition).control(
            endpoints.PARTITION, id=segment.partition.partition_id
        )

    def _broker(self, partition: Partition) -> BrokerClient:
        address = partition.address
        if address is None:
            raise NotSentError.of_group(partition.broker_group)
        return self._connections.broker_at(address)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    async def _read_segments(
        self, view: QueueView, offset: int, bytes_max: int, *, is_fresh: bool, lost: bool = False
    ) -> QueueSlice[V] | None:
        """
        Return the messages at `offset`.

        Args:
            is_fresh: True if the view was just fetched; otherwise the result is None if the view
                may be stale.
            lost: True if messages before `offset` are known to be lost.
        """
        for segment in view.segments:
            start = segment.partition.logic_start
            if offset < start and is_behind_loss(segment.partition):
                offset, lost = start, True
            if segment.logic_end is not None and offset >= segment.logic_end:
                continue
            try:
                if offset < start:
                    # Retention has removed the earlier partitions.
                    raise OffsetOutOfRangeError(offset=offset)
                reply, payload = await self._broker(segment.partition).call(
                    Read(segment.partition.partition_id, offset - start, bytes_max)
                )
            except OffsetOutOfRangeError:
                if not is_fresh:
                    return None
                low, high = await self.bounds(view.queue)
                if not (lost or low <= offset <= high):
                    raise outside_queue_error(offset, low, high) from None
                # Retention has removed the start of a later partition.
                first = (await self._status(segment)).first_offset
                offset = max(offset, start + first)
                return await self._read_segments(
                    self._views[view.queue], offset, bytes_max, is_fresh=True, lost=lost
                )
            except (PartitionUnknownError, NotSentError):
                if not is_fresh:
                    return None
                raise
            assert isinstance(reply, Batches)
            if not payload:
                if reply.sealed and not is_fresh:
                    return None
                return QueueSlice([], offset, lost)
            messages = read_messages(
                payload,
                offset - start,
                subject=self._subject,
                partition=segment.partition,
                codec=self._codec,
            )
            return QueueSlice(messages, start + reply.upto, lost)
        return None if not is_fresh else QueueSlice([], offset, lost)


def _check_queue(queue: object) -> None:
    """Raise NotFoundError if `queue` cannot be a queue number."""
    if not is_within(queue, 0, MAX_I64):
        raise NotFoundError(
            Reason.QUEUE_UNKNOWN,
            f"a queue number is a whole number from 0 on, not {queue!r:.40}",
        )

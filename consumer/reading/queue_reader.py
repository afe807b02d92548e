"""Reads the logic queues of a static subject by logic offset, over all their partitions; no group,
no locks.

read(queue, offset) ─▶ the partition with this offset ─▶ its broker
      ▲                        │                         ─▶ messages, none of the next partition
      │                        │ sealed, and read to its end
      ╰────────────────────────┴─▶ the next partition, at the same logic offset, or after a loss
                                   at a higher one
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self

from ...protocol import endpoints
from ...protocol.address import addresses_of
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
    is_behind_loss,
    logic_cursor,
    logic_offset_at,
    outside,
    queue_max,
    queue_min,
    segment_of,
)
from ...protocol.reading.instants import check_unit
from ...protocol.routing import Partition, PartitionState
from ...protocol.settings import is_within
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.connections import Connections, clean_up, in_turns
from ...rpc.environment import Environment, environment_of
from ...rpc.home import LoopBoundClient
from .read_messages import read_messages

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class QueueSlice(Generic[V]):
    """The messages of a queue, by offset; `next_offset` is the logic offset of the next read."""

    messages: list[Message[V]]
    next_offset: int
    lost: bool = False
    """True if messages between the requested offset and these are lost with a disk; their number is
    unknown.
    """


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """The progress of a consumer group on a queue, in logic offsets."""

    queue: int
    cursor: int
    """The cursor: all messages below it are acked."""
    min_offset: int
    """The logic offset of the first message that is still stored."""
    max_offset: int
    """The logic offset after the last message."""
    lag: int
    """The number of messages that are stored and not acked."""


class _Link(NamedTuple):
    """A segment of a queue, as its broker reports it."""

    partition: Partition
    segment: Segment
    status: PartitionStatus


class QueueReader(LoopBoundClient, Generic[V]):
    """
    Reads the queues of a static subject.

        async with QueueReader("127.0.0.1:7000", subject="orders") as reader:
            part = await reader.read(0, 1_000)
            part.messages[0].logic_offset
            offset = await reader.offset_at(0, 1_700_000_000_000)

    Every offset here is a logic offset: it counts the messages of a queue over all its partitions,
    so a message keeps its offset when the queue moves.
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
        Make a reader; `async with` opens it.

        Args:
            meta: `host:port` of a metaserver; for several metaservers, an iterable of texts or one
                text with commas.
            subject: an existing static subject.
            codec: the codec with which `message.decode()` decodes values; None: it returns bytes.
            call_timeout_ms: the milliseconds for each call to a metaserver or broker.
            wait_s: seconds for which opening waits for a metaserver that is still starting; 0: it
                asks none.
            tls: the authority of the servers' certificates; None: KEYLANE_TLS_CA of the
                environment, or no TLS.
            token: the token for a cluster with access control; None: KEYLANE_TOKEN_FILE names its
                file, or KEYLANE_TOKEN has it.

        Raises:
            ConfigError, InvalidRequestError: an argument that cannot work.
        """
        check_name("subject", subject)
        self._addresses = addresses_of(meta)
        if codec is not None:
            check_codec(codec)
        self._subject = subject
        self._codec = codec
        self._timeout_ms = call_timeout_ms
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
        where, state = ", ".join(self._addresses), self._connections.home.state
        return f"<QueueReader of {self._subject} at {where}, {state}>"

    async def __aenter__(self) -> Self:
        """
        Open the reader; with `wait_s`, wait for a metaserver.

        Raises:
            NotSentError, OutcomeUnknownError: no metaserver answers after `wait_s`.
            UsageError: the reader is open, or was before a fork.
        """
        network = self._connections.open()
        self._views = {}
        meta = MetaClient(network, self._addresses, timeout_ms=self._timeout_ms)
        await self._connections.wait_for(meta)
        return self

    async def close(self) -> None:
        """Close every connection; a cancellation is raised when that is done."""
        await clean_up(self._connections.close)

    # ── what users call ───────────────────────────────────────────────────────────────────────────
    async def queues(self) -> list[QueueView]:
        """
        Return the queues by number, each with its partitions.

        Raises:
            SubjectUnknownError, ConflictError
            ClosedError, UsageError: the reader is not open, or not open in this process and event
                loop.
        """
        self._connections.home.check()
        network = self._connections.network
        assert network is not None
        meta = MetaClient(network, self._addresses, timeout_ms=self._timeout_ms)
        views = (await meta.call(endpoints.QUEUES, subject=self._subject)).queues
        self._views = {view.queue: view for view in views}
        return views

    async def read(self, queue: int, offset: int, *, bytes_max: int = READ_BYTES) -> QueueSlice[V]:
        """
        Return messages of one partition from a logic offset on.

        Args:
            queue: number of the queue, from 0.
            offset: logic offset of the first message.
            bytes_max: bytes of the batches to read, from 1 to 2**63 - 1; a broker answers with at
                most 2 MiB at once, and one larger batch is read whole.

        Returns:
            No messages if the queue ends at `offset` now. Where messages are lost with a disk, the
            messages after the loss, perhaps none yet, with `lost` set.

        Raises:
            InvalidRequestError, NotFoundError: `bytes_max` is not in its range.
            OffsetOutOfRangeError: below the queue's first offset or above its end;
            `error.first_offset` and `error.next_offset` have both. UnreachableError: the broker of
            the partition does not answer.
        """
        check_offset(offset)
        if not is_within(bytes_max, 1, MAX_I64):
            raise InvalidRequestError(
                f"bytes_max must be a whole number from 1 to 2**63 - 1, not {bytes_max!r:.40}"
            )
        _check_queue(queue)
        known = queue in self._views
        part = await self._read_in(await self._view(queue), offset, bytes_max, fresh=not known)
        if part is None:
            view = await self._view(queue, refresh=True)
            part = await self._read_in(view, offset, bytes_max, fresh=True)
        assert part is not None
        return part

    async def bounds(self, queue: int) -> tuple[int, int]:
        """Return the logic offset of the first message, and the one after the last; they are equal
        if there is no message.
        """
        chain = [link.segment for link in await self._chain(queue)]
        return queue_min(chain), queue_max(chain)

    async def offset_at(
        self, queue: int, at_ms: int, bound: TimeBound = TimeBound.LOWER
    ) -> int | None:
        """
        Return the logic offset for a time, by the brokers' calendars.

        Args:
            at_ms: milliseconds since 1970.
            bound: LOWER: the first message stored at or after it; UPPER: the last one at or before
                it.

        Returns:
            None if there is no such message.

        Raises:
            NotFoundError
            InvalidRequestError: `at_ms` is not in [0, 2**63), or is seconds, micro- or nanoseconds;
            or `bound` is no bound. UnreachableError: the broker of a partition does not answer.
        """
        if not is_within(at_ms, 0, MAX_I64):
            raise InvalidRequestError(
                f"at_ms must be milliseconds since 1970, from 0 to 2**63 - 1, not {at_ms!r:.40}"
            )
        check_unit("at_ms", at_ms)
        if bound not in tuple(TimeBound):
            raise InvalidRequestError(f"bound must be {' or '.join(TimeBound)}, not {bound!r:.40}")
        chain = await self._chain(queue)

        def offset_at(link: _Link) -> Awaitable[FoundOffset]:
            return self._broker(link.partition).control(
                endpoints.OFFSET_AT,
                query={"at_ms": at_ms, "bound": bound},
                id=link.segment.partition_id,
            )

        answers = await in_turns(offset_at, chain)
        offsets = [answer.offset for answer in answers]
        return logic_offset_at([link.segment for link in chain], offsets, bound)

    async def progress(self, queue: int, group: str) -> QueueProgress:
        """Return the progress of a consumer group; a group that has acked nothing is at the first
        message.
        """
        check_name("consumer group", group)
        chain = await self._chain(queue)
        segments = [link.segment for link in chain]
        cursors: dict[int, int] = {}
        lag = 0
        for link in chain:
            left = link.segment.next_offset - link.segment.first_offset
            for status in link.status.groups:
                if status.group == group:
                    cursors[link.segment.partition_id], left = status.cursor, status.lag
            lag += left
        return QueueProgress(
            queue=queue,
            cursor=logic_cursor(segments, cursors),
            min_offset=queue_min(segments),
            max_offset=queue_max(segments),
            lag=lag,
        )

    # ── views and states ──────────────────────────────────────────────────────────────────────────
    async def _view(self, queue: int, *, refresh: bool = False) -> QueueView:
        self._connections.home.check()
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

    async def _chain(self, queue: int) -> list[_Link]:
        """Return the segments of a queue, as their brokers report them now."""
        view = await self._view(queue, refresh=True)
        states = await in_turns(self._status, view.segments)
        last = view.segments[-1]
        if states[-1].state is PartitionState.SEALED and last.logic_end is None:
            # The queue is moving: the next partition may be open by now.
            view = await self._view(queue, refresh=True)
            states = await in_turns(self._status, view.segments)
        return [
            _Link(segment.partition, segment_of(segment, status), status)
            for segment, status in zip(view.segments, states, strict=True)
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
    async def _read_in(
        self, view: QueueView, offset: int, bytes_max: int, *, fresh: bool, lost: bool = False
    ) -> QueueSlice[V] | None:
        """
        Return the messages at `offset`.

        Args:
            fresh: whether the view was fetched just now; otherwise the result is None where it may
                be out of date.
            lost: whether messages before `offset` are known to be lost.
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
                answer, payload = await self._broker(segment.partition).call(
                    Read(segment.partition.partition_id, offset - start, bytes_max)
                )
            except OffsetOutOfRangeError:
                if not fresh:
                    return None
                low, high = await self.bounds(view.queue)
                if not (lost or low <= offset <= high):
                    raise outside(offset, low, high) from None
                # Retention has removed the head of a later partition: continue at its first
                # message.
                first = (await self._status(segment)).first_offset
                offset = max(offset, start + first)
                return await self._read_in(
                    self._views[view.queue], offset, bytes_max, fresh=True, lost=lost
                )
            except (PartitionUnknownError, NotSentError):
                if not fresh:
                    return None
                raise
            assert isinstance(answer, Batches)
            if not payload:
                if answer.sealed and not fresh:
                    return None
                return QueueSlice([], offset, lost)
            messages = read_messages(
                payload,
                offset - start,
                subject=self._subject,
                partition=segment.partition,
                codec=self._codec,
            )
            return QueueSlice(messages, start + answer.upto, lost)
        return None if not fresh else QueueSlice([], offset, lost)


def _check_queue(queue: object) -> None:
    """Raise NotFoundError if `queue` cannot be the number of a queue."""
    if not is_within(queue, 0, MAX_I64):
        raise NotFoundError(
            Reason.QUEUE_UNKNOWN,
            f"the number of a queue is a whole number from 0 on, not {queue!r:.40}",
        )

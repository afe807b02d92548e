"""Reads the logic queues of a static subject by logic offset, over all their partitions; no group, no locks.

read(queue, offset) ─▶ the partition that holds it ─▶ its broker ─▶ messages, none of the next partition
                               │ sealed, and read to its end
                               └─▶ the partition that goes on, at the same logic offset, or behind a loss at a higher one
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from ...protocol.address import addresses_of
from ...protocol.batch import batch_starts, columns
from ...protocol.control import PartitionStatus, TimeBound
from ...protocol.errors import (
    ClosedError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    QueueUnknownError,
)
from ...protocol.frames import Batches, Read
from ...protocol.ids import check_name, check_offset
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
from ...protocol.routing import Partition, PartitionState
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.connections import Connections
from ...rpc.environment import Environment
from ...rpc.home import Resident
from .decode import decode_messages

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class QueueSlice:
    """Messages of a queue, one after another; `next_offset` is the logic offset to read on from."""

    messages: list[Message]
    next_offset: int
    lost: bool = False
    """True if messages between the offset that was asked for and these are lost with a disk; nobody knows how many."""


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """A consumer group on a queue, in logic offsets: its cursor, the first message, one past the last, what is left."""

    queue: int
    cursor: int
    min_offset: int
    max_offset: int
    lag: int


class _Link(NamedTuple):
    """A segment of a queue as its broker has it."""

    partition: Partition
    segment: Segment
    status: PartitionStatus


@dataclass(frozen=True, slots=True)
class _ReadFrom:
    """Where a message was read; it takes no acks."""

    queue: int
    logic_start: int

    async def ack(self, message: Message) -> None:
        raise ClosedError(f"message {message.offset} was read, not handed out by a consumer")


class QueueReader(Resident):
    """
    Looks at the queues of a static subject.

        async with QueueReader("127.0.0.1:7000", subject="flights") as reader:
            found = await reader.read(0, 1_000)
            found.messages[0].logic_offset
            at = await reader.offset_at(0, 1_700_000_000_000)

    Every offset here is a logic offset: it counts the messages of a queue over all its partitions, so a message keeps
    its offset when the queue moves.
    """

    def __init__(
        self,
        meta: str | Iterable[str],
        *,
        subject: str,
        call_timeout_ms: int = 5_000,
        _environment: Environment | None = None,
    ) -> None:
        """
        Make a reader; `async with` opens it.

        Args:
            meta: `host:port` of a metaserver; of several, an iterable of texts or one text with commas.
            subject: an existing static subject.
            call_timeout_ms: of each call to a metaserver or broker.

        Raises:
            ConfigError, InvalidNameError: an argument that cannot work.
        """
        check_name("subject", subject)
        self._addresses = addresses_of(meta)
        self._subject = subject
        self._timeout_ms = call_timeout_ms
        self._environment = _environment or Environment()
        self._connections = Connections(
            self._environment.network, timeout_ms=call_timeout_ms, what="reader"
        )
        self._views: dict[int, QueueView] = {}

    async def __aenter__(self) -> Self:
        self._connections.open()
        self._views = {}
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._connections.close()

    # ── what users call ──────────────────────────────────────────────────────────────────────────────
    async def queues(self) -> list[QueueView]:
        """
        The queues by number, each with its partitions.

        Raises:
            SubjectUnknownError, SubjectNotStaticError
            ClosedError, ForkedError, OtherLoopError: not open, or not here.
        """
        self._connections.home.check()
        network = self._connections.network
        assert network is not None
        meta = MetaClient(network, self._addresses, timeout_ms=self._timeout_ms)
        found = (await meta.queues(self._subject)).queues
        self._views = {one.queue: one for one in found}
        return found

    async def read(self, queue: int, offset: int, *, bytes_max: int = READ_BYTES) -> QueueSlice:
        """
        Messages from a logic offset on, of one partition; none if the queue ends there now.

        Where they are lost with a disk, those behind the loss, with `lost` set; perhaps none yet.

        Raises:
            OffsetInvalidError, QueueUnknownError
            OffsetOutOfRangeError: below the queue's min or above its max, which its details name.
            UnreachableError: the broker that has them does not answer.
        """
        check_offset(offset)
        known = queue in self._views
        found = await self._read_in(await self._view(queue), offset, bytes_max, sure=not known)
        if found is None:
            found = await self._read_in(
                await self._view(queue, again=True), offset, bytes_max, sure=True
            )
        assert found is not None
        return found

    async def bounds(self, queue: int) -> tuple[int, int]:
        """Logic offsets of the first message and one past the last; equal when there is none."""
        chain = [one.segment for one in await self._chain(queue)]
        return queue_min(chain), queue_max(chain)

    async def offset_at(
        self, queue: int, at_ms: int, bound: TimeBound = TimeBound.LOWER
    ) -> int | None:
        """
        The logic offset for a time, by the brokers' calendars.

        Args:
            at_ms: milliseconds since 1970.
            bound: LOWER: the first message stored at or after it; UPPER: the last one at or before it.

        Returns:
            None if there is no such message.
        """
        chain = await self._chain(queue)
        found = await asyncio.gather(
            *(
                self._broker(one.partition).offset_at(one.segment.partition_id, at_ms, bound)
                for one in chain
            )
        )
        offsets = [one.offset for one in found]
        return logic_offset_at([one.segment for one in chain], offsets, bound)

    async def progress(self, queue: int, group: str) -> QueueProgress:
        """How far a consumer group is; one that has not begun is at the first message."""
        check_name("consumer group", group)
        chain = await self._chain(queue)
        segments = [link.segment for link in chain]
        cursors: dict[int, int] = {}
        lag = 0
        for link in chain:
            left = link.segment.next_offset - link.segment.first_offset
            for one in link.status.groups:
                if one.group == group:
                    cursors[link.segment.partition_id], left = one.cursor, one.lag
            lag += left
        return QueueProgress(
            queue=queue,
            cursor=logic_cursor(segments, cursors),
            min_offset=queue_min(segments),
            max_offset=queue_max(segments),
            lag=lag,
        )

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────
    async def _view(self, queue: int, *, again: bool = False) -> QueueView:
        self._connections.home.check()
        if again or queue not in self._views:
            await self.queues()
        found = self._views.get(queue)
        if found is None:
            raise QueueUnknownError(
                f"subject {self._subject!r} has queues 0 to {len(self._views) - 1}, not {queue}",
                queue=queue,
            )
        return found

    async def _chain(self, queue: int) -> list[_Link]:
        """The segments of a queue as their brokers have them now."""
        view = await self._view(queue, again=True)
        found = await asyncio.gather(*(self._status(one) for one in view.segments))
        last = view.segments[-1]
        if found[-1].state is PartitionState.SEALED and last.logic_end is None:
            # It is moving: perhaps the next one is open by now.
            view = await self._view(queue, again=True)
            found = await asyncio.gather(*(self._status(one) for one in view.segments))
        return [
            _Link(one.partition, segment_of(one, status), status)
            for one, status in zip(view.segments, found, strict=True)
        ]

    async def _status(self, one: SegmentView) -> PartitionStatus:
        return await self._broker(one.partition).partition(one.partition.partition_id)

    def _broker(self, partition: Partition) -> BrokerClient:
        address = partition.address
        if address is None:
            raise NotSentError(f"broker group {partition.broker_group!r} is not available now")
        return self._connections.broker_at(address)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────
    async def _read_in(
        self, view: QueueView, offset: int, bytes_max: int, *, sure: bool, lost: bool = False
    ) -> QueueSlice | None:
        """What there is at `offset`; None if the view may be out of date and is not `sure`."""
        for one in view.segments:
            start = one.partition.logic_start
            if offset < start and is_behind_loss(one.partition):
                offset, lost = start, True
            if one.logic_end is not None and offset >= one.logic_end:
                continue
            try:
                if offset < start:
                    raise OffsetOutOfRangeError(offset=offset)  # what was before it is gone
                answer, payload = await self._broker(one.partition).call(
                    Read(0, one.partition.partition_id, offset - start, bytes_max)
                )
            except OffsetOutOfRangeError:
                if not sure:
                    return None
                low, high = await self.bounds(view.queue)
                if not (lost or low <= offset <= high):
                    raise outside(offset, low, high) from None
                # Retention has removed the head of a later partition: go on at what is left.
                first = (await self._status(one)).first_offset
                offset = max(offset, start + first)
                return await self._read_in(
                    self._views[view.queue], offset, bytes_max, sure=True, lost=lost
                )
            except (PartitionUnknownError, NotSentError):
                if not sure:
                    return None
                raise
            assert isinstance(answer, Batches)
            if not payload:
                if answer.sealed and not sure:
                    return None
                return QueueSlice([], offset, lost)
            return QueueSlice(
                self._decode(one.partition, payload, offset - start), start + answer.upto, lost
            )
        return None if not sure else QueueSlice([], offset, lost)

    def _decode(self, partition: Partition, payload: memoryview, offset: int) -> list[Message]:
        """The messages of a payload at and above a physical offset."""
        place = _ReadFrom(partition.queue, partition.logic_start)
        found: list[Message] = []
        for start, header in batch_starts(payload):
            whole = decode_messages(
                columns(payload, header, start),
                header,
                self._subject,
                partition.partition_id,
                0,
                place,
            )
            found += whole[max(offset - header.base_offset, 0) :]
        return found

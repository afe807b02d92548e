"""Reads messages by HTTP: those of a partition by offset, those of a static subject's logic queue
by logic offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..protocol.batch import batch_starts, columns
from ..protocol.control import MessagePage, MessageView
from ..protocol.endpoints import READ_MESSAGES
from ..protocol.errors import (
    ConflictError,
    InvalidRequestError,
    KeylaneError,
    NotFoundError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
    RetryRule,
)
from ..protocol.frames import Batches, Read
from ..protocol.http.message_json import bytes_field, properties_fields
from ..protocol.ids import check_name
from ..protocol.limits import READ_MESSAGES_MAX
from ..protocol.queues import is_behind_loss, outside
from ..protocol.routing import Partition, PartitionState, Route
from ..protocol.text import listed
from ..rpc.answer_room import take_room
from ..rpc.server import ControlRoute, Params, check_params, whole_number
from .peers import Peers

COUNT_DEFAULT = 100
READ_BYTES = 1 << 20
"""The number of bytes of the batches for one answer. One larger batch is read whole."""
FIRST = -1
"""A value in place of an offset: the first one that is stored."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The parameters of a request; exactly one of `partition_id` and `queue` is not None."""

    subject: str
    partition_id: int | None
    queue: int | None
    offset: int
    """The offset, which is a logic offset if a queue is asked for. FIRST means the first one that
    is stored.
    """
    count: int


class MessageReading:
    """Answers `GET /v1/subjects/{subject}/messages`."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def route(self) -> ControlRoute:
        """Return the route of the call."""
        return ControlRoute(READ_MESSAGES, self.read)

    async def read(self, _body: object, params: Params) -> MessagePage:
        """
        Return a page of messages.

        Raises:
            InvalidRequestError, SubjectUnknownError, PartitionUnknownError, ConflictError,
            NotFoundError
            OffsetOutOfRangeError: nothing is stored at this offset; its details have the first one
                and the end.
            UnreachableError: the broker of the partition does not answer.
        """
        asked = _asked(params)
        await take_room(2 * READ_BYTES)
        route = await self._peers.route(asked.subject)
        try:
            page = await self._read_by(route, asked)
        except KeylaneError as error:
            stale = isinstance(error, NotSentError | OffsetOutOfRangeError)
            stale = stale or error.reason is Reason.QUEUE_UNKNOWN
            if not stale and error.retry is not RetryRule.AFTER_NEW_ROUTE:
                raise
            newer = await self._peers.new_route(asked.subject)
            if newer == route:
                raise
        else:
            if asked.queue is None or not page.sealed or page.messages:
                return page
            # The queue may continue in a partition that the known route lacks.
            newer = await self._peers.new_route(asked.subject)
            if newer == route:
                return page
        return await self._read_by(newer, asked)

    async def _read_by(self, route: Route, asked: _Asked) -> MessagePage:
        partition, offset = _located(route, asked)
        shift = partition.logic_start if asked.queue is not None else 0
        physical = offset if offset == FIRST else offset - shift
        try:
            answer, data = await self._read_from(partition, physical)
        except OffsetOutOfRangeError as error:
            if not shift or error.first_offset is None or error.next_offset is None:
                raise
            raise outside(offset, shift + error.first_offset, shift + error.next_offset) from None
        start = answer.first_offset if physical == FIRST else physical
        messages = _messages(data, partition, start=start, count=asked.count)
        following = start + len(messages)
        return MessagePage(
            subject=asked.subject,
            partition_id=partition.partition_id,
            messages=messages,
            next_offset=_behind_loss(route, partition, asked, following, answer)
            or shift + following,
            first_offset=shift + answer.first_offset,
            end_offset=shift + answer.next_offset,
            sealed=answer.sealed,
        )

    async def _read_from(self, partition: Partition, offset: int) -> tuple[Batches, bytes]:
        """Return batches from an offset on. FIRST means the first one that is stored."""
        try:
            request = Read(partition.partition_id, max(offset, 0), READ_BYTES)
            answer, data = await self._peers.call(partition, request)
        except OffsetOutOfRangeError as error:
            if offset != FIRST or error.first_offset is None:
                raise
            request = Read(partition.partition_id, error.first_offset, READ_BYTES)
            answer, data = await self._peers.call(partition, request)
        assert isinstance(answer, Batches)
        return answer, data


def _asked(params: Params) -> _Asked:
    check_params(READ_MESSAGES, params)
    subject = check_name("subject", params["subject"])
    if "partition" in params and "queue" in params:
        raise InvalidRequestError("give a partition or a queue, not both")
    queue = whole_number(params, "queue", FIRST)
    partition_id = whole_number(params, "partition", FIRST)
    return _Asked(
        subject,
        None if queue != FIRST or partition_id == FIRST else partition_id,
        None if queue == FIRST else queue,
        whole_number(params, "offset", FIRST),
        whole_number(params, "count", COUNT_DEFAULT, low=1, high=READ_MESSAGES_MAX),
    )


def _located(route: Route, asked: _Asked) -> tuple[Partition, int]:
    """Return the partition that contains what is asked for, and the offset there, which is a logic
    offset if a queue is asked for.
    """
    if asked.queue is not None:
        return _located_in_queue(route, asked.queue, asked.offset)
    ids = [partition.partition_id for partition in route.partitions]
    if asked.partition_id is None:
        raise InvalidRequestError(
            f"give a partition of subject {asked.subject!r}: {listed(ids)}; or, of a static "
            f"subject, a queue"
        )
    for partition in route.partitions:
        if partition.partition_id == asked.partition_id:
            return partition, asked.offset
    raise PartitionUnknownError(
        f"subject {asked.subject!r} has partitions {listed(ids)}, not {asked.partition_id}",
        partition_id=asked.partition_id,
        subject=asked.subject,
    )


def _located_in_queue(route: Route, queue: int, offset: int) -> tuple[Partition, int]:
    if not route.static:
        raise ConflictError(Reason.SUBJECT_NOT_STATIC, subject=route.subject)
    chain = _chain(route, queue)
    if not chain:
        queues = {partition.queue for partition in route.partitions}
        raise NotFoundError(
            Reason.QUEUE_UNKNOWN,
            f"subject {route.subject!r} has queues 0 to {max(queues, default=0)}, not {queue}",
            subject=route.subject,
            queue=queue,
        )
    if offset == FIRST:
        return chain[0], FIRST
    before = [partition for partition in chain if partition.logic_start <= offset]
    return (before or chain)[-1 if before else 0], offset


def _chain(route: Route, queue: int) -> list[Partition]:
    """Return the partitions of a queue that have data, by logic offset."""
    chain = [
        partition
        for partition in route.partitions
        if partition.queue == queue
        and partition.state in {PartitionState.OPEN, PartitionState.SEALED}
    ]
    return sorted(chain, key=lambda partition: (partition.logic_start, partition.partition_id))


def _behind_loss(
    route: Route, partition: Partition, asked: _Asked, following: int, answer: Batches
) -> int | None:
    """Return the logic offset after a loss, if the next read of a queue is there; otherwise
    None.
    """
    if asked.queue is None or not answer.sealed or following < answer.next_offset:
        return None
    chain = _chain(route, asked.queue)
    later = chain[chain.index(partition) + 1 :]
    return later[0].logic_start if later and is_behind_loss(later[0]) else None


def _messages(data: bytes, partition: Partition, *, start: int, count: int) -> list[MessageView]:
    """Return at most `count` messages of batches, from offset `start` on."""
    views: list[MessageView] = []
    for position, header in batch_starts(data):
        batch = columns(data, header, position)
        first = max(start - header.base_offset, 0)
        for index in range(first, min(header.count, first + count - len(views))):
            key, value, packed = (
                batch.blob[edges[index] : edges[index + 1]]
                for edges in (batch.key_edges, batch.value_edges, batch.property_edges)
            )
            offset = header.base_offset + index
            views.append(
                msgspec.convert(
                    {
                        "partition_id": partition.partition_id,
                        "offset": offset,
                        "queue": partition.queue,
                        "logic_offset": partition.logic_start + offset,
                        "sent_at_ns": batch.sent_at_ns[index],
                        **bytes_field("key", key),
                        **bytes_field("value", value),
                        **properties_fields(packed),
                    },
                    MessageView,
                )
            )
        if len(views) == count:
            break
    return views

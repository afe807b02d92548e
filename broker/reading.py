"""Reads messages by HTTP: from a partition by offset, or from a logic queue of a static subject by
logic offset.
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
from ..protocol.http.message_json import bytes_field, key_field, properties_fields
from ..protocol.ids import check_name
from ..protocol.limits import READ_MESSAGES_MAX
from ..protocol.queues import is_behind_loss, outside_queue_error
from ..protocol.routing import Partition, PartitionState, Route
from ..protocol.text import listed
from ..rpc.answer_budget import reserve_bytes
from ..rpc.server import ControlRoute, Params, check_params, whole_number
from .peers import Peers

COUNT_DEFAULT = 100
READ_BYTES = 1 << 20
"""The maximum size of the batches that are read for one answer, in bytes. A single batch that is
larger is read whole.
"""
FIRST = -1
"""Stands for the offset of the first stored message."""


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """The parameters of a request. At most one of `partition_id` and `queue` is given."""

    subject: str
    partition_id: int | None
    queue: int | None
    offset: int
    """An offset in the partition, a logic offset in the queue, or FIRST."""
    count: int


class MessageReading:
    """Answers `GET /v1/subjects/{subject}/messages`."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def route(self) -> ControlRoute:
        """Return the route of the endpoint."""
        return ControlRoute(READ_MESSAGES, self.read)

    async def read(self, _body: object, params: Params) -> MessagePage:
        """
        Return a page of messages. If the cached route is stale, fetch a newer one and retry once.

        Raises:
            InvalidRequestError, SubjectUnknownError, PartitionUnknownError, ConflictError,
            NotFoundError
            OffsetOutOfRangeError: nothing is stored at this offset. The details contain the first
                offset and the end offset.
            UnreachableError: the broker of the partition does not answer.
        """
        request = _parse_request(params)
        await reserve_bytes(2 * READ_BYTES)
        route = await self._peers.route(request.subject)
        try:
            page = await self._read_with_route(route, request)
        except KeylaneError as error:
            may_be_stale = isinstance(error, NotSentError | OffsetOutOfRangeError)
            may_be_stale = may_be_stale or error.reason is Reason.QUEUE_UNKNOWN
            if not may_be_stale and error.retry is not RetryRule.AFTER_NEW_ROUTE:
                raise
            newer_route = await self._peers.fetch_route(request.subject)
            if newer_route == route:
                raise
        else:
            if request.queue is None or not page.sealed or page.messages:
                return page
            # The queue may continue in a partition that is not in the cached route.
            newer_route = await self._peers.fetch_route(request.subject)
            if newer_route == route:
                return page
        return await self._read_with_route(newer_route, request)

    async def _read_with_route(self, route: Route, request: _ReadRequest) -> MessagePage:
        """Read a page, using this route to find the partition."""
        partition, offset = _locate(route, request)
        logic_start = partition.logic_start if request.queue is not None else 0
        physical = offset if offset == FIRST else offset - logic_start
        try:
            answer, data = await self._read_from(partition, physical)
        except OffsetOutOfRangeError as error:
            if not logic_start or error.first_offset is None or error.next_offset is None:
                raise
            raise outside_queue_error(
                offset, logic_start + error.first_offset, logic_start + error.next_offset
            ) from None
        start = answer.first_offset if physical == FIRST else physical
        messages = _decode_messages(data, partition, start=start, count=request.count)
        next_offset = start + len(messages)
        return MessagePage(
            subject=request.subject,
            partition_id=partition.partition_id,
            messages=messages,
            next_offset=_offset_after_loss(route, partition, request, next_offset, answer)
            or logic_start + next_offset,
            first_offset=logic_start + answer.first_offset,
            end_offset=logic_start + answer.next_offset,
            sealed=answer.sealed,
        )

    async def _read_from(self, partition: Partition, offset: int) -> tuple[Batches, bytes]:
        """Return the batches from an offset, or from the first stored message if it is FIRST."""
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


def _parse_request(params: Params) -> _ReadRequest:
    check_params(READ_MESSAGES, params)
    subject = check_name("subject", params["subject"])
    if "partition" in params and "queue" in params:
        raise InvalidRequestError("give either a partition or a queue, not both")
    queue = whole_number(params, "queue", FIRST)
    partition_id = whole_number(params, "partition", FIRST)
    return _ReadRequest(
        subject,
        None if queue != FIRST or partition_id == FIRST else partition_id,
        None if queue == FIRST else queue,
        whole_number(params, "offset", FIRST),
        whole_number(params, "count", COUNT_DEFAULT, low=1, high=READ_MESSAGES_MAX),
    )


def _locate(route: Route, request: _ReadRequest) -> tuple[Partition, int]:
    """Return the requested partition, or the partition of the requested queue that contains the
    offset, along with the unchanged offset.
    """
    if request.queue is not None:
        return _locate_in_queue(route, request.queue, request.offset)
    ids = [partition.partition_id for partition in route.partitions]
    if request.partition_id is None:
        raise InvalidRequestError(
            f"give a partition of subject {request.subject!r}: {listed(ids)}; or a queue, if the "
            f"subject is static"
        )
    for partition in route.partitions:
        if partition.partition_id == request.partition_id:
            return partition, request.offset
    raise PartitionUnknownError(
        f"subject {request.subject!r} has partitions {listed(ids)}, not {request.partition_id}",
        partition_id=request.partition_id,
        subject=request.subject,
    )


def _locate_in_queue(route: Route, queue: int, offset: int) -> tuple[Partition, int]:
    """Return the partition of a queue that contains a logic offset, and the offset."""
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
    candidates = [partition for partition in chain if partition.logic_start <= offset]
    return candidates[-1] if candidates else chain[0], offset


def _chain(route: Route, queue: int) -> list[Partition]:
    """Return the partitions of a queue that have data, in the order of the queue."""
    chain = [
        partition
        for partition in route.partitions
        if partition.queue == queue
        and partition.state in {PartitionState.OPEN, PartitionState.SEALED}
    ]
    return sorted(chain, key=lambda partition: (partition.logic_start, partition.partition_id))


def _offset_after_loss(
    route: Route, partition: Partition, request: _ReadRequest, next_offset: int, answer: Batches
) -> int | None:
    """Return the logic offset at which the queue continues after a loss, if the partition was read
    to its end and a loss follows; otherwise None.
    """
    if request.queue is None or not answer.sealed or next_offset < answer.next_offset:
        return None
    chain = _chain(route, request.queue)
    later_partitions = chain[chain.index(partition) + 1 :]
    return (
        later_partitions[0].logic_start
        if later_partitions and is_behind_loss(later_partitions[0])
        else None
    )


def _decode_messages(
    data: bytes, partition: Partition, *, start: int, count: int
) -> list[MessageView]:
    """Return at most `count` messages of the batches, beginning at offset `start`."""
    views: list[MessageView] = []
    for position, header in batch_starts(data):
        batch = columns(data, header, position)
        first = max(start - header.base_offset, 0)
        for index in range(first, min(header.count, first + count - len(views))):
            key, value, packed_properties = (
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
                        **key_field(key),
                        **bytes_field("value", value),
                        **properties_fields(packed_properties),
                    },
                    MessageView,
                )
            )
        if len(views) == count:
            break
    return views

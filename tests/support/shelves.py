"""Shelves: real batches of a subject behind the real server, route and status calls included, in a
thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keylane.protocol import endpoints
from keylane.protocol.batch import batch_starts, encode_batch
from keylane.protocol.control import (
    PartitionStatus,
    PartitionStatusList,
    SubjectList,
    SubjectSummary,
)
from keylane.protocol.errors import (
    GroupUnknownError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    SubjectUnknownError,
)
from keylane.protocol.frames import Answer, Batches, Read, Request
from keylane.protocol.groups import GroupSettings
from keylane.protocol.message import pack_properties
from keylane.protocol.reading.bounds import AskBounds, BoundsList, PartitionBounds
from keylane.protocol.record import stamp_record
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState, Route
from keylane.rpc.server import ControlRoute, Server

SENT_AT_NS = 1_700_000_000_123_456_789
SUBJECT = "flights"


@dataclass(frozen=True)
class Sent:
    """A message as it was sent."""

    key: bytes
    value: bytes
    sent_at_ns: int = SENT_AT_NS
    properties: dict[str, str] = field(default_factory=dict)


def packed(partition_id: int, base_offset: int, messages: Sequence[Sent]) -> bytes:
    """A batch as a broker stores it."""
    properties = [pack_properties(message.properties) for message in messages]
    record = bytearray(
        encode_batch(
            partition_id=partition_id,
            sent_at_ns=[message.sent_at_ns for message in messages],
            keys=[message.key for message in messages],
            values=[message.value for message in messages],
            properties=properties if any(properties) else (),
            producer_id=1,
            producer_epoch=1,
            sequence=base_offset,
        )
    )
    stamp_record(
        record,
        base_offset=base_offset,
        position=0,
        appended_at_ms=messages[0].sent_at_ns // 1_000_000,
    )
    return bytes(record)


def stored_ms(record: bytes) -> int:
    """When the broker stored a batch."""
    return batch_starts(memoryview(record))[0][1].appended_at_ms


class PartitionShelf:
    """One partition's batches."""

    def __init__(self, partition_id: int, state: PartitionState = PartitionState.OPEN) -> None:
        self.partition_id = partition_id
        self.state = state
        self.first_offset = 0
        self.batches: list[tuple[int, int, bytes]] = []
        """base offset, next offset, bytes"""
        self.cursors: dict[str, int] = {}
        """consumer group → cursor"""
        self.parents: tuple[int, ...] = ()

    @property
    def next_offset(self) -> int:
        return self.batches[-1][1] if self.batches else self.first_offset

    def put(self, *messages: Sent) -> None:
        base = self.next_offset
        record = packed(self.partition_id, base, messages)
        self.batches.append((base, base + len(messages), record))

    def bounds(self, at_ms: Sequence[int], groups: Sequence[str]) -> PartitionBounds:
        """All messages are stored when they were sent."""
        first = self.first_offset
        kept = [batch for batch in self.batches if batch[1] > first]
        at = [
            next((max(base, first) for base, _, record in kept if stored_ms(record) >= ms), None)
            for ms in at_ms
        ]
        return PartitionBounds(
            partition_id=self.partition_id,
            first_offset=first,
            next_offset=self.next_offset,
            first_at_ms=stored_ms(kept[0][2]) if kept else None,
            message_bytes=len(kept[0][2]) // (kept[0][1] - kept[0][0]) if kept else 0,
            offsets_at=tuple(at),
            cursors=tuple(self.cursors.get(group) for group in groups),
        )

    def read(self, request: Read) -> tuple[Batches, bytes]:
        offset = request.offset
        if not self.first_offset <= offset <= self.next_offset:
            raise OffsetOutOfRangeError(
                offset=offset,
                first_offset=self.first_offset,
                next_offset=self.next_offset,
            )
        chosen: list[bytes] = []
        upto, size = offset, 0
        for _, after, record in self.batches:
            if after > offset and (not chosen or size + len(record) <= request.bytes_max):
                chosen.append(record)
                size += len(record)
                upto = after
            elif chosen:
                break
        answer = Batches(self.first_offset, self.next_offset, upto, False)
        return answer, b"".join(chosen)


class Shelves:
    """A metaserver and a broker in one: what a Spark reader needs of both."""

    def __init__(self) -> None:
        self.shelves: dict[int, PartitionShelf] = {}
        self.reads: list[Read] = []
        self.calls: list[str] = []
        self.port = 0
        self.spoil: Callable[[Read, Batches, bytes], tuple[Batches, bytes]] | None = None
        """Changes an answer, to see what the reader makes of it."""
        self.fail: list[Exception] = []
        """Raised by the next reads, one each."""
        self.fail_bounds: list[Exception] = []
        """Raised by the next questions for bounds, one each."""
        self.asked: list[list[int]] = []
        """The partitions of each question for bounds."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shelves")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def shelf(
        self, partition_id: int, state: PartitionState = PartitionState.OPEN
    ) -> PartitionShelf:
        return self.shelves.setdefault(partition_id, PartitionShelf(partition_id, state))

    def start(self) -> None:
        self._thread.start()
        self.listen()

    def listen(self) -> None:
        self._do(self._listen())

    def hang_up(self) -> None:
        self._do(self._server.stop())

    def stop(self) -> None:
        self.hang_up()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        routes = [
            ControlRoute(endpoints.ROUTE, self._route),
            ControlRoute(endpoints.PARTITIONS, self._partitions),
            ControlRoute(endpoints.PARTITION_BOUNDS, self._bounds),
            ControlRoute(endpoints.SUBJECTS, self._subjects),
            ControlRoute(endpoints.GROUP_SETTINGS, self._group),
        ]
        self._server = Server(routes, data_handler=self._data)
        await self._server.start("127.0.0.1", self.port)
        self.port = self._server.port

    async def _route(self, _body, params) -> Route:
        self.calls.append("route")
        if params["subject"] != SUBJECT:
            raise SubjectUnknownError(subject=params["subject"])
        count = len(self.shelves)
        return Route(
            subject=SUBJECT,
            version=1,
            order_strategy=OrderStrategy.STRICT,
            partitions=tuple(
                Partition(
                    partition_id=number,
                    name=f"p{number}",
                    queue=index,
                    range_start=index * 1024 // count,
                    range_end=(index + 1) * 1024 // count,
                    broker_group="g0",
                    state=shelf.state,
                    parents=shelf.parents,
                    address=self.address,
                )
                for index, (number, shelf) in enumerate(self.shelves.items())
            ),
        )

    async def _subjects(self, _body, _params) -> SubjectList:
        summary = SubjectSummary(
            subject=SUBJECT, order_strategy=OrderStrategy.STRICT, partitions=1, route_version=1
        )
        return SubjectList(subjects=[summary])

    async def _group(self, _body, params) -> GroupSettings:
        if not any(params["group"] in shelf.cursors for shelf in self.shelves.values()):
            raise GroupUnknownError(group=params["group"])
        return GroupSettings(subject=SUBJECT, group=params["group"])

    async def _bounds(self, body: AskBounds, _params) -> BoundsList:
        self.calls.append("bounds")
        if self.fail_bounds:
            raise self.fail_bounds.pop(0)
        self.asked.append([asked.partition_id for asked in body.partitions])
        return BoundsList(
            broker_group="g0",
            partitions=[
                self.shelves[asked.partition_id].bounds(asked.at_ms, asked.groups)
                for asked in body.partitions
                if asked.partition_id in self.shelves
            ],
        )

    async def _partitions(self, _body, _params) -> PartitionStatusList:
        self.calls.append("partitions")
        return PartitionStatusList(
            broker_group="g0",
            partitions=[
                PartitionStatus(
                    partition_id=number,
                    subject=SUBJECT,
                    name=f"p{number}",
                    state=shelf.state,
                    first_offset=shelf.first_offset,
                    next_offset=shelf.next_offset,
                )
                for number, shelf in self.shelves.items()
            ],
        )

    async def _data(self, request: Request, _payload: memoryview) -> tuple[Answer, bytes]:
        assert isinstance(request, Read)
        self.reads.append(request)
        if self.fail:
            raise self.fail.pop(0)
        shelf = self.shelves.get(request.partition_id)
        if shelf is None:
            raise PartitionUnknownError(partition_id=request.partition_id)
        answer, payload = shelf.read(request)
        return self.spoil(request, answer, payload) if self.spoil else (answer, payload)

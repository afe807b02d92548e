"""Reads by HTTP and scripted brokers: offsets of partitions and queues, retention, losses, moves,
bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keylane.broker.reading import MessageReading
from keylane.protocol.batch import encode_batch
from keylane.protocol.control import MessagePage
from keylane.protocol.errors import (
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
)
from keylane.protocol.frames import Batches, Read
from keylane.protocol.limits import PARTITION_MESSAGES_MAX
from keylane.protocol.record import stamp_record
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState, Route
from support.raising import raises

OPEN, SEALED = PartitionState.OPEN, PartitionState.SEALED


def partition(number: int, logic_start: int, state: PartitionState = OPEN) -> Partition:
    return Partition(
        partition_id=number,
        name=f"s.p{number}",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group="g1",
        state=state,
        logic_start=logic_start,
    )


def queue(*partitions: Partition, version: int = 1) -> Route:
    return Route(
        subject="s",
        version=version,
        order_strategy=OrderStrategy.STRICT,
        partitions=partitions,
        static=True,
    )


def batch(number: int, base_offset: int, values: list[bytes], **columns: Any) -> bytes:
    record = bytearray(
        encode_batch(
            partition_id=number,
            sent_at_ns=[1] * len(values),
            keys=columns.pop("keys", [b"k"] * len(values)),
            values=values,
            producer_id=1,
            producer_epoch=0,
            sequence=0,
            **columns,
        )
    )
    stamp_record(record, base_offset=base_offset, position=0, appended_at_ms=1)
    return bytes(record)


class StoredPeers:
    """Partitions with batches of two messages each, from a first offset to an end."""

    def __init__(self, *routes: Route, stored: dict[int, tuple[int, int]]) -> None:
        self._routes = list(routes)
        self._stored = stored

    async def route(self, _subject: str) -> Route:
        return self._routes[0]

    async def fetch_route(self, _subject: str) -> Route:
        if len(self._routes) > 1:
            self._routes.pop(0)
        return self._routes[0]

    async def call(self, partition: Partition, request: Read) -> tuple[Batches, bytes]:
        if partition.partition_id not in self._stored:
            raise NotSentError("silent")
        first, end = self._stored[partition.partition_id]
        if not first <= request.offset <= end:
            raise OffsetOutOfRangeError(offset=request.offset, first_offset=first, next_offset=end)
        start = request.offset // 2 * 2
        data = b"".join(
            batch(partition.partition_id, base, [b"%d" % base, b"%d" % (base + 1)])
            for base in range(start, end, 2)
        )
        return Batches(first, end, end, partition.state is SEALED), data


async def page(peers: Any, **params: object) -> MessagePage:
    texts = {name: str(value) for name, value in params.items()}
    return await MessageReading(peers).read(None, {"subject": "s", **texts})


def offsets(answer: MessagePage) -> list[int]:
    return [message.offset for message in answer.messages]


async def test_page_begins_in_the_middle_of_a_batch_and_ends_at_the_count():
    peers = StoredPeers(queue(partition(1, 0)), stored={1: (0, 10)})
    answer = await page(peers, partition=1, offset=3, count=4)
    assert offsets(answer) == [3, 4, 5, 6]
    assert (answer.next_offset, answer.first_offset, answer.end_offset) == (7, 0, 10)
    answer = await page(peers, partition=1, offset=10)
    assert (offsets(answer), answer.next_offset) == ([], 10)


async def test_first_page_begins_where_retention_has_removed_up_to():
    peers = StoredPeers(queue(partition(1, 0)), stored={1: (4, 10)})
    answer = await page(peers, partition=1, count=2)
    assert (offsets(answer), answer.first_offset) == ([4, 5], 4)
    with pytest.raises(OffsetOutOfRangeError):
        await page(peers, partition=1, offset=3)


async def test_queue_is_read_over_its_partitions():
    """A logic offset is found in the partition that has it; all offsets of the page are logic."""
    route = queue(partition(1, 0, SEALED), partition(2, 10, SEALED), partition(3, 14))
    peers = StoredPeers(route, stored={1: (0, 10), 2: (0, 4), 3: (0, 6)})
    read: list[int] = []
    offset = 0
    while offset < 20:
        answer = await page(peers, queue=0, offset=offset, count=3)
        read += [message.logic_offset for message in answer.messages]
        offset = answer.next_offset
    assert read == list(range(20))
    answer = await page(peers, queue=0, offset=14)
    assert (answer.partition_id, answer.first_offset, answer.end_offset) == (3, 14, 20)
    assert answer.messages[0].offset == 0
    with pytest.raises(OffsetOutOfRangeError) as raised:
        await page(peers, queue=0, offset=21)
    assert (raised.value.first_offset, raised.value.next_offset) == (14, 20)


async def test_queue_continues_behind_a_loss():
    behind = 3 * PARTITION_MESSAGES_MAX
    route = queue(partition(1, 0, SEALED), partition(3, behind))
    peers = StoredPeers(route, stored={1: (0, 4), 3: (0, 6)})
    answer = await page(peers, queue=0, offset=2)
    assert (len(answer.messages), answer.next_offset) == (2, behind)
    answer = await page(peers, queue=0, offset=behind)
    assert answer.messages[0].logic_offset == behind


@pytest.mark.parametrize("query", [{"partition": 2}, {"queue": 0, "offset": 10}])
async def test_newer_route_is_asked_for_when_the_known_one_is_out_of_date(query):
    """A queue has moved, and its end is now elsewhere; the first partition says that it is
    sealed.
    """
    moved = queue(partition(1, 0, SEALED), partition(2, 10), version=2)
    for known in (1, 9):
        peers = StoredPeers(
            queue(partition(known, 0, SEALED)), moved, stored={1: (0, 10), 2: (0, 2)}
        )
        answer = await page(peers, **query)
        assert (answer.partition_id, len(answer.messages)) == (2, 2)


async def test_end_of_a_sealed_queue_is_told_when_no_route_continues_it():
    peers = StoredPeers(queue(partition(1, 0, SEALED)), stored={1: (0, 10)})
    answer = await page(peers, queue=0, offset=10)
    assert (answer.messages, answer.next_offset, answer.sealed) == ([], 10, True)


async def test_refusals_stay_what_they_are_when_the_route_is_not_out_of_date():
    peers = StoredPeers(queue(partition(1, 0), partition(5, 2)), stored={1: (0, 2)})
    for query, kind in (
        ({"partition": 2}, PartitionUnknownError),
        ({"queue": 7}, Reason.QUEUE_UNKNOWN),
        ({"partition": 5}, NotSentError),
    ):
        with raises(kind):
            await page(peers, **query)


async def test_message_of_any_bytes_is_shown():
    """Bytes that are no text, and properties that another program wrote, are in base64."""

    class OddPeers(StoredPeers):
        async def call(self, _partition: Partition, _request: Read) -> tuple[Batches, bytes]:
            data = batch(
                1,
                0,
                [b"\xfe", b"text"],
                keys=[b"\xff", b""],
                properties=[b"\xc1", b"\x81\xa1a\xa1b"],
            )
            return Batches(0, 2, 2, False), data

    answer = await page(OddPeers(queue(partition(1, 0)), stored={}), partition=1)
    first, second = msgspec.json.decode(msgspec.json.encode(answer.messages))
    assert (first["key_base64"], first["value_base64"]) == ("/w==", "/g==")
    assert (first["properties_base64"], "properties" in first) == ("wQ==", False)
    assert (second["key"], second["value"], second["properties"]) == (None, "text", {"a": "b"})
    assert "key_base64" not in second

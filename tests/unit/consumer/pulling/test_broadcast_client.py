"""What a client of a broadcast asks a broker for, and what it keeps itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keylane.consumer import ConsumerSettings
from keylane.consumer.pulling.broadcast_client import BroadcastClient
from keylane.protocol.errors import KeylaneError, OffsetOutOfRangeError, OutcomeUnknownError
from keylane.protocol.frames import Batches, Read
from keylane.protocol.limits import READ_WAIT_MS
from keylane.protocol.offsets import AckedOffsets
from support.cluster import eventually
from support.pulling import FAST, NotingOwner, opened, stored

SETTINGS = ConsumerSettings(backoff=FAST, ack_linger_ms=0)


class ReadOnlyBroker:
    """A partition of two messages a batch; it takes nothing but reads, and `errors` are what these
    meet first.
    """

    address = "b:1"

    def __init__(self, *errors: KeylaneError, end: int) -> None:
        self.errors = list(errors)
        self.end = end
        self.sealed = False
        self.waits: list[int] = []

    async def call(self, request: object, *, wait_ms: int = 0):
        assert isinstance(request, Read)
        assert request.wait_ms == wait_ms
        self.waits.append(wait_ms)
        if self.errors:
            raise self.errors.pop(0)
        if request.offset >= self.end:
            return Batches(0, self.end, self.end, self.sealed), b""
        base = request.offset - request.offset % 2  # a batch is sent whole
        return Batches(0, self.end, base + 2, self.sealed), stored(base)


@asynccontextmanager
async def reading(
    broker: ReadOnlyBroker, acked: AckedOffsets
) -> AsyncIterator[tuple[BroadcastClient, NotingOwner]]:
    owner = NotingOwner()
    told = {"acked": acked, "refresh": owner.refresh, "group": "", "session": "", "token": 0}
    async with opened(BroadcastClient, broker, owner, SETTINGS, **told) as client:
        yield client, owner


def offsets(owner: NotingOwner) -> list[int]:
    return [message.offset for message in owner.messages]


async def test_acks_stay_in_the_process_and_the_next_client_goes_on_behind_them():
    acked = AckedOffsets(1)
    async with reading(ReadOnlyBroker(end=6), acked) as (client, owner):
        await eventually(lambda: offsets(owner) == [1, 2, 3, 4, 5])
        for offset in (1, 2, 4):
            client.mark_handled(offset)
        client.discard_in_flight(2)
    assert (acked.cursor, acked.ranges) == (3, [(4, 5)])
    async with reading(ReadOnlyBroker(end=6), acked) as (client, owner):
        await eventually(lambda: offsets(owner) == [3, 5])
        client.discard_in_flight(2)


async def test_partition_is_drained_only_when_all_of_it_is_handled():
    broker = ReadOnlyBroker(end=4)
    broker.sealed = True
    async with reading(broker, AckedOffsets()) as (client, owner):
        await eventually(lambda: offsets(owner) == [0, 1, 2, 3])
        client.mark_range_handled(1, 4)
        await eventually(lambda: not client._acks.handled)
        assert (client.drained, owner.drained) == (False, 0)
        client.mark_handled(0)
        await eventually(lambda: owner.drained == 1)
        assert client.drained


async def test_addresses_are_looked_up_and_nothing_comes_twice_when_a_read_fails():
    broker = ReadOnlyBroker(OutcomeUnknownError(), end=4)
    async with reading(broker, AckedOffsets()) as (client, owner):
        await eventually(lambda: offsets(owner) == [0, 1, 2, 3])
        assert owner.refreshed == 1
        client.discard_in_flight(4)


async def test_removed_messages_are_skipped_counted_and_leave_no_gap(caplog):
    acked = AckedOffsets()
    broker = ReadOnlyBroker(OffsetOutOfRangeError(first_offset=2), end=4)
    async with reading(broker, acked) as (client, owner):
        await eventually(lambda: offsets(owner) == [2, 3])
        client.mark_range_handled(2, 4)
        assert client.missed == 2
    assert (acked.cursor, acked.ranges) == (4, [])
    assert (
        "s partition 1: 2 messages were removed before a broadcast consumer got them" in caplog.text
    )


async def test_consumer_fails_when_acks_cannot_be_kept():
    """The error is its own, not one of the event loop; the acks are kept if that is possible at the
    hand-over.
    """

    class FullOffsets(AckedOffsets):
        is_full = True

        def add(self, start: int, end: int) -> None:
            if self.is_full:
                raise MemoryError("no")
            super().add(start, end)

    in_loop: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, told: in_loop.append(told))
    acked = FullOffsets()
    async with reading(ReadOnlyBroker(end=2), acked) as (client, owner):
        errors: list[BaseException] = []
        owner.fail = errors.append
        await eventually(lambda: offsets(owner) == [0, 1])
        client.mark_handled(0)
        kept = asyncio.create_task(client.wait_for_ack_reply(0))
        await eventually(lambda: errors)
        client.discard_in_flight(1)
        assert [type(error) for error in errors] == [MemoryError]
        assert not kept.done()
        acked.is_full = False
    assert await kept
    assert acked.cursor == 1
    assert in_loop == []


async def test_client_waits_when_the_broker_stores_less_than_was_read():
    """It stands on an older copy of its folder; to begin again at once would be a loop without a
    pause.
    """
    broker = ReadOnlyBroker(OffsetOutOfRangeError(first_offset=0, next_offset=1), end=6)
    async with reading(broker, AckedOffsets(2)) as (client, owner):
        await eventually(lambda: offsets(owner) == [2, 3, 4, 5])
        client.discard_in_flight(4)


async def test_client_has_the_broker_wait_and_pauses_when_it_does_not():
    """A broker of an earlier version answers at once: it is asked 5 to 100 times a second."""
    broker = ReadOnlyBroker(end=0)
    async with reading(broker, AckedOffsets()):
        await asyncio.sleep(0.5)
    assert set(broker.waits) == {READ_WAIT_MS}
    assert 2 <= len(broker.waits) <= 50

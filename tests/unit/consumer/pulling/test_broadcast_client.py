"""What a client of a broadcast asks a broker for, and what it keeps itself."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keylane.consumer import ConsumerSettings
from keylane.consumer.pulling.broadcast_client import BroadcastClient
from keylane.protocol.backoff import Backoff
from keylane.protocol.control import Grant
from keylane.protocol.errors import KeylaneError, OffsetOutOfRangeError, OutcomeUnknownError
from keylane.protocol.frames import Batches, Read
from keylane.protocol.message import Message
from keylane.protocol.offsets import AckedOffsets
from keylane.protocol.record import HEADER_BYTES, stamp
from sim.machines.clock import ManualClock
from sim.machines.store import batch, facts
from support.cluster import eventually

SETTINGS = ConsumerSettings(backoff=Backoff(first_ms=1, max_ms=1), ack_linger_ms=0)


class ReadOnlyBroker:
    """A partition of two messages a batch; it takes nothing but reads, and `errors` are what these meet first."""

    address = "b:1"

    def __init__(self, *errors: KeylaneError, end: int) -> None:
        self.errors = list(errors)
        self.end = end
        self.sealed = False

    async def call(self, request: object, *, wait_ms: int = 0):
        assert isinstance(request, Read)
        if self.errors:
            raise self.errors.pop(0)
        if request.offset >= self.end:
            return Batches(0, self.end, self.end, self.sealed), b""
        base = request.offset - request.offset % 2  # a batch is sent whole
        data = bytearray(batch(sequence=base))
        header = data[:HEADER_BYTES]
        stamp(header, base_offset=base, position=0, appended_at_ms=0)
        data[:HEADER_BYTES] = header
        return Batches(0, self.end, base + 2, self.sealed), memoryview(data)


class ListeningOwner:
    """Keeps the messages, and counts what it is told."""

    keeps_batches = False
    wanted = None
    codec = None

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.drained = 0
        self.refreshed = 0

    def hand_out(self, messages: list[Message]) -> None:
        self.messages += messages

    def report_drained(self) -> None:
        self.drained += 1

    def refresh(self) -> None:
        self.refreshed += 1

    def fail(self, error: BaseException) -> None:
        raise AssertionError(error)


class OneBroker:
    """Connections that have this broker only."""

    def __init__(self, broker: ReadOnlyBroker) -> None:
        self._broker = broker

    def broker_at(self, _address: str) -> ReadOnlyBroker:
        return self._broker


@asynccontextmanager
async def reading(
    broker: ReadOnlyBroker, acked: AckedOffsets
) -> AsyncIterator[tuple[BroadcastClient, ListeningOwner]]:
    owner = ListeningOwner()
    clock = ManualClock()
    client = BroadcastClient(
        acked=acked,
        refresh=owner.refresh,
        subject="s",
        group="",
        session="",
        grant=Grant(partition=facts(address=broker.address).partition, token=0),
        connections=OneBroker(broker),
        deadline_ms=clock.now_ms + 60_000,
        settings=SETTINGS,
        clock=clock,
        rng=random.Random(1),
        owner=owner,
    )
    try:
        yield client, owner
    finally:
        client.stop()
        await client.hand_over(flush_ms=1_000)


def offsets(owner: ListeningOwner) -> list[int]:
    return [message.offset for message in owner.messages]


async def test_acks_stay_in_the_process_and_the_next_client_goes_on_behind_them():
    acked = AckedOffsets(1)
    async with reading(ReadOnlyBroker(end=6), acked) as (client, owner):
        await eventually(lambda: offsets(owner) == [1, 2, 3, 4, 5])
        for offset in (1, 2, 4):
            client.done(offset)
        client.forget(2)
    assert (acked.cursor, acked.ranges) == (3, [(4, 5)])
    async with reading(ReadOnlyBroker(end=6), acked) as (client, owner):
        await eventually(lambda: offsets(owner) == [3, 5])
        client.forget(2)


async def test_partition_is_drained_only_when_all_of_it_is_handled():
    broker = ReadOnlyBroker(end=4)
    broker.sealed = True
    async with reading(broker, AckedOffsets()) as (client, owner):
        await eventually(lambda: offsets(owner) == [0, 1, 2, 3])
        client.done_range(1, 4)
        await eventually(lambda: not client._acks.handled)
        assert (client.drained, owner.drained) == (False, 0)
        client.done(0)
        await eventually(lambda: owner.drained == 1)
        assert client.drained


async def test_addresses_are_looked_up_and_nothing_comes_twice_when_a_read_fails():
    broker = ReadOnlyBroker(OutcomeUnknownError(), end=4)
    async with reading(broker, AckedOffsets()) as (client, owner):
        await eventually(lambda: offsets(owner) == [0, 1, 2, 3])
        assert owner.refreshed == 1
        client.forget(4)


async def test_removed_messages_are_skipped_counted_and_leave_no_gap(caplog):
    acked = AckedOffsets()
    broker = ReadOnlyBroker(OffsetOutOfRangeError(first_offset=2), end=4)
    async with reading(broker, acked) as (client, owner):
        await eventually(lambda: offsets(owner) == [2, 3])
        client.done_range(2, 4)
        assert client.missed == 2
    assert (acked.cursor, acked.ranges) == (4, [])
    assert "2 messages were removed before a broadcast consumer of s got them" in caplog.text

"""Suspects are handed out one at a time, each once its broker knows of it; a pull client does the
rest as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from keylane.consumer import ConsumerSettings
from keylane.consumer.delivery.pulled_batch import PulledBatch
from keylane.consumer.pulling import careful, suspects
from keylane.consumer.pulling.pull_client import PullClient
from keylane.consumer.settings import FailurePolicy
from keylane.protocol.errors import CorruptBatchError, OverloadedError
from keylane.protocol.frames import (
    Ack,
    Acquire,
    Acquired,
    ChangeParked,
    ParkedChanged,
    Pull,
    Request,
)
from keylane.protocol.message import Message
from keylane.protocol.parked import Failure, Park, decode_changes, failure_of
from keylane.protocol.record import HEADER_BYTES, Compression, Kind, encode_record, stamp_record
from support.cluster import eventually
from support.pulling import FAST, NotingOwner, ScriptedBroker, opened

PARKED = [(b"k1", ()), (b"k1", ((1, 2),))]


class SuspectingBroker(ScriptedBroker):
    """An earlier owner ended without a release."""

    def __init__(self, upto: int, *begun: tuple[int, int], batches: int = 3) -> None:
        super().__init__(batches=batches)
        self._told = upto, begun
        self.begun: list[tuple[int, int]] = []
        self.parks: list[Park] = []

    async def call(self, request: Request, payload: bytes = b"", *, wait_ms: int = 0):
        match request:
            case Acquire():
                upto, begun = self._told
                plain = Acquired(self.cursor, (), self.end, self.sealed)
                return Acquired(*_fields(plain)[:7], upto, begun), b""
            case ChangeParked():
                self.parks += decode_changes(payload)
                return ParkedChanged(1), b""
            case Ack(begun=begun) if not self.acks:
                self.begun += begun
        return await super().call(request, wait_ms=wait_ms)


def _fields(answer: Acquired) -> tuple[Any, ...]:
    return tuple(getattr(answer, name) for name in answer.__struct_fields__)


class HandlingOwner(NotingOwner):
    allows_redrives = True
    dead_letters_when_full = False

    async def takes_messages(self) -> bool:
        return True

    def offsets(self) -> list[int]:
        return [message.offset for message in self.messages]

    def mark_handled(self, index: int) -> None:
        """Handle a message that was handed out."""
        message = self.messages[index]
        message.delivery.mark_handled(message.offset)


@asynccontextmanager
async def pulling(
    broker: ScriptedBroker, owner: NotingOwner, policy: FailurePolicy = FailurePolicy.PARK
) -> AsyncIterator[PullClient]:
    settings = ConsumerSettings(backoff=FAST, on_failure=policy)
    async with opened(PullClient, broker, owner, settings) as client:
        yield client


async def test_suspect_is_handed_out_once_its_broker_knows_and_the_next_one_when_it_is_done():
    """The acks of those before are in the same request; when no suspect is left, the rest comes at
    once.
    """
    broker, owner = SuspectingBroker(2), HandlingOwner()
    broker.acks = [OverloadedError("no room")]
    async with pulling(broker, owner):
        await eventually(lambda: owner.offsets() == [0])
        assert broker.begun == [(0, 2)]
        await asyncio.sleep(0.02)
        assert owner.offsets() == [0]
        owner.mark_handled(0)
        await eventually(lambda: owner.offsets() == [0, 1])
        second = broker.asked(Ack)[-1]
        assert (second.ranges, second.begun) == (((0, 1),), ((1, 2),))
        owner.mark_handled(1)
        await eventually(lambda: owner.offsets() == list(range(6)))
        assert broker.begun == [(0, 2), (1, 2)]


async def test_failed_suspect_lets_the_next_one_begin():
    """A message that fails, or is tried again, does not end the wait for another one."""
    broker, owner = SuspectingBroker(4), HandlingOwner()
    async with pulling(broker, owner):
        await eventually(lambda: owner.offsets() == [0])
        first = owner.messages[0]
        first.delivery.report_failure(first, Failure("ValueError", "", "host-1", 0, 1))
        await eventually(lambda: len(owner.messages) == 2)
        owner.mark_handled(0)
        await asyncio.sleep(0.02)
        assert len(owner.messages) == 2
        assert any(ack.failed == ((0, 1),) for ack in broker.asked(Ack))


async def test_message_that_ended_two_processes_is_parked_and_never_handed_out(
    caplog: pytest.LogCaptureFixture,
):
    broker, owner = SuspectingBroker(1, (0, 2)), HandlingOwner()
    async with pulling(broker, owner) as client:
        await eventually(lambda: broker.parks)
        (park,) = broker.parks
        assert park.ranges == ((0, 1),)
        assert isinstance(park.failure, Failure)
        assert (park.failure.kind, park.failure.attempts) == ("crashed", 2)
        await eventually(lambda: owner.offsets() == [1, 2, 3, 4, 5])
        assert client.outstanding == 5
    assert "offset 0" in caplog.text
    assert "2 times; it is set aside" in caplog.text


async def test_message_that_ends_processes_is_named_when_the_policy_is_block(
    caplog: pytest.LogCaptureFixture,
):
    """And it is handed out: later messages of its key wait for it."""
    broker, owner = SuspectingBroker(1, (0, 7)), HandlingOwner()
    async with pulling(broker, owner, FailurePolicy.BLOCK):
        await eventually(lambda: owner.offsets() == [0])
        assert owner.messages[0].attempt == 8
        assert broker.begun == [(0, 8)]
    assert "the process of its consumer ended while it was handled, 7 times" in caplog.text


async def test_suspects_that_wait_are_forgotten_at_a_hand_over():
    """Only what is with a handler is outstanding."""
    broker, owner = SuspectingBroker(6), HandlingOwner()
    async with pulling(broker, owner) as client:
        await eventually(lambda: owner.offsets() == [0] and client.outstanding == 6)
        client.stop()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client.outstanding == 1
        owner.mark_handled(0)
        await client.wait_handled()


async def test_suspect_is_parked_when_its_key_is_parked_while_it_waits_for_its_turn():
    """An earlier message of its key, which was with its handler for longer than the careful part,
    has failed meanwhile.
    """
    broker, owner = SuspectingBroker(3), HandlingOwner()
    failure = failure_of(ValueError("x"), client="c", at_ms=1, attempts=3)
    async with pulling(broker, owner) as client:
        await eventually(lambda: owner.offsets() == [0])
        async with AsyncExitStack() as turns:
            turn = asyncio.create_task(turns.enter_async_context(owner.alone.acquire(60)))
            await asyncio.sleep(0)
            owner.mark_handled(0)
            await turn
            await asyncio.sleep(0.02)
            assert owner.offsets() == [0]
            client.parking.park(b"k1", [], failure)
        await eventually(lambda: owner.offsets() == [0, 2])
        await eventually(lambda: [(park.key, park.ranges) for park in broker.parks] == PARKED)
        assert client.outstanding == 4, "it does not wait for one that is parked"


async def test_suspect_that_is_set_aside_lets_the_next_one_begin():
    """Whether it is buried alone, or parked with its key."""
    broker, owner = SuspectingBroker(3), HandlingOwner()
    failure = failure_of(ValueError("x"), client="c", at_ms=1, attempts=3)
    async with pulling(broker, owner):
        await eventually(lambda: owner.messages)
        message: Message = owner.messages[0]
        message.delivery.dead_letter(message, failure)
        await eventually(lambda: [park.key for park in broker.parks] == [None])
        await eventually(lambda: len(owner.messages) == 2)
        second = owner.messages[1]
        second.delivery.park(second, failure, [])
        await eventually(lambda: len(broker.parks) > 1)
        assert broker.parks[1].key == second.key
        await eventually(lambda: owner.offsets() == [0, 1, 2])


class KeepingOwner(HandlingOwner):
    """As an iteration: batches are not opened before it is known how they are taken."""

    keeps_batches = True

    def __init__(self) -> None:
        super().__init__()
        self.known: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.batches: list[PulledBatch] = []

    async def takes_messages(self) -> bool:
        return await asyncio.shield(self.known)

    def hand_out_batch(self, batch: PulledBatch) -> None:
        self.batches.append(batch)


async def test_iteration_gets_suspects_one_at_a_time_once_it_begins():
    broker, owner = SuspectingBroker(3), KeepingOwner()
    async with pulling(broker, owner) as client:
        await eventually(lambda: client.outstanding == 6)
        assert not owner.messages
        owner.known.set_result(True)
        for count in (1, 2, 3):
            await eventually(lambda count=count: len(owner.messages) == count)
            owner.mark_handled(count - 1)
        await eventually(lambda: owner.offsets() == list(range(6)))
        assert [offset for offset, _ in broker.begun] == [0, 1, 2]
        assert not owner.batches


async def test_arrow_data_is_begun_in_parts():
    """What was begun comes alone, and the rest once it is acked."""
    broker, owner = SuspectingBroker(6, (1, 1)), KeepingOwner()
    async with pulling(broker, owner) as client:
        await eventually(lambda: client.outstanding == 6)
        owner.known.set_result(False)
        for number, last in enumerate((0, 1)):
            await eventually(lambda number=number: len(owner.batches) == number + 1)
            assert owner.batches[-1].ranges == [(last, last + 1)]
            client.mark_range_handled(last, last + 1)
        await eventually(lambda: client.outstanding == 4 and len(owner.batches) == 4)
        assert broker.begun == [(0, 1), (1, 2), (5, 1)]


async def test_batches_that_wait_are_forgotten_at_a_hand_over():
    broker, owner = SuspectingBroker(6), KeepingOwner()
    async with pulling(broker, owner) as client:
        await eventually(lambda: client.outstanding == 6)
        client.stop()
        await client.wait_handled()


async def test_suspect_that_runs_for_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    """When the careful part has ended, the rest is handed out beside it."""
    monkeypatch.setattr(suspects, "CAREFUL_MS", 0)
    monkeypatch.setattr(careful, "LONG_MS", 20)
    broker, owner = SuspectingBroker(6, (1, 1)), HandlingOwner()
    async with pulling(broker, owner):
        await eventually(lambda: owner.offsets() == list(range(6)))
        assert broker.begun == [(0, 1), (1, 2)]


async def test_suspect_that_is_alone_no_more_is_not_accused_of_the_end_before(
    monkeypatch: pytest.MonkeyPatch,
):
    """Others run beside it from then on, which may end the process as well as it; nor does a later
    one overtake it.
    """
    monkeypatch.setattr(suspects, "CAREFUL_MS", 20)
    monkeypatch.setattr(careful, "LONG_MS", 20)
    broker, owner = SuspectingBroker(6), HandlingOwner()
    async with pulling(broker, owner):
        await eventually(lambda: owner.offsets()[:2] == [0, 1])
        assert broker.begun[:3] == [(0, 2), (0, 1), (1, 2)]
        assert not owner.messages[0].delivery.has_priority


async def test_suspect_is_to_be_taken_first_unless_one_of_its_key_has_failed():
    """Else it could overtake it."""
    first: list[tuple[int, bool]] = []

    class LookingOwner(HandlingOwner):
        def hand_out(self, messages: list[Message]) -> None:
            super().hand_out(messages)
            for message in messages:
                has_priority = getattr(message.delivery, "has_priority", False)
                first.append((message.offset, has_priority))

    broker, owner = SuspectingBroker(3, (4, 1)), LookingOwner()
    async with pulling(broker, owner):
        await eventually(lambda: first == [(0, True)])
        failing = owner.messages[0]
        failing.delivery.report_failure(failing, Failure("ValueError", "", "host-1", 0, 1))
        await eventually(lambda: len(first) == 2)
        assert first[1] == (1, True)
        owner.mark_handled(1)
        await eventually(lambda: len(first) > 2)
        assert first[2] == (2, failing.key != owner.messages[2].key)


async def test_suspects_of_two_partitions_are_tried_one_after_the_other():
    """Else the end of a process would accuse one of each."""
    first, second = SuspectingBroker(2), SuspectingBroker(2)
    owner, other = HandlingOwner(), HandlingOwner()
    other.alone = owner.alone
    async with pulling(first, owner), pulling(second, other):
        await eventually(lambda: owner.offsets() == [0])
        await asyncio.sleep(0.02)
        assert not other.messages
        assert not second.begun
        owner.mark_handled(0)
        await eventually(lambda: other.offsets() == [0])
        await asyncio.sleep(0.02)
        assert owner.offsets() == [0]
        other.mark_handled(0)
        await eventually(lambda: owner.offsets() == [0, 1])
        owner.mark_handled(1)
        await eventually(lambda: other.offsets() == [0, 1])
        other.mark_handled(1)
        await eventually(lambda: len(owner.messages) == len(other.messages) == 6)


async def test_turn_ends_when_its_partition_is_handed_over():
    first, second = SuspectingBroker(2), SuspectingBroker(2)
    owner, other = HandlingOwner(), HandlingOwner()
    other.alone = owner.alone
    async with pulling(second, other):
        async with pulling(first, owner) as client:
            await eventually(lambda: owner.messages or other.messages)
            held = owner if owner.messages else other
            client.stop()
            if held is owner:
                owner.mark_handled(0)
            await client.wait_handled()
        await eventually(lambda: other.offsets()[:1] == [0])


def does_not_unpack(offset: int) -> memoryview:
    """Two messages whose checksum is right; brokers look at no more than that."""
    times, lengths = bytes(16), (1, 1, 90, 90, 0, 0)
    body = times + b"".join(length.to_bytes(4, "little") for length in lengths) + bytes(30)
    data = bytearray(
        encode_record(
            body,
            kind=Kind.MESSAGES,
            count=2,
            compression=Compression.ZSTD,
            partition_id=1,
            producer_id=7,
            producer_epoch=0,
            sequence=offset,
        )
    )
    header = data[:HEADER_BYTES]
    stamp_record(header, base_offset=offset, position=0, appended_at_ms=0)
    data[:HEADER_BYTES] = header
    return memoryview(data)


async def test_message_behind_a_batch_that_does_not_unpack_is_not_handed_out():
    """The batch is not passed over: the consumer ends with its error."""

    class DamagingBroker(SuspectingBroker):
        async def call(self, request: Request, payload: bytes = b"", *, wait_ms: int = 0):
            answer, data = await super().call(request, payload, wait_ms=wait_ms)
            if isinstance(request, Pull) and request.offset == 2:
                data = does_not_unpack(2)
            return answer, data

    class EndingOwner(HandlingOwner):
        keeps_batches = True

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[BaseException] = []

        def fail(self, error: BaseException) -> None:
            self.errors.append(error)

    broker, owner = DamagingBroker(1), EndingOwner()
    async with pulling(broker, owner):
        await eventually(lambda: owner.errors)
        assert isinstance(owner.errors[0], CorruptBatchError)
        await eventually(lambda: owner.messages)
        await asyncio.sleep(0.02)
        assert owner.offsets() == [0]

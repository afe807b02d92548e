"""When a pull client pulls where an answer arrives, and when it leaves the answer to its task."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from keylane.consumer import ConsumerSettings
from keylane.consumer.pulling import pull_chain
from keylane.consumer.pulling.pull_client import PullClient
from keylane.protocol.errors import OutcomeUnknownError
from keylane.protocol.frames import Acked, Acquire, Acquired, Batches, Pull, Request
from keylane.rpc.network import Call, Calling, OnAnswer, OnPart
from support.cluster import eventually
from support.pulling import FAST, NotingOwner, ScriptedBroker, opened, stored

SETTINGS = ConsumerSettings(backoff=FAST, buffer_messages=4)


class OpenChannel:
    """Keeps its calls until the test answers them."""

    closed = False

    def __init__(self) -> None:
        self.calls: list[tuple[Pull, Call]] = []

    def begin(
        self,
        request: Pull,
        payload: bytes = b"",
        *,
        timeout_ms: int,
        on_answer: OnAnswer | None = None,
        on_part: OnPart | None = None,
    ) -> Calling:
        future = asyncio.get_running_loop().create_future()
        self.calls.append((request, Call(future, on_answer, type(request), timeout_ms, on_part)))
        return future

    def answer(self) -> None:
        """Answer the last pull with two messages."""
        pull, call = self.calls[-1]
        end = pull.offset + 2
        call.complete((Batches(0, 1_000, end, False), stored(pull.offset)))

    def send_part(self, offset: int) -> None:
        """Give the last pull two messages, behind which others follow."""
        _, call = self.calls[-1]
        assert call.deliver_part(
            Batches(0, offset + 2, offset + 2, False, more=True), stored(offset)
        )


class HeldBroker(ScriptedBroker):
    """Its pulls are answered by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.held = OpenChannel()

    async def channel(self) -> Any:
        return self.held

    async def call(self, request: Request, payload: bytes = b"", *, wait_ms: int = 0):
        if isinstance(request, Acquire):
            return Acquired(0, (), 1_000, False), b""
        return await super().call(request, payload, wait_ms=wait_ms)


async def test_next_pull_is_sent_where_the_answer_arrives():
    """Messages are handed out, and the pull behind them is under way, before the event loop
    turns.
    """
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS):
        await eventually(lambda: broker.held.calls)
        broker.held.answer()
        assert [message.offset for message in owner.messages] == [0, 1]
        assert [pull.offset for pull, _ in broker.held.calls] == [0, 2]


async def test_stored_batches_of_an_answer_are_handed_out_together():
    """The event loop does not turn between them, so a batch handler may get them as one batch."""
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS):
        await eventually(lambda: broker.held.calls)
        payload = memoryview(bytes(stored(0)) + bytes(stored(2)))
        broker.held.calls[-1][1].complete((Batches(0, 1_000, 4, False), payload))
        assert [message.offset for message in owner.messages] == [0, 1, 2, 3]


async def test_pull_waits_for_handlers_when_the_buffer_is_full():
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS) as client:
        await eventually(lambda: broker.held.calls)
        broker.held.answer()
        broker.held.answer()
        await asyncio.sleep(0.01)
        assert len(owner.messages) == 4
        assert len(broker.held.calls) == 2
        assert client.waiting_for == "handlers"
        for message in owner.messages:
            client.mark_handled(message.offset)
        await eventually(lambda: len(broker.held.calls) == 3)
        assert broker.held.calls[-1][0].offset == 4


async def test_answer_waits_while_the_partition_is_paused():
    """It is handed out behind the pause, and not before."""
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS) as client:
        await eventually(lambda: broker.held.calls)
        client.gate.add("resume")
        broker.held.answer()
        await asyncio.sleep(0.01)
        assert owner.messages == []
        client.gate.remove("resume")
        await eventually(lambda: len(owner.messages) == 2)


async def test_answer_to_a_stopped_client_is_left():
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS) as client:
        await eventually(lambda: broker.held.calls)
        client.stop()
        broker.held.answer()
        assert owner.messages == []
        assert len(broker.held.calls) == 1


async def test_fence_is_raised_again_when_a_later_pull_of_a_chain_fails():
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS):
        await eventually(lambda: broker.held.calls)
        broker.held.answer()
        broker.held.calls[-1][1].fail(OutcomeUnknownError())
        await eventually(lambda: len(broker.held.calls) == 3)
        assert broker.held.calls[-1][0].offset == 2
        broker.held.answer()
        assert [message.offset for message in owner.messages] == [0, 1, 2, 3]


async def test_pull_takes_its_turn_when_a_channel_has_many_chains(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is a call of the broker's client, which limits them; a call takes one answer, so it asks
    for one.
    """
    monkeypatch.setattr(pull_chain, "CHAINS_MAX", 0)
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS):
        await eventually(lambda: len(owner.messages) == 2)
        assert broker.held.calls == []
        pull = broker.asked(Pull)[0]
        assert isinstance(pull, Pull)
        assert (pull.offset, pull.answers_max) == (0, 1)


async def test_parts_are_handed_out_without_another_pull():
    """The broker goes on by itself until its last answer; the next pull begins behind it."""
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, replace(SETTINGS, buffer_messages=100)):
        await eventually(lambda: broker.held.calls)
        broker.held.send_part(0)
        broker.held.send_part(2)
        assert [message.offset for message in owner.messages] == [0, 1, 2, 3]
        assert len(broker.held.calls) == 1
        broker.held.calls[-1][1].complete((Batches(0, 6, 6, False), stored(4)))
        assert [message.offset for message in owner.messages] == [*range(6)]
        assert [pull.offset for pull, _ in broker.held.calls] == [0, 6]


async def test_parts_that_come_while_the_partition_is_paused_are_pulled_again():
    """The first one waits for the end of the pause; those behind it are left, and none is passed
    by.
    """
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, replace(SETTINGS, buffer_messages=100)) as client:
        await eventually(lambda: broker.held.calls)
        client.gate.add("resume")
        broker.held.send_part(0)
        broker.held.send_part(2)
        await asyncio.sleep(0.01)
        assert owner.messages == []
        client.gate.remove("resume")
        await eventually(lambda: len(broker.held.calls) == 2)
        assert [message.offset for message in owner.messages] == [0, 1]
        assert broker.held.calls[-1][0].offset == 2


async def test_parts_end_when_the_buffer_is_full():
    """What comes behind is left, and pulled again once there is room."""
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS) as client:
        await eventually(lambda: broker.held.calls)
        for offset in (0, 2, 4):
            broker.held.send_part(offset)
        assert [message.offset for message in owner.messages] == [0, 1, 2, 3]
        for message in owner.messages:
            client.mark_handled(message.offset)
        await eventually(lambda: len(broker.held.calls) == 2)
        assert broker.held.calls[-1][0].offset == 4


async def test_part_behind_a_gap_is_pulled_again():
    """No message is passed by, whatever a broker sends."""
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, replace(SETTINGS, buffer_messages=100)):
        await eventually(lambda: broker.held.calls)
        broker.held.send_part(0)
        broker.held.send_part(4)
        await eventually(lambda: len(broker.held.calls) == 2)
        assert [message.offset for message in owner.messages] == [0, 1]
        assert broker.held.calls[-1][0].offset == 2


async def test_part_to_a_stopped_client_is_left():
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS) as client:
        await eventually(lambda: broker.held.calls)
        client.stop()
        broker.held.send_part(0)
        assert owner.messages == []


async def test_partition_is_idle_while_a_pull_waits_and_all_is_known_to_be_acked():
    """A message with a handler, an ack under way, or a pause, has the pull lock renewed by acks."""
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS) as client:
        await eventually(lambda: broker.held.calls)
        assert client.is_idle
        broker.held.send_part(0)
        assert not client.is_idle
        for message in owner.messages:
            client.mark_handled(message.offset)
        assert not client.is_idle
        client.apply_ack_reply(Acked(2))
        assert client.is_idle
        client.gate.add("resume")
        broker.held.send_part(2)
        await asyncio.sleep(0.01)
        assert not client.is_idle


async def test_pull_is_sent_to_the_new_address_when_the_old_broker_still_answers():
    """Its messages are there; the old one, as of a copy of the folder, would let the pull wait to
    its end.
    """
    old, new, owner = HeldBroker(), HeldBroker(), NotingOwner()
    new.address = "b:2"
    async with opened(PullClient, old, owner, SETTINGS, others=(new,)) as client:
        await eventually(lambda: old.held.calls)
        client.renew(client.lease_until_ms, new.address)
        await eventually(lambda: new.held.calls)
        old.held.answer()
        assert owner.messages == []
        new.held.answer()
        assert [message.offset for message in owner.messages] == [0, 1]


async def test_pull_goes_on_when_the_lease_is_renewed_at_the_same_address():
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS) as client:
        await eventually(lambda: broker.held.calls)
        client.renew(client.lease_until_ms, broker.address)
        await asyncio.sleep(0.01)
        assert len(broker.held.calls) == 1
        broker.held.answer()
        assert [message.offset for message in owner.messages] == [0, 1]


async def test_pauses_grow_while_the_answers_cannot_be_opened():
    """The answer came, and has a gap: each try raises the fence again, so they become rarer."""
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS) as client:
        for tries in range(1, 4):
            await eventually(lambda tries=tries: len(broker.held.calls) == tries)
            broker.held.calls[-1][1].complete((Batches(0, 1_000, 6, False), stored(4)))
            await eventually(lambda tries=tries: client._pauses.failures == tries)
        assert owner.messages == []

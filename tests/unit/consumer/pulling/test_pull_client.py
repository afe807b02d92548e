"""What a pull client asks a broker for, and in which order, as the broker answers, refuses, or is
lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keylane.consumer import ConsumerSettings
from keylane.consumer.delivery.pulled_batch import PulledBatch
from keylane.consumer.pulling.lifetime import PullState
from keylane.consumer.pulling.pull_client import PullClient
from keylane.protocol.errors import (
    FencedError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    OverloadedError,
    Reason,
    VersionError,
)
from keylane.protocol.frames import (
    Ack,
    Acquire,
    Pull,
    Release,
)
from support.cluster import eventually
from support.pulling import FAST, TOKEN, NotingOwner, ScriptedBroker, opened

SETTINGS = ConsumerSettings(backoff=FAST)


@asynccontextmanager
async def pulling(broker: ScriptedBroker) -> AsyncIterator[tuple[PullClient, NotingOwner]]:
    owner = NotingOwner()
    async with opened(PullClient, broker, owner, SETTINGS) as client:
        yield client, owner


async def test_fence_is_raised_before_messages_are_pulled():
    """Under the token of the grant; the first pull begins at the cursor."""
    broker = ScriptedBroker(cursor=2, batches=2)
    async with pulling(broker) as (_, owner):
        await eventually(lambda: len(owner.messages) == 2)
        acquire, pull = broker.requests[:2]
        assert isinstance(acquire, Acquire)
        assert isinstance(pull, Pull)
        assert (acquire.token, pull.token, pull.offset) == (TOKEN, TOKEN, 2)
        assert [message.offset for message in owner.messages] == [2, 3]


class UnopeningOwner(NotingOwner):
    """Keeps batches as they are stored, as a consumer without a handler does."""

    keeps_batches = True
    dead_letters_when_full = False

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[PulledBatch] = []

    def hand_out_batch(self, batch: PulledBatch) -> None:
        self.batches.append(batch)


async def test_earlier_tries_are_kept_when_parked_rows_are_left_out():
    """The broker told of them once: a look at the keys of a batch does not use them up."""
    broker, owner = ScriptedBroker(), UnopeningOwner()
    broker.attempts = ((0, 3), (1, 1))
    async with opened(PullClient, broker, owner, SETTINGS) as client:
        await eventually(lambda: owner.batches)
        (batch,) = owner.batches
        client.parking.keys.add(b"k1")
        client.park_rows_of_parked_keys(batch)
        assert [(each.offset, each.attempt) for each in batch.messages()] == [(0, 4)]


async def test_fence_is_raised_again_when_a_pull_fails():
    """The broker may have restarted. Pulling continues at its offset, so no message is handed out
    twice.
    """
    broker = ScriptedBroker(batches=2)
    async with pulling(broker) as (_, owner):
        await eventually(lambda: len(owner.messages) == 4)
    broker = ScriptedBroker(OutcomeUnknownError(), batches=2)
    async with pulling(broker) as (_, owner):
        await eventually(lambda: len(owner.messages) == 4)
        assert [type(request) for request in broker.requests[:4]] == [Acquire, Pull, Acquire, Pull]
        assert [message.offset for message in owner.messages] == [0, 1, 2, 3]


async def test_removed_messages_are_skipped_and_counted():
    broker = ScriptedBroker(OffsetOutOfRangeError(first_offset=2), batches=2)
    async with pulling(broker) as (client, owner):
        await eventually(lambda: len(owner.messages) == 2)
        assert [pull.offset for pull in broker.asked(Pull)][:2] == [0, 2]
        assert client.missed == 2
        assert not owner.ended


async def test_partition_is_handed_over_when_the_broker_has_less_than_was_pulled():
    """No message was removed: the broker has lost some, and only an owner with the next token may
    begin again.
    """
    broker = ScriptedBroker(OffsetOutOfRangeError(first_offset=0))
    async with pulling(broker) as (_, owner):
        await eventually(lambda: owner.ended)
        assert len(broker.asked(Pull)) == 1
        assert owner.messages == []


async def test_pulls_that_keep_failing_are_told_once_and_are_a_warning_once(caplog):
    """A broker of another version refuses each: the consumer holds the partition, and gets
    nothing.
    """
    refused = VersionError(
        Reason.SERVER_TOO_OLD,
        "this client is too new for the server",
        client="0.9.0",
        server="0.1.0",
    )
    broker = ScriptedBroker(*[refused] * 12, batches=1)
    with caplog.at_level(logging.INFO, "keylane.consumer"):
        async with pulling(broker) as (_, owner):
            await eventually(lambda: len(owner.messages) == 2)
    told = [record.levelname for record in caplog.records if "too new" in record.message]
    assert told == ["INFO", "WARNING"]


async def test_fenced_client_releases_nothing():
    """The partition is another owner's: its end is told once, and the pull lock is left alone."""
    broker = ScriptedBroker(FencedError(current_token=TOKEN + 1))
    async with pulling(broker) as (client, owner):
        await eventually(lambda: owner.ended)
        assert client.fenced
        client.stop()
        await client.hand_over(flush_ms=1_000)
        assert owner.ended == 1
    assert broker.asked(Release) == []


async def test_sealed_partition_is_drained_when_its_last_message_is_acked():
    """Nothing is pulled behind the end, and the metaserver is told after the broker has the ack."""
    broker = ScriptedBroker(batches=1)
    broker.sealed = True
    async with pulling(broker) as (client, owner):
        await eventually(lambda: client.lifetime.state is PullState.EXHAUSTED)
        assert len(broker.asked(Pull)) == 1
        client.mark_handled(0)
        await eventually(lambda: broker.cursor == 1)
        assert not owner.drained
        client.mark_handled(1)
        await eventually(lambda: owner.drained)
        assert client.drained
        assert broker.cursor == 2


async def test_handled_messages_are_acked_before_the_lock_is_released():
    broker = ScriptedBroker(batches=1)
    async with pulling(broker) as (client, owner):
        await eventually(lambda: len(owner.messages) == 2)
        client.stop()
        client.mark_handled(0)
        client.mark_handled(1)
        await client.hand_over(flush_ms=1_000)
        assert client.lifetime.state is PullState.CLOSED
    assert isinstance(broker.requests[-1], Release)
    assert broker.cursor == 2


async def test_wait_for_acks_ends_when_they_are_durable():
    """A request that fails is sent again, and the wait goes on."""
    broker = ScriptedBroker(batches=2)
    broker.acks = [OutcomeUnknownError()]
    async with pulling(broker) as (client, owner):
        await eventually(lambda: len(owner.messages) == 4)
        client.mark_handled(0)
        assert await asyncio.wait_for(client.wait_until_acked(0), 10)
        assert broker.cursor == 1


async def test_wait_for_an_answer_ends_when_the_broker_takes_no_more_ranges():
    """Else every worker might wait, and none would be left for the older message that fills the
    gap.
    """
    broker = ScriptedBroker(batches=2)
    broker.acks = [OverloadedError("too many ranges") for _ in range(3)]
    async with pulling(broker) as (client, owner):
        await eventually(lambda: len(owner.messages) == 4)
        client.mark_handled(3)
        assert not await asyncio.wait_for(client.wait_for_ack_reply(3), 10)
        acked = asyncio.create_task(client.wait_until_acked(3))
        await asyncio.sleep(0.1)
        assert not acked.done(), "it was refused"
        broker.acks = []
        client.mark_handled(0)
        assert await asyncio.wait_for(acked, 10)


@pytest.mark.parametrize("fenced", [False, True])
async def test_wait_for_acks_ends_when_the_partition_is_handed_over(fenced: bool):
    """With the flush of the last acks, or without it where another owner has the partition."""
    broker = ScriptedBroker(batches=2)
    async with pulling(broker) as (client, owner):
        await eventually(lambda: len(owner.messages) == 4)
        broker.acks = [FencedError(current_token=TOKEN + 1)] if fenced else []
        client.mark_handled(0)
        waiting = asyncio.create_task(client.wait_until_acked(0))
        await asyncio.sleep(0)
        client.stop()
        await client.hand_over(flush_ms=1_000)
        assert await asyncio.wait_for(waiting, 10) is not fenced


async def test_messages_that_the_broker_left_out_are_acked_in_one_range():
    """They count as handled, also at the sealed end, and the next pull begins behind them."""
    broker = ScriptedBroker(batches=4)
    broker.left_out, broker.sealed = ((2, 5), (6, 8)), True
    async with pulling(broker) as (client, owner):
        await eventually(lambda: client.lifetime.state is PullState.EXHAUSTED)
        assert [message.offset for message in owner.messages] == [0, 1]
        client.mark_range_handled(0, 2)
        await eventually(lambda: broker.asked(Ack))
        acked = [ack.ranges for ack in broker.asked(Ack) if isinstance(ack, Ack)]
        assert {each for ranges in acked for each in ranges} <= {(0, 2), (0, 5), (2, 5), (6, 8)}
        assert (6, 8) in acked[-1]
        assert client.outstanding == 0


async def test_tasks_end_when_a_client_is_abandoned():
    """Its hand-over has failed: acks must not be sent for a consumer that is closed."""
    broker = ScriptedBroker(batches=1)
    async with pulling(broker) as (client, owner):
        await eventually(lambda: len(owner.messages) == 2)
        client.mark_handled(1)
        waiting = asyncio.create_task(client.wait_until_acked(1))
        await asyncio.sleep(0)
        client.abandon()
        client.abandon()
        await eventually(lambda: client._pull_task.done() and client._ack_task.done())
        assert not await asyncio.wait_for(waiting, 5)

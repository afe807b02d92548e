"""What is acked before a handler starts: durably, once, and only while the lease holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keylane.consumer import ConsumerSettings
from keylane.consumer.pulling.acked_first import AckFirstClient
from keylane.protocol.errors import FencedError, OverloadedError
from keylane.protocol.frames import Ack
from support.cluster import eventually
from support.pulling import FAST, NotingOwner, ScriptedBroker, opened


@asynccontextmanager
async def pulling(broker: ScriptedBroker) -> AsyncIterator[tuple[AckFirstClient, NotingOwner]]:
    owner = NotingOwner()
    settings = ConsumerSettings(ack="before", backoff=FAST)
    async with opened(AckFirstClient, broker, owner, settings) as client:
        yield client, owner


async def test_handler_may_start_once_the_broker_has_the_ack():
    """It never may again for the same messages; its end sends no second ack."""
    broker = ScriptedBroker(batches=2)
    async with pulling(broker) as (client, owner):
        await eventually(lambda: len(owner.messages) == 4)
        assert await client.ack_first(owner.messages[:2])
        assert broker.cursor == 2
        assert client.outstanding == 4
        assert not await client.ack_first(owner.messages[1:2])
        client.mark_all_handled(owner.messages[:2])
        assert await client.ack_first(owner.messages[2:3])
        client.mark_handled(2)
        assert client.outstanding == 1
        assert [ack.ranges for ack in broker.asked(Ack) if isinstance(ack, Ack)] == [
            ((0, 2),),
            ((2, 3),),
        ]
        client.discard_in_flight(1)


async def test_handler_waits_while_the_broker_takes_no_more_ranges():
    """An overloaded broker is asked again, and nothing starts before it has answered."""
    broker = ScriptedBroker()
    broker.acks = [OverloadedError(), OverloadedError()]
    async with pulling(broker) as (client, owner):
        await eventually(lambda: len(owner.messages) == 2)
        asked = asyncio.create_task(client.ack_first(owner.messages))
        await eventually(lambda: not broker.acks)
        assert await asyncio.wait_for(asked, 10)
        assert broker.cursor == 2
        client.mark_all_handled(owner.messages)


async def test_handler_does_not_start_when_another_session_has_the_partition():
    """The wait ends with the hand-over, and the message is the next owner's."""
    broker = ScriptedBroker()
    broker.acks = [FencedError(current_token=9)]
    async with pulling(broker) as (client, owner):
        await eventually(lambda: len(owner.messages) == 2)
        asked = asyncio.create_task(client.ack_first(owner.messages))
        await eventually(lambda: owner.ended)
        client.stop()
        await client.hand_over(flush_ms=1_000)
        assert not await asyncio.wait_for(asked, 10)

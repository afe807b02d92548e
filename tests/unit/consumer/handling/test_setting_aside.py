"""Which later messages of its key are set aside with a message: those that were handed out in the
same way.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from keylane.consumer.handling.failing import FailureRules
from keylane.consumer.handling.workers import Workers
from keylane.consumer.settings import FailurePolicy
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import SystemClock
from keylane.protocol.message import Message
from support.cluster import eventually
from support.handling import Client


class RedrivenWindow(Client):
    """A window of redriven messages of the same client."""

    is_apart = True

    def __init__(self, client: Client, *, loose: bool) -> None:
        super().__init__(9)
        self.client = client
        self.is_loose, self.is_apart = loose, True

    def mark_handled(self, offset: int) -> None:
        super().mark_handled(offset)
        self.client.in_flight.remove(1)


@pytest.mark.parametrize("loose", [False, True])
async def test_redriven_message_that_fails_takes_no_message_that_was_pulled(loose: bool):
    """And a dead letter is set aside alone, whatever its key is."""
    client, begun = Client(), asyncio.Event()
    client.has_handed_out = lambda message: message.delivery.client is client
    window = RedrivenWindow(client, loose=loose)

    async def handle(message: Message) -> None:
        await begun.wait()
        if message.delivery is window and message.offset == 7:
            raise ValueError("no")

    workers = Workers(
        handle,
        concurrency=4,
        handover_ms=0,
        backoff=Backoff(first_ms=1, max_ms=1),
        clock=SystemClock(),
        rng=random.Random(1),
        on_crash=[].append,
        failure_rules=FailureRules(policy=FailurePolicy.PARK, tries_max=1),
    )
    client.in_flight.count += 2
    workers.put([Message("s", b"k", b"", offset, 9, 0, delivery=window) for offset in (7, 8)])
    client.give(workers, b"k", start=0)
    await asyncio.sleep(0)
    begun.set()
    await eventually(lambda: client.handled == [0])
    expected = ("buried", 7, []) if loose else ("parked", 7, [8])
    assert [each[:3] for each in window.set_aside] == [expected]
    assert window.handled == ([8] if loose else [])
    assert client.set_aside == []
    await workers.close()

"""A handler that fails on everything fills no log."""

from __future__ import annotations

import asyncio
import logging
import random

from cluster import eventually
from keylane.consumer.workers import Workers
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import SystemClock
from keylane.protocol.message import Message


class Client:
    """What workers need of a pull client."""

    partition_id = 1
    deadline_ns = 2**62

    def __init__(self) -> None:
        self.handled: list[int] = []

    def done(self, offset: int) -> None:
        self.handled.append(offset)

    def forget(self, count: int) -> None:
        raise AssertionError(count)


async def test_one_traceback_for_many_failures(caplog):
    """Of a thousand messages that fail once, one is told of with its traceback, the rest as a number."""
    client = Client()
    crashed: list[BaseException] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        if message.attempt == 1:
            raise ValueError("no")

    workers = Workers(
        handle,
        concurrency=50,
        handover_ms=0,
        backoff=Backoff(first_ms=1, max_ms=1),
        clock=SystemClock(),
        dice=random.Random(1),
        on_crash=crashed.append,
        ordered=True,
    )
    with caplog.at_level(logging.WARNING, "keylane.consumer"):
        workers.put([Message("s", b"%d" % n, b"", n, 1, 0, delivery=client) for n in range(1_000)])
        await eventually(lambda: len(client.handled) == 1_000)
        await workers.close()
    assert not crashed
    told = caplog.messages
    assert sum(record.exc_info is not None for record in caplog.records) <= 2
    assert len(told) < 20
    assert "handler failed with ValueError on s partition 1 offset" in told[0]
    assert "ValueError on" in told[-1]

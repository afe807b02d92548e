"""Handlers whose messages are acked first: each is called at most once, and lost messages are
logged.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane.consumer.dispatch.failures import LOST_LOG_MS
from keylane.protocol.message import Message
from sim.machines.clock import ManualClock
from support.cluster import eventually
from support.handling import Client, workers_of


async def test_handler_is_called_after_the_ack_or_not_at_all():
    """Messages that are not acked when their partition is handed over never begin."""
    begun: list[int] = []
    client = Client()
    workers = workers_of(lambda message: begun.append(message.offset), ack="before")
    shell = client.of(workers)
    shell._answers_acks = False
    client.give(workers, b"a", b"a", b"b")
    await asyncio.sleep(0.02)
    assert begun == []
    shell.answer_acks()
    await eventually(lambda: begun == [0])
    assert shell.acked.cursor == 1
    await asyncio.wait_for(client.hand_over(), 30)
    assert begun == [0]
    await workers.close()


async def test_lost_messages_are_counted_in_one_line_a_second(caplog: pytest.LogCaptureFixture):
    tried: list[int] = []

    def fail(message: Message) -> None:
        tried.append(message.offset)
        raise ValueError("bad")

    clock, client = ManualClock(), Client()
    workers = workers_of(fail, clock=clock, ack="before")
    with caplog.at_level(logging.ERROR, "keylane.consumer"):
        client.give(workers, *[b""] * 5)
        await eventually(lambda: len(tried) == 5)
        clock.advance(LOST_LOG_MS)
        client.give(workers, b"")
        await eventually(lambda: len(tried) == 6)
    await workers.close()
    assert tried == list(range(6))
    first, second = caplog.messages
    assert "1 message is lost" in first
    assert "5 messages are lost" in second


async def test_handler_that_cancels_itself_has_failed_and_its_worker_goes_on(
    caplog: pytest.LogCaptureFixture,
):
    handled: list[int] = []

    async def handle(message: Message) -> None:
        if not message.offset:
            raise asyncio.CancelledError
        handled.append(message.offset)

    client = Client()
    workers = workers_of(handle, ack="before")
    with caplog.at_level(logging.ERROR, "keylane.consumer"):
        client.give(workers, b"a", b"a")
        await eventually(lambda: handled == [1])
    assert "1 message is lost" in caplog.text
    await workers.close()


async def test_handler_that_a_hand_over_cancels_ends_and_is_not_called_again():
    begun: list[int] = []
    ends: list[str] = []

    async def wait(message: Message) -> None:
        begun.append(message.offset)
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    client = Client()
    workers = workers_of(wait, ack="before")
    client.give(workers, b"a")
    await eventually(lambda: begun)
    await asyncio.wait_for(client.hand_over(), 30)
    assert (begun, ends, client.held) == ([0], ["cancelled"], 0)
    await workers.close()

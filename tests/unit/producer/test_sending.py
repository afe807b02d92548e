"""What `send` does with its arguments before a message is in a batch."""

from __future__ import annotations

import asyncio
import inspect
import itertools

import pytest

from keylane.producer import Producer, ProducerSettings
from support.scripted_network import ScriptedNetwork, producer_on


async def test_send_refuses_a_third_argument_without_a_name():
    """A program that swaps key and value, as other clients order them, is told so; nothing is queued."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        for _ in range(2):
            with pytest.raises(TypeError, match="key="):
                producer.send("s", b"key", b"value")
        await producer.send("s", b"0", key=b"k")
        with pytest.raises(TypeError, match="key="):
            producer.send("s", b"key", b"value")
    assert network.stored == {1: [b"0"]}


def test_send_shows_its_options_as_named_only():
    parameters = inspect.signature(Producer.send).parameters
    named = [name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY]
    assert list(parameters)[:3] == ["self", "subject", "value"]
    assert named == ["key", "deliver_at", "properties", "tags", "queue", "timeout_ms"]


LINGERS = ProducerSettings(linger_ms=10_000)


async def test_messages_have_the_time_of_their_turn():
    """The clock is read once in a turn of the event loop, also for messages with options, and again for a new batch."""
    async with producer_on(ScriptedNetwork(), settings=LINGERS) as producer:
        await _stored(producer)
        producer._now_ns = itertools.count(100).__next__
        for _ in range(2):
            sent = producer.send("s", b"", key=b"k")
            producer.send("s", b"", key=b"k", tags=["t"])
            await asyncio.sleep(0)
        assert [at_ns for _, _, at_ns in sent._batch.unsettled()] == [100, 100, 101, 101]
        producer._senders["s"].roll()
        later = producer.send("s", b"", key=b"k")
        assert later._batch.first_sent_at_ns == 102
        producer._senders["s"].roll()


async def test_new_batch_has_a_later_time_in_the_same_turn():
    """A program that fills batches without an `await` gives each batch a time of its own."""
    settings = ProducerSettings(linger_ms=10_000, batch_count=2)
    async with producer_on(ScriptedNetwork(), settings=settings) as producer:
        await _stored(producer)
        producer._now_ns = itertools.count(100).__next__
        sent = [producer.send("s", b"", key=b"k") for _ in range(4)]
        assert [future._batch.first_sent_at_ns for future in sent] == [100, 100, 101, 101]
        producer._senders["s"].roll()


async def _stored(producer: Producer) -> None:
    """Have a message stored, so that the route is known."""
    sent = producer.send("s", b"", key=b"k")
    await producer._senders["s"].routed()
    producer._senders["s"].roll()
    await sent

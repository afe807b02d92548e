"""What `send` does with its arguments before a message is in a batch."""

from __future__ import annotations

import inspect

import pytest

from keylane.producer import Producer
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

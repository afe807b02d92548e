"""Features that would break the order are not offered: no call and no frame has a field for them."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from keylane import Consumer, Producer
from keylane.protocol.frames import Append, Pull


def arguments(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def fields(frame) -> set[str]:
    return {field.name for field in msgspec.structs.fields(frame)}


def test_no_delay_no_filter():
    """Neither a send nor an append says when or from where a message comes, neither a consumer nor a pull which it wants."""
    assert arguments(Producer.send) == {
        *("subject", "value", "key", "properties", "tags", "queue", "timeout_ms")
    }
    assert not {name for name in fields(Append) if "delay" in name or "at_ms" in name}
    for ask in (arguments(Consumer.__init__), fields(Pull)):
        assert not {name for name in ask if "filter" in name or "tag" in name or "where" in name}
    with pytest.raises(TypeError, match="delay_ms"):
        Producer("127.0.0.1:1").send("s", b"v", delay_ms=1)
    with pytest.raises(TypeError, match="filter"):
        Consumer("127.0.0.1:1", subject="s", group="g", filter="x")

"""Where an owner reads on, and what it leaves out."""

from __future__ import annotations

from types import SimpleNamespace

from keylane.consumer.pulling.reading import Reading
from keylane.protocol.message import Message


def batch(start: int, end: int) -> tuple[list[Message], SimpleNamespace]:
    messages = [Message("s", b"", b"", offset, 1, 0) for offset in range(start, end)]
    return messages, SimpleNamespace(base_offset=start, next_offset=end)


def offsets(messages: list[Message]) -> list[int]:
    return [one.offset for one in messages]


def test_what_is_acked_or_read_is_left_out():
    """Of a batch that began earlier, only what is above the cursor, and not in the ranges above it."""
    reading = Reading()
    assert not reading.begun
    reading.begin(3, ((5, 7), (9, 10)))
    assert reading.begun
    assert offsets(reading.unread(*batch(0, 8))) == [3, 4, 7]
    assert offsets(reading.unread(*batch(6, 12))) == [8, 10, 11]
    assert reading.next_offset == 12


def test_what_is_gone_is_counted_without_what_was_acked():
    """Passing over counts the messages that nobody will handle, and adds up."""
    reading = Reading()
    reading.begin(3, ((5, 7), (9, 20)))
    assert reading.pass_over(10) == 4
    assert reading.missed == 4
    assert reading.pass_over(19) == 0
    assert reading.pass_over(22) == 2
    assert reading.missed == 6
    assert offsets(reading.unread(*batch(18, 24))) == [22, 23]

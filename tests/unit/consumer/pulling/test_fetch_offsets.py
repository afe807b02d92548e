"""Offsets that an owner pulls next, and offsets that it skips."""

from __future__ import annotations

from types import SimpleNamespace

from keylane.consumer.pulling.fetch_offsets import FetchOffsets
from keylane.protocol.message import Message


def batch(start: int, end: int) -> tuple[list[Message], SimpleNamespace]:
    messages = [Message("s", b"", b"", offset, 1, 0) for offset in range(start, end)]
    return messages, SimpleNamespace(base_offset=start, next_offset=end)


def offsets_of(messages: list[Message]) -> list[int]:
    return [message.offset for message in messages]


def test_unseen_skips_acked_and_pulled_messages():
    """A batch may begin below the cursor; acked ranges above the cursor are skipped too."""
    offsets = FetchOffsets()
    assert not offsets.begun
    offsets.begin(3, ((5, 7), (9, 10)))
    assert offsets.begun
    assert offsets_of(offsets.unseen(*batch(0, 8))) == [3, 4, 7]
    assert offsets_of(offsets.unseen(*batch(6, 12))) == [8, 10, 11]
    assert offsets.next_offset == 12


def test_skip_removed_counts_messages_that_were_not_acked():
    """The counts of several skips add up."""
    offsets = FetchOffsets()
    offsets.begin(3, ((5, 7), (9, 20)))
    assert offsets.skip_removed(10) == 4
    assert offsets.missed == 4
    assert offsets.skip_removed(19) == 0
    assert offsets.skip_removed(22) == 2
    assert offsets.missed == 6
    assert offsets_of(offsets.unseen(*batch(18, 24))) == [22, 23]

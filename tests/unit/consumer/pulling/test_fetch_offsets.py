"""Offsets that an owner pulls next, and offsets that it skips."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from keylane.consumer.pulling.fetch_offsets import FetchOffsets
from keylane.protocol.errors import OutcomeUnknownError
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


def header(start: int, end: int) -> SimpleNamespace:
    return SimpleNamespace(base_offset=start, next_offset=end, count=end - start)


def test_batch_that_is_next_leaves_out_what_was_acked_above_the_cursor():
    """Only behind the last acked range a batch that is next is whole by that alone."""
    offsets = FetchOffsets()
    offsets.begin(3, ((5, 7), (9, 10)))
    assert offsets.unseen_ranges(header(3, 5)) == [(3, 5)]
    assert offsets.unseen_ranges(header(5, 6)) == []
    assert offsets.unseen_ranges(header(6, 8)) == [(7, 8)]
    assert offsets.unseen_ranges(header(8, 12)) == [(8, 9), (10, 12)]
    assert offsets.unseen_ranges(header(12, 13)) == [(12, 13)]
    assert offsets.unseen_ranges(header(12, 14)) == [(13, 14)]
    assert offsets.next_offset == 14


def test_batch_behind_a_gap_is_refused_when_nothing_is_acked():
    offsets = FetchOffsets()
    offsets.begin(0, ())
    with pytest.raises(OutcomeUnknownError):
        offsets.unseen_ranges(header(1, 2))
    assert offsets.next_offset == 0

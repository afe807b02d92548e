"""Loose messages that could not be read, and what is left of their rows."""

from __future__ import annotations

import pytest

from keylane.consumer.parking.passed_over import SkippedMessages
from keylane.protocol.errors import (
    CorruptBatchError,
    CorruptLogError,
    KeylaneError,
    UnpackError,
    UnreachableError,
)

ROWS = [(1, 0, 4), (1, 6, 9), (2, 0, 3)]


def test_rows_left_are_up_to_a_count_of_messages_when_nothing_was_passed_over():
    passed = SkippedMessages()
    assert not passed
    assert passed.remaining_rows(ROWS, 5) == [(1, 0, 4), (1, 6, 7)]


@pytest.mark.parametrize("error", [CorruptLogError, CorruptBatchError, UnpackError])
def test_rows_left_begin_behind_a_damaged_batch(error: type[KeylaneError]):
    """A batch that did not unpack took the whole source with it, at each try again."""
    passed = SkippedMessages()
    passed.add(1, error(offset=0, end_offset=2))
    assert passed
    assert passed.remaining_rows(ROWS, 4) == [(1, 2, 4), (1, 6, 8)]
    passed.add(1, error(offset=6, end_offset=8))
    assert passed.remaining_rows(ROWS, 4) == [(1, 8, 9), (2, 0, 3)]


def test_rows_left_are_of_other_sources_when_one_does_not_answer():
    passed = SkippedMessages()
    error = UnreachableError("no answer")
    passed.add(1, error)
    assert passed.remaining_rows(ROWS, 100) == [(2, 0, 3)]
    assert passed.error is error


def test_rows_left_are_all_when_it_is_cleared():
    passed = SkippedMessages()
    passed.add(2, CorruptLogError())
    passed.clear()
    assert passed.error is None
    assert passed.remaining_rows(ROWS, 100) == ROWS


def test_rows_are_asked_for_from_the_front_when_it_is_cleared():
    passed = SkippedMessages()
    passed.rows_before = 7
    passed.clear()
    assert passed.rows_before == 0

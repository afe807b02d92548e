"""Offsets of a session, held against plain sets."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.consumer.session.offsets import (
    RANGES_PER_ACK,
    HandledOffsets,
    PullOffsets,
    ranges_of,
)
from keylane.protocol.errors import OutcomeUnknownError
from keylane.protocol.message import Message

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=8)


def members(ranges):
    return {offset for start, end in ranges for offset in range(start, end)}


@given(cursor=st.integers(0, 10), above=RANGES, batches=st.lists(st.integers(1, 6), max_size=6))
def test_pulled_offsets_are_those_that_are_not_acked(cursor, above, batches):
    ranges = tuple((cursor + 1 + start, cursor + 1 + start + size) for start, size in above)
    offsets = PullOffsets()
    offsets.begin(cursor, ranges)
    taken, start = [], max(0, cursor - 2)  # a batch may begin below the cursor
    for size in batches:
        taken += offsets.take(start, start + size)
        start += size
    acked = members(ranges) | set(range(cursor))
    assert members(taken) == set(range(cursor, start)) - acked
    assert len(members(taken)) == sum(end - low for low, end in taken)


def test_gap_in_an_answer_is_an_error():
    offsets = PullOffsets()
    offsets.begin(3, ())
    with pytest.raises(OutcomeUnknownError):
        offsets.take(4, 6)


@given(st.data())
def test_handled_offset_is_kept_until_it_is_confirmed(data):
    handled, waiting, confirmed = HandledOffsets(), set(), set()
    free = list(range(24))
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "add", "take", "confirm", "retract"]))
        if action == "add" and free:
            offset = free.pop(data.draw(st.integers(0, min(3, len(free) - 1))))
            handled.add(offset, offset + 1)
            waiting.add(offset)
        elif action == "take" and not handled.in_flight:
            taken = members(handled.take())
            assert taken == waiting or min(waiting - taken) > max(taken), "the lowest first"
        elif action == "confirm":
            gone = members(handled.confirm())
            assert gone <= waiting
            waiting -= gone
            confirmed |= gone
        elif action == "retract":
            handled.retract(is_refused=data.draw(st.booleans()))
    assert {offset for offset in range(24) if offset in handled} == waiting
    assert not waiting & confirmed


def scattered(*offsets: int) -> HandledOffsets:
    handled = HandledOffsets()
    for offset in offsets:
        handled.add(offset, offset + 1)
    return handled


def test_offsets_handled_out_of_order_are_joined():
    assert scattered(5, 3, 4, 9, 8, 1).take() == ((1, 2), (3, 6), (8, 10))


def test_request_has_a_limited_number_of_ranges():
    handled = scattered(*range(0, 2 * (RANGES_PER_ACK + 5), 2))
    assert len(handled.take()) == RANGES_PER_ACK
    handled.confirm()
    assert len(handled.take()) == 5


def test_refusal_halves_the_request_until_one_range_is_left():
    """A single range that is refused waits until more is handled."""
    handled = scattered(3, 5, 7, 9, 11)
    assert len(handled.take()) == 5
    assert handled.retract(is_refused=True)
    assert handled.take() == ((3, 4), (5, 6))
    assert handled.retract(is_refused=True)
    assert handled.take() == ((3, 4),)
    assert not handled.retract(is_refused=True)
    handled.add(2, 3)
    assert handled.take() == ((2, 4),)


def test_requests_grow_again_after_a_refusal():
    """The limit counts until the broker has everything; each request doubles the next one."""
    handled = scattered(*range(1, 17, 2))
    handled.take()
    handled.retract(is_refused=True)
    sizes = []
    while handled:
        assert handled.is_refused
        sizes.append(len(handled.take()))
        handled.confirm()
    assert sizes == [4, 4]
    assert not handled.is_refused
    for offset in range(101, 141, 2):
        handled.add(offset, offset + 1)
    assert len(handled.take()) == 16


@pytest.mark.parametrize(
    ("first", "missed", "left"), [(10, 4, [20, 21]), (19, 4, [20, 21]), (22, 6, [22, 23])]
)
def test_removed_messages_that_were_acked_are_not_missed(first, missed, left):
    offsets = PullOffsets()
    offsets.begin(3, ((5, 7), (9, 20)))
    offsets.skip_removed(10)
    offsets.skip_removed(first)
    assert offsets.missed == missed
    assert sorted(members(offsets.take(min(18, first), 24)))[:2] == left


@given(st.sets(st.integers(0, 40)))
def test_ranges_of_messages_have_exactly_their_offsets(offsets):
    messages = [Message("s", b"", b"", offset, 1, 0) for offset in sorted(offsets)]
    ranges = ranges_of(messages)
    assert members(ranges) == offsets
    assert all(end < start for (_, end), (start, _) in pairwise(ranges))

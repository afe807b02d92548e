"""Offsets of a session, held against plain sets."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.consumer.session.offsets import HandledOffsets, PullOffsets, ranges_of
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


@given(st.sets(st.integers(0, 40)))
def test_ranges_of_messages_have_exactly_their_offsets(offsets):
    messages = [Message("s", b"", b"", offset, 1, 0) for offset in sorted(offsets)]
    ranges = ranges_of(messages)
    assert members(ranges) == offsets
    assert all(end < start for (_, end), (start, _) in pairwise(ranges))

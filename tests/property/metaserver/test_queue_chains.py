"""Logic offsets against a plain list: any chain of segments, any offset, any time, any group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.protocol.control import TimeBound
from keylane.protocol.errors import OffsetOutOfRangeError
from keylane.protocol.limits import PARTITION_MESSAGES_MAX
from keylane.protocol.queues import (
    Segment,
    check_logic_offset,
    is_behind_loss,
    logic_cursor,
    logic_offset_at,
    physical_cursors,
    queue_max,
    queue_min,
    start_behind_loss,
)
from keylane.protocol.routing import Partition, PartitionState

lengths = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from([0, 0, 5])),
    min_size=1,
    max_size=6,
)


def chain_of(sizes: list[tuple[int, int, int]]) -> list[Segment]:
    """Segments of (messages, how many of them retention has removed, offsets that are lost before
    them).
    """
    chain = []
    start = 0
    for number, (count, gone, lost) in enumerate(sizes, 1):
        start += lost
        chain.append(
            Segment(
                partition_id=number,
                logic_start=start,
                first_offset=min(gone, count),
                next_offset=count,
            )
        )
        start += count
    return chain


def messages(chain: list[Segment]) -> list[tuple[int, int, int]]:
    """(logic offset, partition id, offset) of every message still there: the model."""
    return [
        (segment.logic_start + offset, segment.partition_id, offset)
        for segment in chain
        for offset in range(segment.first_offset, segment.next_offset)
    ]


@given(lengths)
def test_queue_min_and_max_bound_its_messages(sizes):
    """Min is the first message left, max one past the last ever stored; they are equal when none is
    left.
    """
    chain = chain_of(sizes)
    left = [logic for logic, _, _ in messages(chain)]
    total = sum(count + lost for count, _, lost in sizes)
    assert queue_max(chain) == total
    assert queue_min(chain) == (min(left) if left else total)


@given(lengths, st.integers(0, 70))
def test_logic_offset_and_physical_cursors_are_inverse(sizes, logic):
    """After a reset to an offset the group has acked every message below it, and reads the first at
    or above it.
    """
    chain = chain_of(sizes)
    cursors = physical_cursors(chain, logic)
    for segment, cursor in zip(chain, cursors, strict=True):
        assert segment.first_offset <= cursor <= segment.next_offset
    at = {segment.partition_id: cursor for segment, cursor in zip(chain, cursors, strict=True)}
    left = [where for where, partition_id, offset in messages(chain) if offset >= at[partition_id]]
    assert left == [where for where, _, _ in messages(chain) if where >= logic]
    assert logic_cursor(chain, at) == (left[0] if left else queue_max(chain))


@given(lengths, st.dictionaries(st.integers(1, 6), st.integers(0, 6)))
def test_group_cursor_is_the_first_unacked_message(sizes, cursors):
    """Whatever the group has acked in later segments."""
    chain = chain_of(sizes)
    left = [
        where
        for where, partition_id, offset in messages(chain)
        if offset >= cursors.get(partition_id, 0)
    ]
    assert logic_cursor(chain, cursors) == (left[0] if left else queue_max(chain))


@given(lengths, st.data())
def test_offset_at_a_time_is_the_bound_asked_for(sizes, data):
    """LOWER is the first message at or after a time, UPPER the last at or before it, as a scan
    would find.
    """
    chain = chain_of(sizes)
    times: dict[tuple[int, int], int] = {}
    # Within a partition times never fall; the clocks of two brokers may differ.
    for segment in chain:
        drawn = data.draw(
            st.lists(st.integers(0, 20), min_size=segment.next_offset, max_size=segment.next_offset)
        )
        times |= {(segment.partition_id, offset): at for offset, at in enumerate(sorted(drawn))}
    at_ms = data.draw(st.integers(0, 21))

    def look_up(segment: Segment, bound: TimeBound) -> int | None:
        offsets = range(segment.first_offset, segment.next_offset)
        if bound is TimeBound.LOWER:
            hits = [key for key in offsets if times[segment.partition_id, key] >= at_ms]
            return min(hits, default=None)
        hits = [key for key in offsets if times[segment.partition_id, key] <= at_ms]
        return max(hits, default=None)

    every = [(where, times[number, offset]) for where, number, offset in messages(chain)]
    later = [where for where, at in every if at >= at_ms]
    earlier = [where for where, at in every if at <= at_ms]
    for bound, expected in (
        (TimeBound.LOWER, min(later, default=None)),
        (TimeBound.UPPER, max(earlier, default=None)),
    ):
        looked_up = [look_up(segment, bound) for segment in chain]
        assert logic_offset_at(chain, looked_up, bound) == expected


@given(lengths, st.integers(-1, 70))
def test_logic_offset_outside_the_queue_is_refused(sizes, logic):
    """Min and max are accepted; the refusal names both."""
    chain = chain_of(sizes)
    low, high = queue_min(chain), queue_max(chain)
    if low <= logic <= high:
        check_logic_offset(chain, logic)
        return
    with pytest.raises(OffsetOutOfRangeError) as refused:
        check_logic_offset(chain, logic)
    assert (refused.value.first_offset, refused.value.next_offset) == (
        low,
        high,
    )


@given(st.lists(st.tuples(st.integers(0, PARTITION_MESSAGES_MAX), st.booleans()), max_size=9))
def test_logic_offsets_grow_over_losses(chain):
    """However full each partition was, offsets behind a loss are above all before it, and can be
    told from other starts.
    """
    end = 0
    for number, (count, behind_loss) in enumerate(chain, 1):
        name = f"s.p{number}"
        start = start_behind_loss(name) if behind_loss else end
        assert start >= end
        partition = Partition(
            partition_id=number,
            name=name,
            queue=0,
            range_start=0,
            range_end=1024,
            broker_group="g1",
            state=PartitionState.SEALED,
            logic_start=start,
        )
        assert is_behind_loss(partition) or not behind_loss
        end = start + count

"""Where a point is in partitions that continue one another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.protocol.reading.bounds import LocalPoint, order_points

LINEAGE = {1: (), 2: (1,), 3: (1,), 4: (2, 3), 5: (3,)}


def test_child_begins_at_its_first_message_when_a_parent_has_messages_behind_the_point():
    own = {1: LocalPoint(0, 9, 4), 2: LocalPoint(2, 5, 5), 3: LocalPoint(0, 7, 3)}
    assert order_points(own, LINEAGE) == {1: 4, 2: 2, 3: 0}


def test_child_has_its_own_place_when_no_parent_has_messages_behind_the_point():
    own = {
        1: LocalPoint(0, 9, 9),
        2: LocalPoint(2, 5, 5),
        3: LocalPoint(0, 7, 3),
        4: LocalPoint(0, 4, 2),
    }
    assert order_points(own, LINEAGE) == {1: 9, 2: 5, 3: 3, 4: 0}


def test_messages_behind_the_point_are_seen_through_partitions_that_are_not_placed():
    """Partition 3 has expired, 1 is held back."""
    own = {1: LocalPoint(0, 9, 4), 5: LocalPoint(0, 5, 5)}
    assert order_points(own, LINEAGE) == {1: 4, 5: 0}


def test_messages_behind_the_point_are_seen_through_partitions_that_are_empty():
    own = {1: LocalPoint(0, 9, 4), 3: LocalPoint(0, 0, 0), 5: LocalPoint(0, 5, 5)}
    assert order_points(own, LINEAGE) == {1: 4, 3: 0, 5: 0}


times = st.lists(st.integers(0, 9), max_size=5).map(sorted)


def places(stored: dict[int, list[int]], at: int) -> dict[int, int]:
    own = {
        number: LocalPoint(0, len(each), sum(time < at for time in each))
        for number, each in stored.items()
    }
    return order_points(own, LINEAGE)


@given(
    st.fixed_dictionaries(dict.fromkeys(LINEAGE, times)),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_ranges_of_times_meet_and_leave_no_gap_whatever_the_clocks(stored, points):
    """Each partition's times rise; those of partitions that continue one another need not."""
    early, late = sorted(points)
    low, high = places(stored, early), places(stored, late)
    assert all(0 <= low[number] <= high[number] <= len(stored[number]) for number in LINEAGE)
    for number, parents in LINEAGE.items():
        for parent in parents:
            if low[parent] < len(stored[parent]):
                assert low[number] == 0, "what is behind a message that is read is read"

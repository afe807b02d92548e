"""The judge of followers tells what it is for, on notes made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keylane.checker.events import Ranged, Sent, Settled, Stored
from keylane.consumer.reading.lineage_order import LineageOrder
from sim.following.followers import _is_through
from sim.following.judge import Truth, check_follower, truth_of
from sim.following.notes import Given, Kept, Opened, Passed, Told

FIRST = Opened(0, 0, after_keeping=False)
KEY = b"k0"


def stored_at(*places: tuple[int, int], **more: Any) -> Truth:
    """The truth of messages of one key, sent and acked one after the other, number n at the n-th
    place.
    """
    history: list[Any] = [Ranged(number, 0, 1024) for number in {place[0] for place in places}]
    for number, place in enumerate(places):
        value = b"p0.1:%d" % number
        history += [
            Sent(value, KEY, "p0.1", number, strict=True),
            Stored(*place, KEY, value),
            Settled(value, "stored", *place),
        ]
    given: dict[str, Any] = {"firsts": {}, "lost": ()}
    return truth_of(history, partitions={1, 2, 3}, **given | more)


THREE = ((1, 0), (1, 1), (2, 0))
TRUTH = stored_at(*THREE)


def given(number: int, place: tuple[int, int]) -> Given:
    return Given(*place, KEY, b"p0.1:%d" % number, 0, number)


ALL = [given(number, place) for number, place in enumerate(THREE)]


def told(notes: list[Any], truth: Truth = TRUTH, **more: Any) -> str:
    """What the judge says about a follower whose run was quiet at the end."""
    return "\n".join(check_follower("f0", notes, truth, **({"whole": True} | more)))


def test_follower_is_clean_when_it_was_given_everything_in_order():
    assert not told([FIRST, *ALL])
    assert not told([FIRST, *ALL], stored_at(*THREE, static=True))


@pytest.mark.parametrize(
    ("notes", "problem"),
    [
        ([FIRST, *ALL[:2]], "f0 was not given b'p0.1:2' at (2, 0)"),
        ([FIRST, *ALL, ALL[1]], "f0 was given (1, 1) again"),
        ([FIRST, ALL[1], ALL[0], ALL[2]], "f0 was given (1, 0) behind offset 1"),
        ([FIRST, ALL[2], *ALL[:2]], "behind number 2"),
        ([FIRST, ALL[2], *ALL[:2]], "f0 was given b'k0' at (1, 0) behind (2, 0)"),
        ([FIRST, given(0, (1, 1))], "where (b'k0', b'p0.1:1') is stored"),
    ],
)
def test_follower_is_told_of_when_it_was_given_too_little_too_often_or_out_of_order(notes, problem):
    assert problem in told(notes)


def test_queue_is_told_of_when_logic_offsets_do_not_rise():
    truth = stored_at(*THREE, static=True)
    assert "logic offset 0 of queue 0" in told(
        [FIRST, *ALL[:2], ALL[2]._replace(logic_offset=0)], truth
    )


def test_follower_may_be_given_again_only_what_came_behind_the_kept_positions():
    again = FIRST._replace(after_keeping=True)
    assert not told([FIRST, ALL[0], Kept(), ALL[1], again, ALL[1], ALL[2]])
    assert "(1, 0) again" in told([FIRST, ALL[0], Kept(), ALL[1], again, *ALL])
    assert "not given b'p0.1:1'" in told([FIRST, ALL[0], Kept(), ALL[1], again, ALL[2]])
    assert not told([FIRST, ALL[0], ALL[1], FIRST, *ALL])


def test_follower_is_owed_what_is_left_of_what_was_sent_since_it_began():
    last = next(instant for value, (instant, *_) in TRUTH.sent.items() if value == b"p0.1:2")
    assert not told([Opened(last, last, after_keeping=False), ALL[2]])
    assert "not given" in told([Opened(last, last, after_keeping=False)])
    assert not told([FIRST, Told(1, 2), ALL[2]], stored_at(*THREE, firsts={1: 2}))
    assert "not given" in told([FIRST, ALL[2]], stored_at(*THREE, firsts={1: 2}))
    assert not told([FIRST, ALL[2]], stored_at(*THREE, lost={1}))
    assert not told([FIRST, *ALL[:2]], whole=False)
    assert "not given b'p0.1:1'" in told([FIRST, ALL[0], ALL[2]], whole=False)
    assert not told([FIRST], key=b"k1")


def test_follower_that_began_at_the_latest_message_is_told_of_when_it_was_given_an_older_one():
    began = Opened(99, 99, after_keeping=False, latest=True)
    assert "was given the older one at (1, 0)" in told([began, ALL[0]])


def test_broadcast_may_be_given_messages_of_other_keys_in_any_order():
    other = TRUTH.stored | {(1, 2): (b"k1", b"p0.1:9")}
    truth = Truth(stored=other, ranges=TRUTH.ranges)
    notes = [FIRST, Given(1, 2, b"k1", b"p0.1:9"), *ALL]
    assert "behind offset 2" in told(notes, truth)
    assert not told(notes, truth, in_turn=False)


ROWS = ((1, 0), (1, 1), (3, 0))
CARRIED = stored_at(*ROWS, carried=True, members={2, 3})
CARRIED.stored |= {(2, 0): (KEY, b"p0.1:0"), (2, 1): (KEY, b"p0.1:1")}
"""Two messages of partition 1, which is gone, the rows in partition 2 that took their place, and a
message behind them.
"""
MESSAGES = [given(number, place) for number, place in enumerate(ROWS)]
IN_ROWS = [given(0, (2, 0)), given(1, (2, 1))]


def test_follower_is_clean_when_each_message_came_once_as_itself_or_as_its_row():
    assert not told([FIRST, *MESSAGES], CARRIED)
    assert not told([FIRST, *IN_ROWS, MESSAGES[2]], CARRIED)
    assert not told([FIRST, MESSAGES[0], IN_ROWS[1], MESSAGES[2]], CARRIED)


@pytest.mark.parametrize(
    ("notes", "problem"),
    [
        ([*MESSAGES[:2], IN_ROWS[1], MESSAGES[2]], "was given (2, 1) again, as (1, 1)"),
        ([MESSAGES[0], MESSAGES[2]], "was not given b'p0.1:1' at (2, 1)"),
        (
            [MESSAGES[0], MESSAGES[2], IN_ROWS[1]],
            "number 1 of p0.1 and b'k0' at (2, 1) behind number 2",
        ),
    ],
)
def test_follower_is_told_of_when_a_message_and_its_row_came_or_none_of_them(notes, problem):
    assert problem in told([FIRST, *notes], CARRIED)


TWICE_CARRIED = stored_at((1, 0), (1, 1), carried=True, members={3})
for partition_id in (2, 3):
    TWICE_CARRIED.stored |= {
        (partition_id, number): (KEY, b"p0.1:%d" % number) for number in (0, 1)
    }
"""Two messages of partition 1, the rows in 2 that took their place, and in 3 the rows that took the
place of these.
"""
ROWS_OF_ROWS = [given(0, (3, 0)), given(1, (3, 1))]


@pytest.mark.parametrize(
    ("notes", "problem"),
    [
        ([MESSAGES[0], *ROWS_OF_ROWS], ""),
        ([MESSAGES[0], Kept(), *ROWS_OF_ROWS, Opened(0, 0, after_keeping=True), *ROWS_OF_ROWS], ""),
        ([*MESSAGES[:2], *ROWS_OF_ROWS], "was given (3, 0) again, as (1, 0)"),
        ([MESSAGES[0], ROWS_OF_ROWS[0], *ROWS_OF_ROWS], "was given (3, 0) again"),
        ([MESSAGES[0], *ROWS_OF_ROWS, Kept(), ROWS_OF_ROWS[0]], "was given (3, 0) again"),
        ([MESSAGES[0], *IN_ROWS], "was given (2, 0) again, as (1, 0)"),
    ],
)
def test_row_of_a_row_may_come_after_its_message_when_the_follower_had_a_part_of_the_partition(
    notes, problem
):
    said = told([FIRST, *notes], TWICE_CARRIED)
    assert problem in said if problem else not said


@pytest.mark.parametrize("position", [2, 3])
def test_follower_that_began_in_a_partition_is_given_its_rows_from_the_first_on(position):
    """If it was not behind the partition when its rows were replaced as well."""
    truth = stored_at((1, 0), (1, 1), (1, 2), carried=True, members={3})
    for partition_id in (2, 3):
        truth.stored |= {(partition_id, number): (KEY, b"p0.1:%d" % number) for number in range(3)}
    began = Opened(4, 0, after_keeping=False, latest=True)
    notes = [began, Passed(1, position), given(1, (1, 1))]
    if position == 2:
        assert not told([*notes, *(given(number, (3, number)) for number in range(3))], truth)
    else:
        said = told([*notes, given(0, (3, 0))], truth)
        assert "number 0 of p0.1 and b'k0' at (3, 0) behind number 1" in said
        assert "began at the latest message, and was given the older one at (3, 0)" in said


@pytest.mark.parametrize(
    ("position", "problem"), [(1, ""), (2, "was given (3, 0) again, as (1, 0)")]
)
def test_row_of_a_row_comes_once_when_the_follower_of_one_key_was_behind_the_partition(
    position, problem
):
    """The last message of the partition has another key: what the follower was given does not tell
    whether it had read it.
    """
    truth = stored_at((1, 0), carried=True, members={3})
    truth.stored |= {(number, 0): (KEY, b"p0.1:0") for number in (2, 3)}
    truth.stored[1, 1] = (b"other", b"p0.1:1")
    notes = [FIRST, Passed(1, position), MESSAGES[0], Passed(3, 1), ROWS_OF_ROWS[0]]
    said = told(notes, truth, key=KEY)
    assert problem in said if problem else not said
    kept = [
        FIRST,
        Passed(1, position),
        MESSAGES[0],
        Kept(),
        Passed(1, 2),
        Opened(0, 0, after_keeping=True),
    ]
    said = told([*kept, Passed(3, 1), ROWS_OF_ROWS[0]], truth, key=KEY)
    assert problem in said if problem else not said


def test_follower_is_not_owed_messages_whose_rows_are_left_when_they_are_gone():
    """Of partition 1 nothing is owed, although nothing of it was removed one by one."""
    hidden = stored_at((1, 0), (3, 0), members={3})
    assert not told([FIRST, given(1, (3, 0))], hidden)
    assert "was not given b'p0.1:0'" in told([FIRST, given(1, (3, 0))], stored_at((1, 0), (3, 0)))


def test_follower_is_told_of_when_it_was_given_messages_of_two_subjects_of_a_name():
    lives = [{1}, {2}]
    assert "several subjects of one name" in told([FIRST, *ALL], stored_at(*THREE, lives=lives))
    anew = [FIRST, *ALL[:2], FIRST, ALL[2]]
    assert not told(anew, stored_at(*THREE, lives=lives, members={2}))


def test_numbers_may_fall_when_messages_may_leave_their_partition():
    notes = [FIRST, given(0, (1, 0)), given(2, (1, 1)), given(1, (1, 2))]
    truth = stored_at((1, 0), (1, 2), (1, 1))
    assert "number 1 of p0.1 and b'k0' at (1, 2) behind number 2" in told(notes, truth)
    assert not told(notes, stored_at((1, 0), (1, 2), (1, 1), in_order=False))


def test_follower_is_owed_what_a_dying_broker_was_removing_when_it_was_not_told():
    """The messages are on the disk again."""
    truth = stored_at(*THREE, removing={1: 2})
    assert "was not given b'p0.1:0' at (1, 0)" in told([FIRST, ALL[2]], truth)
    assert "was not given b'p0.1:1' at (1, 1)" in told([FIRST, Told(1, 1), ALL[2]], truth)
    assert not told([FIRST, Told(1, 2), ALL[2]], truth)
    assert not told([FIRST, ALL[2]], truth, notes_removals=False)
    assert "was not given b'p0.1:2' at (2, 0)" in told([FIRST, Told(2, 9), *ALL[:2]], truth)


def test_follower_is_not_through_when_it_is_yet_to_be_told_of_what_was_removed():
    """A run that ends before its next read would judge it as never told."""
    lineage = LineageOrder()
    emptied: Any = SimpleNamespace(
        first_offset=3,
        readable_offset=3,
        facts=SimpleNamespace(partition=SimpleNamespace(partition_id=1)),
    )
    assert not _is_through(emptied, 2, lineage)
    assert not _is_through(emptied, None, lineage)
    assert _is_through(emptied, 3, lineage)
    emptied.first_offset = emptied.readable_offset = 0
    assert _is_through(emptied, None, lineage)

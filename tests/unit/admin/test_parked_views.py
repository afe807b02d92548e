"""Which parked keys a caller asks for."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from keylane.admin.parked_views import (
    ParkedFilter,
    ParkedKeyView,
    find_oldest_view,
    select_views_being_adopted,
    to_parked_view,
    validate_key,
)
from keylane.protocol.errors import InvalidRequestError, Reason
from keylane.protocol.parked import Failure, ParkedView, ParkState
from keylane.protocol.routing import Partition, PartitionState, logical_partition
from support.raising import raises

FAILURE = Failure("TimeoutError", "no answer of the bank", "c", 7, 5)
NOW_MS = 10_000


def view(key: bytes | None, **changes: Any) -> ParkedKeyView:
    facts = {
        "partition_id": 7,
        "key": key,
        "state": ParkState.PARKED,
        "messages": 2,
        "since_ms": 4_000,
        "failure": FAILURE,
        "first_source": 3,
        "first_offset": 9,
    }
    return ParkedKeyView(**(facts | changes))


PARKED = view(b"a")
DEAD_KEY = view(b"a", state=ParkState.DEAD)
LETTERS = view(None)
RETRYING = view(None, tries=2)


@pytest.mark.parametrize(
    ("asked", "matching"),
    [
        ({}, [PARKED, DEAD_KEY, LETTERS, RETRYING]),
        ({"key": b"a"}, [PARKED, DEAD_KEY]),
        ({"key": None}, [LETTERS]),
        ({"dead": True}, [DEAD_KEY, LETTERS]),
        ({"dead": False}, [PARKED, RETRYING]),
        ({"key": b"a", "dead": True}, [DEAD_KEY, LETTERS]),
        ({"key": b"b", "dead": True}, [LETTERS]),
        ({"key": b"a", "error": "Timeout"}, [PARKED, DEAD_KEY]),
        ({"key": b"a", "error": "the bank"}, [PARKED, DEAD_KEY]),
        ({"error": "ValueError"}, [LETTERS, RETRYING]),
        ({"error": "ValueError", "key": b"a"}, []),
        ({"key": b"a", "older_than_ms": 6_000}, [PARKED, DEAD_KEY]),
        ({"older_than_ms": 6_001}, []),
    ],
)
def test_keys_are_chosen_by_key_kind_age_and_error(asked: dict, matching: list):
    wanted = ParkedFilter(**{"key": ..., "now_ms": NOW_MS, **asked})
    views = [PARKED, DEAD_KEY, LETTERS, RETRYING]
    assert [each for each in views if wanted.matches(each)] == matching


@pytest.mark.parametrize(
    ("asked", "since_ms", "failure", "chosen"),
    [
        ({"error": "the bank"}, 4_000, FAILURE, True),
        ({"error": "TimeoutError: no"}, None, FAILURE, True),
        ({"error": "ValueError"}, 4_000, FAILURE, False),
        ({"error": "the bank"}, 4_000, None, False),
        ({"older_than_ms": 6_000}, 4_000, None, True),
        ({"older_than_ms": 6_001}, 4_000, FAILURE, False),
        ({"older_than_ms": 0}, None, FAILURE, False),
        ({"older_than_ms": 6_000, "error": "x"}, 4_000, FAILURE, False),
        ({}, None, None, True),
    ],
)
def test_message_without_an_order_is_chosen_by_what_is_known_of_it(
    asked: dict[str, Any], since_ms: int | None, failure: Failure | None, chosen: bool
):
    wanted = ParkedFilter(..., now_ms=NOW_MS, **asked)
    assert wanted.selects(since_ms, failure) is chosen
    assert wanted.selects_partially(LETTERS) is bool(asked)
    assert not wanted.selects_partially(PARKED)


def test_dead_letters_of_any_key_are_looked_into_for_a_key():
    wanted = ParkedFilter(b"a", dead=True, now_ms=NOW_MS)
    assert wanted.dead_letter_key(LETTERS) == b"a"
    assert wanted.dead_letter_key(DEAD_KEY) is None
    assert ParkedFilter(None, dead=True, now_ms=NOW_MS).dead_letter_key(LETTERS) is None


@pytest.mark.parametrize(
    "asked", [{"error": ""}, {"error": 5}, {"older_than_ms": -1}, {"key": "a"}]
)
def test_value_that_cannot_be_is_refused(asked: dict):
    with pytest.raises(InvalidRequestError):
        ParkedFilter(**{"key": ..., "now_ms": NOW_MS, **asked})


def test_key_is_bytes_within_the_limit():
    validate_key(b"a")
    with pytest.raises(InvalidRequestError):
        validate_key(bytes(2_000))


def test_view_of_a_broker_is_told_whole():
    said = ParkedView(
        key_hex="61",
        state=ParkState.PARKED,
        messages=2,
        since_ms=4_000,
        failure=FAILURE,
        first_source=3,
        first_offset=9,
    )
    assert to_parked_view(7, said) == PARKED


def test_first_message_of_a_key_is_that_of_the_oldest_partition_in_its_lineage():
    """Also where a partition between them has none, and where one has the key under two names."""
    parents = {7: (5,), 5: (3,), 3: ()}
    child = view(b"a", partition_id=7, first_source=7, first_offset=0)
    oldest = view(b"a", partition_id=3, first_source=3, first_offset=9)
    letters = view(None, partition_id=3, first_source=3, first_offset=12)
    assert find_oldest_view([child, letters, oldest], parents) == oldest
    assert find_oldest_view([child], parents) == child


def test_no_message_is_the_first_of_partitions_that_do_not_follow_each_other():
    views = [view(b"a", partition_id=each, first_source=each, first_offset=0) for each in (7, 9)]
    with raises(Reason.PARKED_KEY_AMBIGUOUS, match="7, 9") as caught:
        find_oldest_view(views, {7: (3,), 9: (3,)})
    assert caught.value.partition_ids == "7, 9"


def test_key_without_messages_has_no_first_one():
    with raises(Reason.PARKED_KEY_UNKNOWN):
        find_oldest_view([view(b"a", messages=0, first_source=7, first_offset=-1)], {})


def partition(start: int, end: int) -> Partition:
    return Partition(
        partition_id=1,
        name="p",
        queue=0,
        range_start=start,
        range_end=end,
        broker_group="g0",
        state=PartitionState.OPEN,
    )


def test_views_are_being_adopted_while_the_child_of_their_key_waits():
    """Those without a place of their own go where the first logical partition goes."""
    number = logical_partition(b"a")
    parent, before, of_key, after = (
        partition(start, end)
        for start, end in (
            (number - 1, number + 2),
            (number - 1, number),
            (number, number + 1),
            (number + 1, number + 2),
        )
    )
    displaced = view(
        next(b"%d" % n for n in range(99) if logical_partition(b"%d" % n) > number + 1)
    )
    views = [PARKED, view(b""), LETTERS, RETRYING, displaced]

    def selected(*waiting: Partition) -> list[ParkedKeyView]:
        passed = select_views_being_adopted(views, parent, waiting)
        assert all(each.being_adopted for each in passed)
        return [replace(each, being_adopted=False) for each in passed]

    assert selected(before, of_key, after) == views
    assert selected(of_key) == [PARKED]
    assert selected(before, after) == views[1:]
    assert selected() == selected(after) == []

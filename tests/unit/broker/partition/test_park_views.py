"""What operators see of parked messages, and what they ask for."""

from __future__ import annotations

import pytest

from keylane.broker.partition.park_views import build_parked_list, changes_for_operator, decode_key
from keylane.broker.partition.parked import Parked
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.parked import (
    PARKED_ROWS_MAX,
    ChangeParkedKey,
    Failure,
    Park,
    ParkState,
    Redrive,
    Shift,
    Unpark,
)

FAILURE = Failure("ValueError", "no", "c", 5, 3)


def parked_of(*changes: object) -> Parked:
    parked = Parked(7)
    for change in changes:
        parked.apply(change, at_ms=5)
    return parked


def test_key_without_messages_is_listed():
    parked = parked_of(Park(b"k", ((0, 1),), FAILURE), Unpark(b"k", 7, ((0, 1),)))
    (view,) = build_parked_list(parked, "g", 0, 10).keys
    assert (view.messages, view.first_source, view.first_offset) == (0, 7, -1)


def test_messages_that_wait_for_retry_are_listed_on_request():
    parked = parked_of(
        Park(b"k", ((0, 1),), FAILURE),
        Park(3, ((1, 3),), FAILURE),
        Park(1, ((5, 6),), FAILURE),
        Shift(1, -2, 7, ((5, 6),)),
    )
    parked.set_retry_times([(3, 7, 2, 80), (3, 7, 1, 90)])
    assert [view.key_hex for view in build_parked_list(parked, "g", 0, 10).keys] == ["6b"]
    views = build_parked_list(parked, "g", 1, 10, retrying=True).keys
    assert [(view.key_hex, view.tries, view.messages, view.next_ms) for view in views] == [
        (None, 3, 2, 80),
        (None, 1, 1, None),
    ]
    assert [view.state for view in views] == [ParkState.PARKED, ParkState.REDRIVING]
    first = build_parked_list(parked, "g", 0, 1, retrying=True)
    assert (len(first.keys), first.more) == (1, True)


def test_totals_are_of_all_keys_with_their_newest_failure_whatever_the_page_holds():
    parked = parked_of(
        *(Park(b"%d" % number, ((number, number + 1),), FAILURE) for number in range(30)),
        Park(b"late", ((40, 42),), Failure("KeyError", "newest", "c", 90, 1)),
        Park(3, ((50, 60),), Failure("OSError", "it is tried again", "c", 99, 1)),
    )
    page = build_parked_list(parked, "g", 0, 10, retrying=True)
    assert (len(page.keys), page.more) == (10, True)
    totals = page.totals
    assert (totals.keys, totals.messages, totals.since_ms) == (31, 32, 5)
    assert totals.failure.text == "newest"
    assert build_parked_list(parked, "g", 10, 10).totals is None
    assert build_parked_list(parked, "g", 0, 10, key=b"late").totals is None


@pytest.mark.parametrize(("hexed", "key"), [("4e31", b"N1"), ("", b""), (None, None)])
def test_key_is_read_from_hexadecimal(hexed: str | None, key: bytes | None):
    assert changes_for_operator(ChangeParkedKey(group="g", key_hex=hexed)) == [Redrive(key)]
    asked = ChangeParkedKey(group="g", key_hex=hexed, skip=[(3, 0, 1), (7, 4, 6)])
    assert changes_for_operator(asked) == [Unpark(key, 3, ((0, 1),)), Unpark(key, 7, ((4, 6),))]


@pytest.mark.parametrize(
    "asked",
    [
        ChangeParkedKey(group="g", key_hex="4e3"),
        ChangeParkedKey(group="g", key_hex="zz"),
        ChangeParkedKey(group="g", key_hex="4e", skip=[]),
        ChangeParkedKey(group="g", key_hex="4e", skip=[(1, 0, 1)] * (PARKED_ROWS_MAX + 1)),
    ],
)
def test_change_of_an_operator_is_refused_when_it_is_impossible(asked: ChangeParkedKey):
    with pytest.raises(InvalidRequestError):
        changes_for_operator(asked)
    assert decode_key("4e") == b"N"

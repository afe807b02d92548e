"""What a group has parked: the fold over changes, pages of it, its image, and what takes a change
back.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from keylane.broker.partition.park_checks import count_dead
from keylane.broker.partition.park_views import (
    build_adoption_page,
    build_parked_list,
    changes_to_rebuild,
    list_parked_keys,
    list_parked_offsets,
)
from keylane.broker.partition.parked import Parked
from keylane.protocol.errors import Reason
from keylane.protocol.offsets import AckedOffsets
from keylane.protocol.parked import (
    FAILURE_TEXT_CHARS_MAX,
    PARKED_PAGE_BYTES,
    PARKED_ROWS_MAX,
    Adopt,
    AdoptedKey,
    Clear,
    DeadLetterKey,
    Edit,
    EditedMessage,
    Failure,
    Free,
    Freeze,
    Park,
    ParkChange,
    ParkState,
    Redrive,
    Shift,
    Unpark,
)
from keylane.protocol.routing import logical_partition
from support.raising import raises

FAILURE = Failure("ValueError", "no", "c", 5, 3)


def parked_of(*changes: ParkChange, own: int = 7) -> Parked:
    parked = Parked(own)
    for at_ms, change in enumerate(changes, 1):
        parked.apply(change, at_ms=at_ms)
    return parked


def rows(parked: Parked, key: bytes | None) -> list[tuple[int, int, int]]:
    known = parked.get(key)
    return [] if known is None else list(known.rows())


def test_parked_messages_are_acked():
    acked = AckedOffsets(2)
    Parked(7).apply(Park(b"k", ((2, 3), (5, 6)), FAILURE), at_ms=1, acked=acked)
    assert (acked.cursor, acked.ranges) == (3, [(5, 6)])


def test_key_is_parked_until_it_is_freed():
    parked = parked_of(Park(b"k", ((2, 3),), FAILURE), Park(b"k", ((5, 6),)), Redrive(b"k"))
    assert (rows(parked, b"k"), parked.messages) == ([(7, 2, 3), (7, 5, 6)], 2)
    assert parked.get(b"k").state is ParkState.REDRIVING
    parked.apply(Unpark(b"k", 7, ((2, 3), (5, 6))), at_ms=9)
    assert (parked.messages, len(parked)) == (0, 1)
    parked.apply(Free(b"k"), at_ms=9)
    assert (len(parked), bool(parked), parked.owner_version) == (0, False, 0)


def test_key_that_fails_again_is_parked_again():
    parked = parked_of(Park(b"k", ((2, 3),), FAILURE), Redrive(b"k"))
    again = Failure("KeyError", "again", "d", 6, 4)
    parked.apply(Park(b"k", (), again), at_ms=9)
    known = parked.get(b"k")
    assert (known.state, known.failure, known.since_ms) == (ParkState.PARKED, again, 1)


def test_failure_of_a_key_goes_with_the_message_that_failed():
    """The next message of the key has not been handled, and has no failure."""
    parked = parked_of(Park(b"k", ((2, 4), (5, 7)), FAILURE))
    parked.apply(Unpark(b"k", 7, ((6, 7),)), at_ms=9)
    assert parked.get(b"k").failure == FAILURE
    undo = parked.apply(Unpark(b"k", 7, ((2, 3),)), at_ms=9)
    assert parked.get(b"k").failure is None
    assert Parked.of_image(7, parked.image()).get(b"k").failure is None
    undo()
    assert parked.get(b"k").failure == FAILURE
    parked.apply(Unpark(b"k", 7, ((2, 3),)), at_ms=9)
    again = Failure("KeyError", "again", "d", 6, 4)
    parked.apply(Park(b"k", (), again), at_ms=9)
    assert parked.get(b"k").failure == again


@pytest.mark.parametrize("key", [b"", None])
def test_loose_messages_leave_no_key_behind(key: bytes | None):
    parked = parked_of(Park(key, ((2, 4),), FAILURE))
    undo = parked.apply(Unpark(key, 7, ((2, 4),)), at_ms=2)
    assert (len(parked), parked.messages) == (0, 0)
    undo()
    assert (rows(parked, key), parked.messages) == ([(7, 2, 4)], 2)


@pytest.mark.parametrize("key", [b"", None, 1, -1])
def test_loose_key_without_messages_is_not_made(key: bytes | int | None):
    empty = AdoptedKey(key, ParkState.PARKED, 1, FAILURE, ())
    parked = parked_of(Park(key, (), FAILURE), Adopt(3, (empty,), last=True))
    assert (len(parked), parked.adopted_parents) == (0, {3})


def test_messages_of_an_ancestor_come_before_the_own():
    """Whatever the order in which they are adopted and parked."""
    adopted = AdoptedKey(b"k", ParkState.PARKED, 1, FAILURE, ((5, 0, 1),))
    grown = AdoptedKey(b"k", ParkState.PARKED, 1, FAILURE, ((3, 8, 9),))
    parked = parked_of(
        Park(b"k", ((0, 1),), FAILURE),
        Adopt(5, (adopted,), last=True),
        Adopt(3, (grown,), last=True),
    )
    assert rows(parked, b"k") == [(3, 8, 9), (5, 0, 1), (7, 0, 1)]
    assert (parked.adopted_parents, parked.lowest_own_offset()) == ({3, 5}, 0)


def test_first_own_message_is_the_lowest_of_all_keys():
    other = AdoptedKey(b"c", ParkState.PARKED, 1, None, ((3, 1, 2),))
    parked = parked_of(
        Park(b"a", ((9, 10),), FAILURE),
        Park(b"b", ((4, 5),), FAILURE),
        Adopt(3, (other,), last=False),
    )
    assert parked.lowest_own_offset() == 4
    parked.apply(Clear(), at_ms=1)
    assert parked.lowest_own_offset() is None


def test_adopted_key_is_parked_since_the_older_time():
    parked = parked_of(Park(b"k", ((0, 1),), FAILURE))
    undo = parked.apply(
        Adopt(3, (AdoptedKey(b"k", ParkState.REDRIVING, -5, None, ()),), last=True), at_ms=50
    )
    assert parked.get(b"k").since_ms == -5
    undo()
    known = parked.get(b"k")
    assert (known.since_ms, known.state, known.failure, parked.adopted_parents) == (
        1,
        ParkState.PARKED,
        FAILURE,
        set(),
    )


def test_page_has_its_rows_and_goes_on_in_a_key():
    """A key with more rows than a page has is in several pages; no row is lost or twice."""
    spread = tuple((2 * number, 2 * number + 1) for number in range(PARKED_ROWS_MAX + 10))
    parked = parked_of(
        Park(b"a", ((0, 3),), FAILURE), Park(b"k", spread, FAILURE), Park(b"z", ((50_000, 50_001),))
    )
    parked.apply(Park(b"e", (), FAILURE), at_ms=1)
    page, following = build_adoption_page(parked, lambda _key: True)
    assert following == PARKED_ROWS_MAX
    rest, end = build_adoption_page(parked, lambda _key: True, first_row=following)
    assert end is None
    assert [key.key for key in page] == [b"a", b"k"]
    assert [key.key for key in rest] == [b"k", b"z", b"e"]
    assert page[1].rows + rest[0].rows == tuple(rows(parked, b"k"))
    assert build_adoption_page(parked, lambda _key: True, first_row=99_999) == ([], None)
    only = build_adoption_page(parked, lambda number: number == logical_partition(b"z"))
    assert [key.key for key in only[0]] == [b"z"]


def test_pages_keep_their_length():
    """Long keys and long texts end a page, in every way in which keys are listed."""
    failure = Failure("E", "ж" * FAILURE_TEXT_CHARS_MAX, "c", 5, 3)
    parked = parked_of(
        *(Park(b"%04d" % n + b"k" * 1000, ((n, n + 1),), failure) for n in range(1500))
    )
    pages, first = [], 0
    while first is not None:
        page, first = build_adoption_page(parked, lambda _key: True, first_row=first)
        pages.append(page)
    assert sum(len(page) for page in pages) == 1500
    assert all(len(msgspec.msgpack.encode(page)) < PARKED_PAGE_BYTES + 8_192 for page in pages)
    listed = build_parked_list(parked, "g", 0, 1_000)
    assert listed.more
    assert len(msgspec.json.encode(listed)) < PARKED_PAGE_BYTES + 16_384
    assert build_parked_list(parked, "g", 1499, 1_000).more is False
    key_rows = list_parked_keys(parked, 0)
    assert len(msgspec.msgpack.encode(key_rows)) < PARKED_PAGE_BYTES + 8_192
    assert list_parked_keys(parked, len(key_rows))[0].key[:4] == b"%04d" % len(key_rows)


def test_offsets_of_a_key_are_given_from_the_oldest_on():
    adopted = AdoptedKey(b"k", ParkState.PARKED, 1, None, ((3, 0, 4),))
    parked = parked_of(Park(b"k", ((0, 2), (5, 9)), FAILURE), Adopt(3, (adopted,), last=True))
    assert list_parked_offsets(parked, b"k", count=5).rows == [(3, 0, 4), (7, 0, 1)]
    assert list_parked_offsets(parked, b"k", count=9, first=1).rows == [(7, 0, 2), (7, 5, 9)]
    assert list_parked_offsets(parked, b"k", count=1).messages == 10
    assert list_parked_offsets(parked, b"other", count=1).rows == []


def test_buried_key_is_dead_with_all_its_messages():
    before = parked_of(Park(b"k", ((0, 2),), FAILURE), Park(None, ((5, 6),), FAILURE))
    image = before.image()
    undo = before.apply(DeadLetterKey(b"k", ((3, 4),)), at_ms=9)
    key = before.get(b"k")
    assert (key.state, key.failure, key.since_ms) == (ParkState.DEAD, FAILURE, 1)
    assert list(key.rows()) == [(7, 0, 2), (7, 3, 4)]
    assert count_dead(before) == (1, 4)
    assert Parked.of_image(7, before.image()).get(b"k").state is ParkState.DEAD
    undo()
    assert (before.image(), count_dead(before)) == (image, (0, 1))


def test_next_tries_are_known_until_the_message_leaves():
    parked = parked_of(Park(2, ((0, 2),), FAILURE))
    parked.set_retry_times([(2, 7, 0, 400), (2, 7, 1, 300), (2, 7, 9, 1), (3, 7, 0, 1)])
    assert parked.get(2).retry_at_ms == 300
    parked.apply(Shift(2, 3, 7, ((1, 2),), FAILURE), at_ms=1)
    assert (parked.get(2).retry_at_ms, parked.get(3).retry_at_ms) == (400, None)
    parked.clear_retry_times()
    assert parked.get(2).retry_at_ms is None


def test_image_of_nothing_is_empty():
    assert Parked(7).image() == b""
    assert not Parked.of_image(7, b"")


def test_image_of_frozen_and_adopted_is_kept_without_keys():
    parked = parked_of(Adopt(3, (), last=True), Freeze())
    again = Parked.of_image(7, parked.image())
    assert (again.adopted_parents, again.frozen, bool(again), len(again)) == ({3}, True, True, 0)


def test_image_tells_under_which_token_a_parent_was_adopted():
    """And a change that is written again has it; a Clear forgets it, and an undo restores it."""
    parked = parked_of()
    parked.apply(Adopt(3, (), last=True), at_ms=1, token=5)
    undo = parked.apply(Adopt(3, (), last=True), at_ms=2, token=9)
    assert Parked.of_image(7, parked.image()).adoption_tokens == {3: 9}
    undo()
    again = Parked.of_image(7, parked.image())
    assert (again.adopted_parents, again.adoption_tokens) == ({3}, {3: 5})
    assert next(again.token_for_rewrite(change, 8) for change in changes_to_rebuild(again)) == 5
    take_back = again.apply(Clear(), at_ms=3)
    assert not again
    take_back()
    assert again.adoption_tokens == {3: 5}


MILLION = """
import resource
from array import array
import msgspec
from keylane.broker.partition.park_views import changes_to_rebuild
from keylane.broker.partition.park_checks import count_dead
from keylane.broker.partition.parked import Parked
from keylane.protocol.parked import Failure, Park

def resident_kb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = resident_kb()
failure = Failure("E", "text", "c", 1, 5)
keys = []
for place in range(1_000):
    starts = array("q", range(place, 900_000, 1_000)).tobytes()
    ends = array("q", range(place + 1, 900_001, 1_000)).tobytes()
    keys.append((b"key-%04d" % place, "parked", 1, failure, [(1, starts, ends)]))
parked = Parked.of_image(1, msgspec.msgpack.encode((keys, False, [])))
for place in range(1_000):
    ranges = tuple((offset, offset + 1) for offset in range(900_000 + place, 1_000_000, 1_000))
    parked.apply(Park(b"key-%04d" % place, ranges), at_ms=1)
assert parked.messages == 1_000_000
again = Parked.of_image(1, parked.image())
pages = sum(1 for _ in changes_to_rebuild(again))
assert again.messages == 1_000_000 and pages >= 200, pages
print((resident_kb() - before) // 1024)
"""


def test_million_parked_messages_take_under_100_mb():
    """Of 1,000 keys in turn, with an image, what is read from it, and the changes that carry it
    over.
    """
    done = subprocess.run(
        [sys.executable, "-c", MILLION], check=True, capture_output=True, text=True, timeout=120
    )
    assert int(done.stdout) < 100


MINE = AdoptedKey(b"k", ParkState.PARKED, 1, FAILURE, ((3, 0, 2),), token=5)


# ── edits ─────────────────────────────────────────────────────────────────────────────────────────
def edit(source: int, offset: int, value: bytes = b"mended") -> Edit:
    return Edit(b"k", EditedMessage(source, offset, value, b"p"))


def test_edit_ends_with_its_message():
    """A later one takes its place; what takes the end back brings it back."""
    parked = parked_of(Park(b"k", ((2, 4),), FAILURE), edit(7, 3, b"first"), edit(7, 3))
    assert parked.find_edit(b"k", (7, 3)) == edit(7, 3).message
    assert parked.find_edit(b"k", (7, 2)) is None
    undo = parked.apply(Unpark(b"k", 7, ((2, 4),)), at_ms=9)
    assert list(parked.list_edits()) == []
    undo()
    assert parked.find_edit(b"k", (7, 3)) == edit(7, 3).message


def test_owner_has_messages_of_a_parked_key_handled_until_a_failure():
    """Its tail may be parked, or find no room, meanwhile; what takes a failure back brings the
    owner back.
    """
    parked = parked_of(Park(b"k", ((2, 4),), FAILURE), Park(b"k", (), FAILURE, 5))
    for change in (
        Park(b"k", ((5, 6),)),
        DeadLetterKey(b"k", ((7, 8),)),
        Unpark(b"k", 7, ((2, 3),)),
    ):
        parked.apply(change, at_ms=9)
        assert parked.get(b"k").is_being_handled(5)
        assert not parked.get(b"k").is_being_handled(6)
    assert parked.get(b"k").failure == FAILURE  # which the owner has declared for its own end
    assert not Parked.of_image(7, parked.image()).get(b"k").is_being_handled(0)
    for change in (
        Park(b"k", (), FAILURE),
        DeadLetterKey(b"k", (), FAILURE),
        Adopt(3, (MINE,), last=True),
    ):
        undo = parked.apply(change, at_ms=9)
        assert not parked.get(b"k").is_being_handled(5)
        undo()
        assert parked.get(b"k").is_being_handled(5)


def test_edit_of_a_message_that_is_not_parked_changes_nothing():
    parked = parked_of(Park(b"k", ((2, 4),), FAILURE), edit(7, 4), edit(3, 2))
    assert list(parked.list_edits()) == []
    for key, place in ((b"k", (7, 4)), (b"k", (3, 2)), (None, (7, 2))):
        with raises(Reason.PARKED_MESSAGE_UNKNOWN):
            parked.find_edit(key, place)


def test_adopted_edit_gives_way_to_one_that_was_made_here():
    """The pages of a parent may come after an operator's edit of the same message."""
    rows = AdoptedKey(b"k", ParkState.PARKED, 1, FAILURE, ((3, 0, 2),))
    late = AdoptedKey(
        b"k",
        ParkState.PARKED,
        1,
        FAILURE,
        (),
        (edit(3, 0, b"old").message, edit(3, 1, b"old").message),
    )
    parked = parked_of(
        Adopt(3, (rows,), last=False), edit(3, 0, b"new"), Adopt(3, (late,), last=True)
    )
    assert [each.value for _, each in parked.list_edits()] == [b"new", b"old"]


def test_offsets_name_the_edited_messages_of_a_page():
    parked = parked_of(Park(b"k", ((0, 2), (5, 8)), FAILURE), edit(7, 1), edit(7, 6), edit(7, 7))
    assert list_parked_offsets(parked, b"k", count=4).edited == [(7, 1), (7, 6)]
    assert list_parked_offsets(parked, b"k", count=9, first=1).edited == [(7, 6), (7, 7)]


def test_pages_hold_edits_up_to_their_size():
    """Behind all rows; each page is adopted by itself, and together they have everything."""
    large = PARKED_PAGE_BYTES // 2 - 200
    parked = parked_of(
        Park(b"k", ((0, 6),), FAILURE),
        *(edit(7, offset, bytes(large)) for offset in range(4)),
        edit(7, 5, bytes(2 * PARKED_PAGE_BYTES)),
    )
    pages, first = [], 0
    while first is not None:
        page, first = build_adoption_page(parked, lambda _key: True, first_row=first)
        pages.append(page)
    sizes = [[len(each.value) for key in page for each in key.edits] for page in pages]
    assert sizes == [[large] * 2, [large] * 2, [2 * PARKED_PAGE_BYTES]]
    child = Parked(9)
    for page in pages:
        child.apply(Adopt(7, tuple(page), last=False), at_ms=9)
    assert list(child.list_edits()) == list(parked.list_edits())
    assert child.messages == 6

"""How messages without an order failed: rows of offsets, what is said of too many, and a million of
them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from keylane.broker.partition import failure_ranges, parked_key
from keylane.broker.partition.failure_ranges import UNKNOWN, FailureRanges, FaultTable, Mark
from keylane.broker.partition.offset_ranges import OffsetRanges
from keylane.broker.partition.park_views import (
    build_adoption_page,
    changes_to_rebuild,
    list_offsets_with_failures,
)
from keylane.broker.partition.parked import Parked
from keylane.protocol.parked import (
    PARKED_PAGE_BYTES,
    PARKED_ROWS_MAX,
    RETRIED,
    Adopt,
    FailAgain,
    Failure,
    Fault,
    Park,
    ParkKey,
    Redrive,
    Shift,
    Unpark,
)

FAILURE = Failure("ValueError", "no", "c", 5, 3)
OTHER = Failure("KeyError", "town", "d", 6, 2)


def told(parked: Parked, key: ParkKey = None) -> list[tuple[int, int, int, Failure | None]]:
    """Start, end, since when, and the failure of messages under a key."""
    known = parked.get(key)
    assert known is not None
    return [
        (start, end, mark.since_ms, parked.failure(mark))
        for _, start, end, mark in known.rows_with_marks((0, 0), 10_000)
    ]


# ── of each message ───────────────────────────────────────────────────────────────────────────────
def test_failure_of_a_message_stays_beside_later_ones():
    parked = Parked(7)
    for at_ms, (start, failure) in enumerate(((0, FAILURE), (4, OTHER), (2, FAILURE)), 1):
        parked.apply(Park(None, ((start, start + 2),), failure), at_ms=at_ms)
    assert told(parked) == [(0, 2, 1, FAILURE), (2, 4, 3, FAILURE), (4, 6, 2, OTHER)]
    parked.apply(Unpark(None, 7, ((1, 3),)), at_ms=9)
    assert told(parked) == [(0, 1, 1, FAILURE), (3, 4, 3, FAILURE), (4, 6, 2, OTHER)]


def test_chosen_dead_letters_keep_their_failures_until_they_fail_again():
    parked = Parked(7)
    parked.apply(Park(None, ((0, 2),), FAILURE), at_ms=1)
    parked.apply(Park(None, ((2, 3),), OTHER), at_ms=2)
    parked.apply(Shift(None, RETRIED, 7, ((1, 3),)), at_ms=8)
    assert told(parked, RETRIED) == [(1, 2, 1, FAILURE), (2, 3, 2, OTHER)]
    parked.apply(Shift(RETRIED, None, 7, ((2, 3),), FAILURE), at_ms=9)
    assert told(parked) == [(0, 1, 1, FAILURE), (2, 3, 9, FAILURE)]


def test_dead_letters_that_fail_again_are_set_aside_since_the_first_time():
    parked = Parked(7)
    parked.apply(Park(None, ((0, 3),), FAILURE), at_ms=1)
    parked.apply(Redrive(None), at_ms=2)
    undo = parked.apply(FailAgain(None, 7, ((1, 2), (9, 10)), OTHER), at_ms=9)
    assert told(parked) == [(0, 1, 1, FAILURE), (1, 2, 1, OTHER), (2, 3, 1, FAILURE)]
    assert parked.get(None).failure == OTHER
    undo()
    assert told(parked) == [(0, 3, 1, FAILURE)]
    assert parked.get(None).failure == FAILURE


def test_messages_of_a_key_have_no_failures_of_their_own():
    parked = Parked(7)
    parked.apply(Park(b"k", ((0, 3),), FAILURE), at_ms=1)
    assert told(parked, b"k") == [(0, 3, 0, None)]
    assert list_offsets_with_failures(parked, b"k", after=(0, 0)).details == []


def test_child_adopts_how_messages_failed_and_not_when_they_are_tried():
    """Its owner tries at once what waits; the group's own log keeps the times."""
    parked = Parked(7)
    parked.apply(Park(2, ((0, 1),), FAILURE), at_ms=1)
    parked.set_retry_times([(2, 7, 0, 400)])
    keys, _ = build_adoption_page(parked, lambda _key: True)
    child, again = Parked(9), Parked(7)
    child.apply(Adopt(7, tuple(keys), last=True), at_ms=5)
    assert told(child, 2) == [(0, 1, 1, FAILURE)]
    assert child.get(2).retry_at_ms is None
    for change in changes_to_rebuild(parked):
        again.apply(change, at_ms=0)
    assert (told(again, 2), again.get(2).retry_at_ms) == ([(0, 1, 1, FAILURE)], 400)


def test_forgotten_tries_are_restored_when_nothing_is_known_of_the_messages_of_another_source():
    """Those that had failed have left: an error in place of the undo left a fence raised that was
    not written.
    """
    parked = Parked(7)
    parked.apply(Park(2, ((0, 1), (5, 6)), FAILURE), at_ms=1)
    parked.set_retry_times([(2, 7, 5, 400)])
    key = parked.get(2)
    key.add(3, 0, 1)
    key.add(3, 5, 6)
    key.set_failure_marks([(3, 0, 1, Mark(1, 2, 0, 300))])
    key.remove(3, 0, 1)
    undo = parked.clear_retry_times()
    assert key.retry_at_ms is None
    undo()
    assert key.retry_at_ms == 400


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────
def test_details_come_by_page_from_a_place_on():
    parked = Parked(7)
    for offset in range(6):
        parked.apply(Park(None, ((2 * offset, 2 * offset + 1),), FAILURE), at_ms=offset + 1)
    page = list_offsets_with_failures(parked, None, after=(7, 3), count=2)
    assert (page.rows, page.more) == ([(7, 4, 5), (7, 6, 7)], True)
    assert page.details == [(3, 5, 0, 0), (4, 5, 0, 0)]
    assert page.faults == [Fault("ValueError", "no", "c", 3)]
    last = list_offsets_with_failures(parked, None, after=(7, 7), count=9)
    assert (last.rows, last.more) == ([(7, 8, 9), (7, 10, 11)], False)
    assert list_offsets_with_failures(parked, None, after=(8, 0)).rows == []


def test_pages_end_before_their_texts_are_too_long():
    """Of details, and of what a child adopts: each has something, and together they have all."""
    parked = Parked(7)
    for offset in range(1_000):
        failure = Failure("E", f"{offset:04d}" + "x" * 990, "c", 5, 3)
        parked.apply(Park(None, ((offset, offset + 1),), failure), at_ms=offset + 1)
    rows, more = 0, True
    while more:
        page = list_offsets_with_failures(parked, None, after=(7, rows))
        assert 0 < len(page.rows) <= PARKED_PAGE_BYTES // 990 + 1
        rows, more = rows + len(page.rows), page.more
    assert rows == 1_000
    child = Parked(9)
    first_row: int | None = 0
    while first_row is not None:
        keys, first_row = build_adoption_page(parked, lambda _key: True, first_row=first_row)
        assert sum(len(key.marks) for key in keys) <= PARKED_ROWS_MAX
        child.apply(Adopt(7, tuple(keys), last=first_row is None), at_ms=1)
    assert told(child) == told(parked)


# ── too many ──────────────────────────────────────────────────────────────────────────────────────
def test_oldest_messages_are_told_coarsely_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of one error every message keeps it; the latest keep their times."""
    monkeypatch.setattr(failure_ranges, "FAILURE_RANGES_MAX", 100)
    parked = Parked(7)
    for offset in range(1_000):
        parked.apply(Park(None, ((offset, offset + 1),), FAILURE), at_ms=offset + 1)
    runs = parked.get(None).failures[7]
    assert len(runs) <= 100
    rows = told(parked)
    assert {failure for *_, failure in rows} == {FAILURE}
    assert all(since_ms >= end for _, end, since_ms, _ in rows), "no message seems older than it is"
    assert rows[-20:] == [(offset, offset + 1, offset + 1, FAILURE) for offset in range(980, 1_000)]
    assert parked.get(None).messages == 1_000


def test_failures_of_the_oldest_messages_are_dropped_when_too_many_differ(
    monkeypatch: pytest.MonkeyPatch,
):
    """Never the messages."""
    monkeypatch.setattr(failure_ranges, "FAILURE_RANGES_MAX", 100)
    parked = Parked(7)
    for offset in range(1_000):
        failure = (FAILURE, OTHER)[offset % 2]
        parked.apply(Park(None, ((offset, offset + 1),), failure), at_ms=offset + 1)
    rows = told(parked)
    assert rows[0][2:] == (0, None)
    assert rows[-50:] == [
        (offset, offset + 1, offset + 1, (FAILURE, OTHER)[offset % 2])
        for offset in range(950, 1_000)
    ]
    assert sum(end - start for start, end, *_ in rows) == parked.get(None).messages == 1_000


def test_texts_of_the_oldest_failures_are_dropped_when_too_many_differ(
    monkeypatch: pytest.MonkeyPatch,
):
    """Their types, times and tries stay."""
    monkeypatch.setattr(failure_ranges, "FAULTS_MAX", 40)
    parked = Parked(7)
    for offset in range(200):
        failure = Failure("KeyError", f"order {offset}", "c", offset, 3)
        parked.apply(Park(None, ((offset, offset + 1),), failure), at_ms=offset + 1)
    rows = told(parked)
    assert [since_ms for _, _, since_ms, _ in rows] == list(range(1, 201))
    assert [(f.kind, f.at_ms, f.attempts) for *_, f in rows if f] == [
        ("KeyError", offset, 3) for offset in range(200)
    ]
    known = [f.text for *_, f in rows if f and f.text]
    assert known == [f"order {offset}" for offset in range(200 - len(known), 200)]
    assert 20 <= len(known) <= 40


def test_faults_that_nothing_is_said_of_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(failure_ranges, "FAULT_CHARS_MAX", 399)
    faults = FaultTable()
    numbers = [faults.intern(Fault("E", f"{place:099d}", "", 1)) for place in range(4)]
    assert faults.is_over_limit
    assert faults.prune({numbers[3]}) == {}
    assert faults.get(numbers[0]) is None
    assert faults.get(numbers[3]) is not None
    assert faults.intern(Fault("E", "new", "", 1)) > numbers[3]


def test_key_says_nothing_of_a_late_message_between_others():
    """What was parked without a failure, in the gap of a row, has none."""
    key = parked_key.ParkedKey(1)
    key.add(7, 0, 1)
    key.set_failure_marks([(7, 0, 1, UNKNOWN)])
    mark = Mark(5, 5, 1)
    for offset in (10, 30):
        key.add(7, offset, offset + 1)
        key.set_failure_marks([(7, offset, offset + 1, mark)])
    assert len(key.failures[7]) == 1
    key.add(7, 20, 21)
    key.set_failure_marks([(7, 20, 21, UNKNOWN)])
    assert [known for *_, known in key.rows_with_marks((0, 0), 9)] == [UNKNOWN, mark, UNKNOWN, mark]


def test_row_at_the_front_leaves_with_its_messages():
    runs, present = FailureRanges(), OffsetRanges([(0, 3_000)])
    for offset in range(3_000):
        runs.set_mark(offset, offset + 1, Mark(offset + 1, 0, 1))
    for offset in range(2_990):
        present.remove(offset, offset + 1)
        runs.clear_marks(offset, offset + 1, present)
    assert len(runs) <= 11
    assert [mark.since_ms for *_, mark in runs.marks_in(2_990, 3_000)] == list(range(2_991, 3_001))


MANY = """
import resource
import sys
from keylane.broker.partition.park_views import changes_to_rebuild, list_offsets_with_failures
from keylane.broker.partition.parked import Parked
from keylane.protocol.parked import Failure, Park

def resident_kb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

COUNT = int(sys.argv[1])
before = resident_kb()
parked = Parked(1)
for first in range(0, COUNT, 5):
    failure = Failure("TimeoutError", "no answer of the bank", "host:consumer", 1_800_000_000_000 + first, 5)
    ranges = tuple((2 * offset, 2 * offset + 1) for offset in range(first, first + 5))
    parked.apply(Park(None, ranges, failure), at_ms=1_800_000_000_001 + first)
assert parked.messages == COUNT
again = Parked.of_image(1, parked.image())
assert again.messages == COUNT
marks = sum(len(key.marks) for change in changes_to_rebuild(again) for key in change.keys)
assert 50_000 < marks <= 100_000, marks
place, texts = (0, 0), set()
while (page := list_offsets_with_failures(again, None, after=place)).rows:
    texts |= {page.faults[fault].text for _, _, fault, _ in page.details}
    place = page.rows[-1][0], page.rows[-1][2]
assert texts == {"no answer of the bank"}
print((resident_kb() - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [550_000, pytest.param(1_000_000, marks=pytest.mark.whole)])
def test_million_dead_letters_of_one_error_take_under_100_mb(count):
    """Five at a time of their own, each between others that were handled; with images, and what
    carries them over.
    """
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(count)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert int(done.stdout) < count // 10_000

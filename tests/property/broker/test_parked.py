"""Parked messages against any sequence of requests: what a snapshot, an undo, an image and a
carry-over need.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from keylane.broker.partition import park_checks
from keylane.broker.partition.failure_ranges import UNKNOWN, FailureRanges, Mark
from keylane.broker.partition.offset_ranges import OffsetRanges
from keylane.broker.partition.park_checks import decide_park_changes
from keylane.broker.partition.park_views import build_adoption_page, changes_to_rebuild
from keylane.broker.partition.parked import Parked
from keylane.protocol.errors import KeylaneError
from keylane.protocol.offsets import AckedOffsets
from keylane.protocol.parked import (
    Adopt,
    AdoptedKey,
    AncestorReleased,
    Clear,
    DeadLetterKey,
    Edit,
    EditedMessage,
    FailAgain,
    Failure,
    FailureMark,
    Fault,
    Free,
    Freeze,
    Park,
    ParkChange,
    ParkOrDeadLetter,
    ParkState,
    Redrive,
    RequestedChange,
    Shift,
    Unpark,
)
from keylane.protocol.routing import logical_partition
from support.running.examples import examples

OWN = 7
END = 24
MESSAGES_MAX = 8
"""So few that some keys find no room."""
KEYS = st.sampled_from([b"a", b"b", b"", None, 1, 2, -2])
RETRY_KEYS = st.sampled_from([1, 2, -2])
FAILURES = st.sampled_from([Failure("E", "text", "c", 1, 1), Failure("F", "", "d", 2, 9)])
RANGES = st.tuples(st.integers(0, END - 1), st.integers(1, 6)).map(
    lambda pair: (pair[0], min(END, sum(pair)))
)
SOME = st.lists(RANGES, max_size=3).map(tuple)
SOURCES = st.sampled_from([3, 5, OWN])
EDITED = st.builds(
    EditedMessage,
    SOURCES,
    st.integers(0, END - 1),
    st.sampled_from([b"", b"v", b"w"]),
    st.just(b""),
)
DISPLACED = {b"a": 3, b"b": 5}
"""The source that has displaced messages of a key, and no others."""
MARKS = st.builds(
    lambda source, part, *rest: FailureMark(source, *part, *rest),
    st.sampled_from([3, 5]),
    RANGES,
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(-1, 2),
    st.integers(0, 2),
)
ADOPTED = st.builds(
    AdoptedKey,
    KEYS,
    st.sampled_from(ParkState),
    st.integers(-5, 10),  # parents park before the first request here, which is at 10
    st.none() | FAILURES,
    st.lists(
        st.tuples(st.sampled_from([3, 5]), RANGES).map(lambda row: (row[0], *row[1])), max_size=3
    ).map(tuple),
    st.lists(EDITED, max_size=2).map(tuple),
    st.just((Fault("E", "text", "c", 1), Fault("G", "", "c", 1))),
    st.lists(MARKS, max_size=3).map(tuple),
    st.just(0),
    st.booleans(),
)


def with_rows_of_its_kind(key: AdoptedKey) -> AdoptedKey:
    """An adopted key whose rows are all displaced, or none is."""
    displaced = DISPLACED.get(key.key)
    if displaced is None:
        return replace(key, is_displaced=False)
    rows = tuple(row for row in key.rows if (row[0] == displaced) is key.is_displaced)
    return replace(key, rows=rows)


ADOPTED = ADOPTED.map(with_rows_of_its_kind)

CHANGES = st.one_of(
    st.builds(Park, KEYS, SOME, FAILURES),
    st.builds(Park, KEYS, SOME),
    st.builds(Park, KEYS, st.just(()), FAILURES, st.just(5)),
    st.builds(DeadLetterKey, st.sampled_from([b"a", b"b"]), SOME, st.none() | FAILURES),
    st.builds(Unpark, KEYS, SOURCES, SOME),
    st.builds(Unpark, KEYS, st.just(OWN), st.just(((0, END),))),
    st.builds(Redrive, KEYS),
    st.builds(Free, KEYS),
    st.builds(FailAgain, KEYS, SOURCES, SOME, FAILURES),
    st.builds(Edit, KEYS, EDITED),
    st.builds(Shift, st.sampled_from([None, 0, b""]), st.sampled_from([None, 0]), SOURCES, SOME),
    st.builds(Shift, RETRY_KEYS, RETRY_KEYS | st.none(), SOURCES, SOME, st.none() | FAILURES),
    st.builds(
        Adopt, st.sampled_from([3, 5]), st.lists(ADOPTED, max_size=2).map(tuple), st.booleans()
    ),
    st.just(Freeze()),
    st.builds(Clear, st.sampled_from([(), (3,), (3, 5)])),
)
ASKED = CHANGES | st.builds(
    ParkOrDeadLetter, KEYS.filter(lambda key: not isinstance(key, int)), SOME, st.none() | FAILURES
)
REQUESTS = st.lists(st.lists(ASKED, min_size=1, max_size=3), max_size=14)
Log = list[tuple[int, ParkChange]]


def state_of(parked: Parked) -> dict[Any, Any]:
    """All but the order of the keys, which nothing rests on."""
    keys, following = build_adoption_page(parked, lambda _key: True)
    assert following is None
    rows: dict[Any, Any] = {}
    for key in keys:
        if key.rows:
            *_, earlier = rows.get(key.key, ((),))
            all_rows = tuple(sorted(earlier + key.rows))
            rows[key.key] = key.state, key.since_ms, key.failure, all_rows
    rows |= {
        key.key: (key.state, key.since_ms, key.failure, ())
        for key in keys
        if key.key not in rows and not key.edits and not key.marks
    }
    messages = {key: parked.get(key).messages for key in rows}
    return {
        "failures": failures_of(parked),
        "keys": rows,
        "counts": messages,
        "edits": {key: dict(parked.get(key).edits) for key in rows},
        "all": parked.messages,
        "tokens": {key: parked.get(key).owner_token for key in rows},
        "displaced": {
            (key, source)
            for key in rows
            for source in parked.get(key).displaced_sources
            if source in parked.get(key).offsets_by_source
        },
        "frozen": parked.frozen,
        "adopted": set(parked.adopted_parents),
    }


def failures_of(parked: Parked) -> dict[Any, Any]:
    """How each message without an order failed, of which anything is known."""
    return {
        (key, source, offset): (
            mark.since_ms,
            mark.at_ms,
            parked.fault(mark.fault),
            mark.retry_at_ms,
        )
        for key, each in parked.items()
        for source, start, end in each.rows()
        for _, low, high, mark in each.failure_marks(source, ((start, end),))
        for offset in range(low, high)
        if mark != UNKNOWN
    }


def fold(log: Log, parked: Parked | None = None) -> Parked:
    parked = Parked(OWN) if parked is None else parked
    for at_ms, change in log:
        parked.apply(change, at_ms=at_ms)
    return parked


def served(requests: list[list[RequestedChange]]) -> tuple[Log, Parked, AckedOffsets]:
    """What a broker writes for these requests, of which some are refused."""
    parked, acked, log = Parked(OWN), AckedOffsets(0), Log()
    for at_ms, request in enumerate(requests, 10):
        asked = [change for change in request if not isinstance(change, DeadLetterKey)]
        try:
            with pytest.MonkeyPatch.context() as bounds:
                bounds.setattr(park_checks, "PARKED_MESSAGES_MAX", MESSAGES_MAX)
                wanted = decide_park_changes(parked, asked, acked, next_offset=END, token=5)
        except KeylaneError:
            continue
        for change in wanted:
            parked.apply(change, at_ms=at_ms, acked=acked)
            log.append((at_ms, change))
    return log, parked, acked


FAILED = Failure("E", "text", "c", 1, 1)
ADOPTED_DISPLACED = Adopt(
    3,
    (
        AdoptedKey(b"a", ParkState.PARKED, 0, None, ((3, 0, 2), (3, 4, 5)), is_displaced=True),
        AdoptedKey(b"a", ParkState.PARKED, 0, None, ((5, 1, 3),)),
        AdoptedKey(b"b", ParkState.PARKED, 0, None, ((5, 3, 4),), is_displaced=True),
    ),
    last=True,
)
"""Messages of one key that pass apart."""
MARKED_EARLY = AdoptedKey(
    b"",
    ParkState.PARKED,
    0,
    None,
    (),
    (),
    (Fault("E", "text", "c", 1),),
    (FailureMark(3, 0, 1, 1, 0, 0, 0),),
)
"""Says how a message failed that comes later."""


@settings(max_examples=examples(60), deadline=None)
@given(REQUESTS, st.integers(0, 40), st.integers(0, 40))
@example(
    [[Adopt(3, (MARKED_EARLY, AdoptedKey(b"", ParkState.PARKED, 0, None, ((3, 0, 1),))), False)]],
    0,
    1,
)
@example(
    [
        [
            Adopt(
                3,
                (
                    AdoptedKey(
                        b"a", ParkState.PARKED, 0, None, (), (EditedMessage(3, 0, b"v", b""),)
                    ),
                ),
                False,
            )
        ],
        [Adopt(3, (AdoptedKey(b"a", ParkState.PARKED, 0, None, ((3, 0, 1),)),), False)],
    ],
    0,
    2,
)
def test_changes_folded_twice_lead_to_the_same_state(requests, first, last):
    """A snapshot has changes that the log behind its position says again: of any part of the
    log.
    """
    log, parked, _ = served(requests)
    first, last = sorted((first % (len(log) + 1), last % (len(log) + 1)))
    snapshot = Parked.of_image(OWN, fold(log[:last]).image())
    assert state_of(fold(log[first:], snapshot)) == state_of(parked)
    assert state_of(fold(log)) == state_of(parked)


@settings(max_examples=examples(60), deadline=None)
@given(REQUESTS)
def test_counts_and_acks_agree_with_what_is_parked(requests):
    _, parked, acked = served(requests)
    keys, _ = build_adoption_page(parked, lambda _key: True)
    own = [
        offset
        for key in keys
        for s, low, high in key.rows
        if s == OWN
        for offset in range(low, high)
    ]
    assert all(offset in acked for offset in own)
    assert len(own) == len(set(own)), "a message of the partition is parked under one key"
    assert parked.lowest_own_offset() == min(own, default=None)
    for key in keys:
        assert all(parked.get(key.key).contains((e.source, e.offset)) for e in key.edits)
        if key.edits or key.marks:
            continue
        count = sum(
            high - low for each in keys if each.key == key.key for _, low, high in each.rows
        )
        assert parked.get(key.key).messages == count
        assert list(key.rows) == sorted(key.rows)


@settings(max_examples=examples(60), deadline=None)
@given(REQUESTS, st.lists(CHANGES, min_size=1, max_size=6))
@example([[Park(b"a", ((0, 2),), FAILED)]], [ADOPTED_DISPLACED])
@example(
    [[Adopt(3, (AdoptedKey(b"a", ParkState.PARKED, 0, None, ((3, 0, 2),)),), last=False)]],
    [ADOPTED_DISPLACED],
)
@example([[ADOPTED_DISPLACED]], [Freeze(), AncestorReleased(0, 512, includes_loose=True)])
def test_undo_restores_the_state(requests, changes):
    """Newest first, as a failed commit undoes; also of changes that no decision lets through."""
    _, parked, _ = served(requests)
    before = copy.deepcopy(state_of(parked))
    undos = [parked.apply(change, at_ms=99) for change in changes]
    for undo in reversed(undos):
        undo()
    assert state_of(parked) == before


@settings(max_examples=examples(60), deadline=None)
@given(REQUESTS, st.integers(0, 13))
def test_repeat_of_any_request_parks_no_message(requests, which):
    _, parked, acked = served(requests)
    repeated = requests[which % len(requests)] if requests else []
    parks = [change for change in repeated if isinstance(change, Park)]
    if parked.frozen or any(
        isinstance(change, Clear) for request in requests for change in request
    ):
        return
    try:
        wanted = decide_park_changes(parked, parks, acked, next_offset=END, token=5)
    except KeylaneError:
        return
    known = {
        offset for start, end in [(0, acked.cursor), *acked.ranges] for offset in range(start, end)
    }
    parked_now = {o for change in wanted for start, end in change.ranges for o in range(start, end)}
    assert not parked_now & known


@settings(max_examples=examples(60), deadline=None)
@given(REQUESTS)
@example([[ADOPTED_DISPLACED]])
def test_image_reads_back(requests):
    _, parked, _ = served(requests)
    again = Parked.of_image(OWN, parked.image())
    assert state_of(again) == state_of(parked)
    assert again.image() == parked.image()
    assert bool(again) == bool(parked)


@settings(max_examples=examples(60), deadline=None)
@given(REQUESTS, st.integers(0, 40))
@example([[ADOPTED_DISPLACED]], 0)
def test_carried_over_changes_make_the_state_of_what_is_left_of_the_log(requests, first):
    """Of nothing, and of the rest of the log before them, whatever retention has removed of it."""
    log, parked, _ = served(requests)
    changes = [(0, change) for change in changes_to_rebuild(parked)]
    assert state_of(fold(changes)) == state_of(parked)
    left = log[first % (len(log) + 1) :]
    assert state_of(fold(changes, fold(left))) == state_of(parked)
    assert state_of(fold(changes[:1], fold(log))) == state_of(parked)


def places_of(keys: list[AdoptedKey]) -> list[tuple[Any, int, int]]:
    """(key, source, offset) of each message."""
    return [
        (key.key, source, offset)
        for key in keys
        for source, low, high in key.rows
        for offset in range(low, high)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(REQUESTS)
@example([[ADOPTED_DISPLACED]])
@example([[ADOPTED_DISPLACED, Clear((3, 5))], [Park(b"a", ((0, 2),), FAILED)]])
def test_each_message_passes_to_one_child_which_releases_it(requests):
    """The loose and displaced ones to the child that begins as their parent does."""
    assert [logical_partition(key) < 512 for key in DISPLACED] == [False, True]
    _, parked, _ = served(requests)
    parked.apply(Freeze(), at_ms=99)
    every = places_of(build_adoption_page(parked, lambda _number: True)[0])
    assert len(every) == parked.messages
    first, _ = build_adoption_page(parked, lambda number: number < 512)
    second, _ = build_adoption_page(parked, lambda number: number >= 512)
    assert set(places_of(second)) == {
        (key, *place) for key, *place in every if key == b"a" and place[0] != DISPLACED[key]
    }
    assert sorted(map(repr, every)) == sorted(map(repr, places_of(first) + places_of(second)))
    parked.apply(AncestorReleased(800, 1024, includes_loose=False), at_ms=99)
    assert places_of(build_adoption_page(parked, lambda _number: True)[0]) == every
    undo = parked.apply(AncestorReleased(0, 512, includes_loose=True), at_ms=99)
    left, _ = build_adoption_page(parked, lambda _number: True)
    assert left == second
    assert parked.messages == len(places_of(second))
    undo()
    assert places_of(build_adoption_page(parked, lambda _number: True)[0]) == every
    parked.apply(AncestorReleased(512, 1024, includes_loose=False), at_ms=99)
    left, _ = build_adoption_page(parked, lambda _number: True)
    assert left == first
    parked.apply(AncestorReleased(0, 512, includes_loose=True), at_ms=99)
    assert (len(parked), parked.messages) == (0, 0)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.booleans(), RANGES), max_size=40))
def test_offset_ranges_are_a_set(steps):
    runs, model = OffsetRanges(), set()
    for add, (start, end) in steps:
        asked = set(range(start, end))
        there = {
            offset for low, high in runs.intersection(start, end) for offset in range(low, high)
        }
        assert there == asked & model
        told = runs.add(start, end) if add else runs.remove(start, end)
        changed = asked - model if add else asked & model
        model = model | asked if add else model - asked
        assert {offset for low, high in told for offset in range(low, high)} == changed
        assert sum(high - low for low, high in told) == len(changed)
        flat = [offset for low, high in runs for offset in range(low, high)]
        assert flat == sorted(model)
        edges = [edge for run in runs for edge in run]
        assert edges == sorted(set(edges)), "runs that touch are one"
        assert (runs.messages, bool(runs)) == (len(model), bool(model))
        assert not model or runs.first == min(model)
        again = OffsetRanges.from_packed(*runs.pack())
        assert list(again) == list(runs) == list(runs.page(0, runs.range_count))


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), RANGES, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)),
        max_size=30,
    ),
    st.integers(0, 31),
)
@example(  # a try of message 0 stood on the gap behind it
    [(True, (0, 1), 1, 1, 1), (True, (2, 3), 1, 1, 0), (True, (0, 1), 1, 1, 0)], 31
)
def test_failure_ranges_tell_what_was_said_last_of_each_message(steps, coarse):
    """In no more rows than twice the messages; what is coarse has the fault, and no earlier
    time.
    """
    runs, present, model = FailureRanges(), OffsetRanges(), {}
    for place, (add, (start, end), since_ms, fault, retry_at_ms) in enumerate(steps):
        mark = Mark(since_ms, 5, fault, retry_at_ms)
        if add:
            present.add(start, end)
            runs.set_mark(start, end, mark, present)
            model |= dict.fromkeys(range(start, end), mark)
        else:
            present.remove(start, end)
            runs.clear_marks(start, end, present)
            model = {offset: known for offset, known in model.items() if not start <= offset < end}
        if place == coarse:
            runs.merge_oldest_ranges()
            for offset, known in model.items():
                told = runs.mark_at(offset)
                assert told == UNKNOWN or (told.fault, told.since_ms >= known.since_ms) == (
                    known.fault,
                    True,
                )
                model[offset] = told
        assert {offset: runs.mark_at(offset) for offset in model} == model
        told = [part for low, high in present for part in runs.marks_in(low, high)]
        assert {o: mark for low, high, mark in told for o in range(low, high)} == model
        assert len(runs) <= 2 * len(model) + 1
        tries = [known.retry_at_ms for known in model.values() if known.retry_at_ms]
        assert runs.retry_at_ms == min(tries, default=None)
        again = FailureRanges.from_packed(runs.pack(), runs.end)
        assert list(again.rows(0, 99)) == list(runs.rows(0, 99))

"""The judges of features tell what they are for, on histories made by hand."""

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from keylane.checker.events import (
    Ended,
    Granted,
    LeaseReleased,
    Replaced,
    Resetting,
    Sent,
    Served,
    SetAside,
    Settled,
    Started,
    Stored,
)
from keylane.checker.findings import Findings
from keylane.protocol.progress import CursorView, GroupReset
from sim.features.carried import GROUP, Judged, Round, Row, astray
from sim.features.cut_overs import CutOvers
from sim.features.deletions import Life, check_groups, mixed_up, owners_of
from sim.features.instances import stale_calls
from sim.features.live_resets import check_resets, granted_while_set, unhandled_after
from sim.features.loops import overtaken
from sim.features.retries import Try, check_tries
from sim.features.world import FeatureWorld, kind_of
from sim.run import FEATURES_FIRST

LIVES = [Life(frozenset({1}), ended=3), Life(frozenset({2}))]


def _sent(number: int) -> Sent:
    return Sent(b"d0.1:%d" % number, b"k", "d0.1", number, strict=True)


def _started(session: str, partition_id: int, number: int) -> Started:
    return Started("readers", session, partition_id, 0, b"d0.1:%d" % number, 1, 0, 1)


def test_message_is_told_when_it_is_handled_in_the_next_life_of_its_subject():
    """Its sender had an ack of the life in which it was sent, so it belongs to no other."""
    history = [_sent(0), Settled(b"d0.1:0", "stored", 1, 0), _sent(1), _started("s", 2, 1)]
    owners = owners_of(history, LIVES)
    assert owners == {b"d0.1:0": 0, b"d0.1:1": 0}
    (problem,) = mixed_up(history, LIVES, owners)
    assert "d0.1:1" in problem
    assert "partition 2 of life 1" in problem


def test_message_belongs_to_no_life_when_it_is_sent_after_the_deletion_or_after_an_error():
    history = [_sent(0), Settled(b"d0.1:0", "withdrawn"), _sent(1), _sent(2)]
    assert owners_of(history, LIVES) == {}
    history = [_sent(0), Settled(b"d0.1:0", "stored", 1, 0), None, _sent(1)]
    assert owners_of(history, LIVES) == {b"d0.1:0": 0}


def test_session_is_told_when_it_consumes_two_lives():
    history = [
        _sent(0),
        Settled(b"d0.1:0", "stored", 1, 0),
        _started("s", 1, 0),
        _sent(1),
        Settled(b"d0.1:1", "stored", 2, 0),
        _started("s", 2, 1),
    ]
    owners = owners_of(history, LIVES)
    assert mixed_up(history, LIVES, owners) == ["session s consumes two lives"]


def test_token_is_told_when_two_groups_of_one_name_have_it():
    findings = Findings()
    grants = [Granted(group_id, 1, 5, f"s{group_id}", "", 0) for group_id in (1, 2)]
    check_groups(grants, findings)
    assert findings.counts["duplicate token"]


def test_grant_is_told_when_its_session_was_of_a_deleted_group_and_the_holder_has_not_let_go():
    """A session that joins the group made anew is of both groups."""

    def history(*let_go: Any) -> list[Any]:
        return [
            Granted(1, 1, 4, "s", "", 0),
            *let_go,
            Granted(1, 1, 5, "t", "s", 990),
            Granted(2, 1, 9, "s", "", 0),
        ]

    findings = Findings()
    check_groups(history(LeaseReleased("s", 1, 4)), findings)
    assert not findings.counts["two grants"]
    check_groups(history(), findings)
    assert findings.counts["two grants"] == 1


def _handled(token: int, offset: int) -> list[Any]:
    return [
        Started("group0", "s", 1, offset, b"v", token, 0, 1),
        Ended("group0", 1, offset, token, "s"),
    ]


def _reset(token: int, cursor: int) -> list[Any]:
    return [
        Resetting("group0", 1, token, cursor),
        Served("reset", "group0", 1, token, 0, cursor),
    ]


def _answer(token: int, cursor: int) -> GroupReset:
    view = CursorView(partition_id=1, queue=0, cursor=cursor, logic_cursor=cursor, token=token)
    return GroupReset(subject="orders", group="group0", cursors=[view])


def test_owner_of_before_a_reset_is_told_when_it_begins_a_handler_after_it():
    history = [*_handled(1, 0), *_reset(2, 3), *_handled(3, 3)]
    assert check_resets(history, {1}) == []
    assert check_resets([*history, *_handled(1, 4)], {1})
    assert check_resets([*history, *_handled(3, 2)], {1}), "below the cursor"


def test_child_may_begin_what_it_took_over_below_the_cursor_of_its_parents_reset():
    history = [*_reset(2, 3), Served("acquire", "group0", 2, 3, 0, 0)]
    assert check_resets([*history, *_handled(3, 1)], {1, 2}) == []


def test_message_is_told_when_it_is_not_handled_after_a_reset():
    """Only what is handled under a later token counts."""
    history = [*_handled(1, 3), *_handled(1, 4), *_reset(2, 3), *_handled(3, 3)]
    answers = [_answer(2, 3)]
    assert unhandled_after([*history, *_handled(3, 4)], answers, {1: 5}) == []
    (problem,) = unhandled_after(history, answers, {1: 5})
    assert "offset 4" in problem
    assert unhandled_after([*history, *_reset(4, 5)], answers, {1: 5}) == []


def test_grant_is_told_when_it_comes_between_the_cursors_of_a_reset():
    asked, done = _reset(2, 3)
    grant = Granted(1, 1, 3, "s", "", 0)
    assert granted_while_set([asked, done, grant], [_answer(2, 3)]) == []
    assert granted_while_set([asked, grant, done], [_answer(2, 3)])


def test_call_of_a_replaced_session_is_told_when_a_broker_accepts_it():
    history = [
        Granted(1, 1, 1, "old", "", 0),
        Replaced("old"),
        Granted(1, 1, 2, "new", "", 0),
        Served("acquire", "group0", 1, 2, began=2),
    ]
    late = Served("ack", "group0", 1, 1, began=4, cursor=1)
    under_way = late._replace(began=3)
    assert stale_calls([*history, under_way], {1}) == []
    assert stale_calls([*history, late], {1})


def _try(attempt: int, token: int, began: int, outcome: str = "failed", ends: int = 0) -> Try:
    return Try((1, 0), attempt, token, began, 10.0 * began, ends, outcome, 10.0 * began + 1)


def _wrong(*tries: Try, history: tuple[Any, ...] = (), until: int = 99) -> str:
    return "; ".join(check_tries(tries, history, tries_max=3, until=until))


def test_tries_that_rise_by_one_are_right_also_when_an_owner_repeats_one():
    assert not _wrong(_try(1, 5, 0), _try(2, 5, 1), _try(2, 6, 2), _try(3, 6, 3, "handled"))
    assert not _wrong(_try(1, 5, 0, ""), _try(2, 6, 1, ends=1)), "a process that ended counts"


def test_try_is_told_when_its_count_falls_leaves_one_out_or_stays():
    assert "tried 2 times" in _wrong(_try(1, 5, 0), _try(2, 5, 1), _try(1, 6, 2))
    assert "only 1 times" in _wrong(_try(1, 5, 0), _try(3, 5, 1))
    assert "so often before" in _wrong(_try(1, 5, 0), _try(1, 5, 1))


def test_try_is_told_behind_the_limit_unless_an_operator_asked_for_it():
    tries = [_try(attempt, 5, attempt) for attempt in (1, 2, 3, 4)]
    assert "3 are allowed" in _wrong(*tries)
    assert not _wrong(*tries, until=4)


def test_try_is_told_when_it_comes_before_its_time():
    early = _try(2, 5, 1)
    early.began_s = 1.05
    assert "after it failed" in _wrong(_try(1, 5, 0), early)


def test_try_is_told_when_the_message_was_handled_for_good():
    """By the same owner, or by one that has released; an owner that was lost may not have told its
    broker.
    """
    handled = _try(1, 5, 0, "handled")
    assert "under this token" in _wrong(handled, _try(2, 5, 1))
    assert not _wrong(handled, _try(1, 6, 1))
    released = Served("release", "group0", 1, 5, 0)
    assert "has released" in _wrong(handled, _try(1, 6, 1), history=(released,))


# ── cut-overs ─────────────────────────────────────────────────────────────────────────────────────
def _handles(partition_id: int, offset: int, value: bytes) -> list[Any]:
    return [
        Started(GROUP, "s", partition_id, offset, value, 1, 0, 1),
        Ended(GROUP, partition_id, offset, 1, "s"),
    ]


def _carried(*more: Any, stored: tuple[int, ...] = (0, 1)) -> Judged:
    """Two acked messages, handled in partition 1; stored at the end in partition 2."""
    sent = [Sent(b"v0.1:%d" % n, b"k", "v0.1", n, strict=True) for n in (0, 1)]
    acks = [Settled(b"v0.1:%d" % n, "stored", 1, n) for n in (0, 1)]
    handled = [event for n in (0, 1) for event in _handles(1, n, b"v0.1:%d" % n)]
    at_end = [Stored(2, at, b"k", b"v0.1:%d" % n) for at, n in enumerate(stored)]
    return Judged([*sent, *acks, *handled, *more, *at_end], {"v0"}, {2})


def test_message_is_told_when_a_cut_over_loses_doubles_or_reorders_it():
    lineage: dict[int, tuple[int, ...]] = {2: ()}
    assert _carried().lost([], since=0) == []
    assert _carried().out_of_order(lineage) == []
    (lost,) = _carried(stored=(0,)).lost([], since=0)
    assert "is at []" in lost
    declared = Settled(b"v0.1:1", "stored", 2, 1, twice=True)
    assert _carried(declared, stored=(0, 1, 1)).lost([], since=0) == []
    (twice,) = _carried(stored=(0, 1, 1)).lost([], since=0)
    assert "[(2, 1), (2, 2)]" in twice
    (late,) = _carried(stored=(1, 0)).out_of_order(lineage)
    assert "is stored behind 1" in late
    removed = Round("h", starts={1: 2})
    assert _carried(stored=()).lost([removed], since=0) == []


def test_message_is_told_when_it_comes_again_after_a_cut_over_or_while_it_is_replaced():
    rows = [Row((1, n), b"k", b"v0.1:%d" % n) for n in (0, 1)]
    places = {b"v0.1:0": (2, 0), b"v0.1:1": (2, 1)}
    done = {"rows": rows, "cursors": {1: 2}, "stored": places, "replaced": frozenset({1})}
    cut = Round("h", accepted_at=8, published_at=8, **done)
    assert _carried().again([cut]) == []
    (again,) = _carried(*_handles(2, 1, b"v0.1:1")).again([cut])
    assert "came again" in again
    assert _carried(*_handles(1, 1, b"v0.1:1")).early([cut]) == []
    between = Round("h", accepted_at=8, published_at=10, **done)
    (early,) = _carried(*_handles(1, 1, b"v0.1:1")).early([between])
    assert "while it was being replaced" in early


@pytest.fixture
def cut_overs() -> Iterator[CutOvers]:
    """The feature of a world that is healed and has not begun."""
    number = next(number for number in count() if kind_of(number) is CutOvers)
    world = FeatureWorld(FEATURES_FIRST + number)
    world.faults.healed = True
    feature = world.feature
    assert isinstance(feature, CutOvers)
    yield feature
    world.loop.dispose()
    world.outboxes.close()


def test_consumers_are_started_when_a_cut_over_ends_while_they_leave(cut_overs):
    loop, consumer = cut_overs.world.loop, cut_overs._consumers[0]
    consumer.new_process()
    consumer.leaving = True
    cut_overs._stand_still(False)
    first = consumer.process
    consumer.end(machine_down=False)
    loop.run_until_complete(asyncio.sleep(1.0))
    assert consumer.running
    assert consumer.process is not first


def test_consumers_stay_away_when_the_next_cut_over_begins_while_they_leave(cut_overs):
    loop, consumer = cut_overs.world.loop, cut_overs._consumers[0]
    consumer.new_process()
    consumer.leaving = True
    cut_overs._stand_still(False)
    cut_overs._stand_still(True)
    consumer.end(machine_down=False)
    loop.run_until_complete(asyncio.sleep(1.0))
    assert not consumer.running


def test_message_is_told_as_lost_when_the_partitions_at_the_end_are_known(cut_overs):
    """In a world that has not drained they are not, and that it has not is a finding."""
    sender = cut_overs._senders[0].name
    value = f"{sender}.1:0".encode()
    cut_overs.world.history += [
        Sent(value, b"k", f"{sender}.1", 0, strict=True),
        Settled(value, "stored", 1, 0),
    ]
    cut_overs.check(Findings(), {})
    assert cut_overs.problems == []
    cut_overs.members = set()
    cut_overs.check(Findings(), {})
    assert "is at []" in cut_overs.problems[0]


def test_message_may_come_again_when_a_later_cut_over_has_put_it_behind_an_unhandled_one():
    """What comes between the two cut-overs is told still, and where the group was not behind the
    row at the later one.
    """
    rows = [Row((1, n), b"k", b"v0.1:%d" % n) for n in (0, 1)]
    places = {b"v0.1:0": (2, 0), b"v0.1:1": (2, 1)}
    cut = Round("h", rows=rows, cursors={1: 2}, stored=places, published_at=8)
    mixed = [Row((2, 1), b"k", b"v0.1:1"), Row((3, 0), b"l", b"v0.1:2")]
    behind = {b"v0.1:2": (4, 0), b"v0.1:1": (4, 1)}
    seen = _carried(*_handles(4, 1, b"v0.1:1"))
    later = {"rows": mixed, "stored": behind}
    assert seen.again([cut, Round("i", cursors={2: 2}, published_at=8, **later)]) == []
    (early,) = seen.again([cut, Round("i", cursors={2: 2}, published_at=9, **later)])
    assert "(1, 1) was handled, and came again" in early
    (back,) = seen.again([cut, Round("i", cursors={2: 0}, published_at=8, **later)])
    assert "(1, 1) was handled, and came again" in back


def test_row_is_told_when_it_lies_in_a_partition_that_does_not_continue_its_source():
    """Also where a publication lies between the two; and not while it has not been stored."""
    rows = [Row((1, 0), b"", b"v0.1:0"), Row((2, 0), b"k", b"v0.1:1")]
    parents = {1: (), 2: (), 3: (1,), 4: (2,), 5: (3, 1), 6: (5,)}
    right = Round("h", rows=rows, stored={b"v0.1:0": (6, 0), b"v0.1:1": (4, 0)})
    assert astray([right], parents) == []
    (told,) = astray([Round("h", rows=rows, stored={b"v0.1:0": (4, 7)})], parents)
    assert told == "b'v0.1:0' of (1, 0) is at (4, 7), which does not continue it"


# ── loops ─────────────────────────────────────────────────────────────────────────────────────────
def _of_a_key(*more: Any, offsets: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
    """Three messages of a key, at these offsets."""
    sent = [Sent(b"p.1:%d" % number, b"k", "p.1", number, strict=True) for number in range(3)]
    stored = [Stored(1, offset, b"k", b"p.1:%d" % number) for number, offset in enumerate(offsets)]
    return [*sent, *more, *stored]


def _handled_all(*offsets: int) -> list[Any]:
    return [event for offset in offsets for event in _handled(1, offset)]


def _aside(offset: int, **how: bool) -> SetAside:
    return SetAside("group0", 1, 1, ((offset, offset + 1),), **how)


def test_message_is_told_when_it_is_begun_before_an_earlier_one_of_its_key_was_handled():
    """By the numbers of its producer, and not by its offset; it is told once, also when it comes
    again.
    """
    assert overtaken(_of_a_key(*_handled_all(0, 1, 2))) == []
    (passed,) = overtaken(_of_a_key(*_handled_all(0, 2, 1, 2)))
    assert "(1, 2) of b'k', number 2 of p.1, was begun before number 1" in passed
    (by_number,) = overtaken(_of_a_key(*_handled_all(0, 1, 2), offsets=(1, 0, 2)))
    assert "(1, 0) of b'k', number 1 of p.1, was begun before number 0" in by_number
    begun, _ended = _handled(1, 0)
    assert len(overtaken(_of_a_key(begun, *_handled_all(1, 0, 2)))) == 1, "it has not ended"


def test_message_may_be_passed_when_it_was_set_aside_alone_or_given_up_but_not_when_it_is_parked():
    """By its own group alone."""
    passing = _handled_all(1, 2, 0)
    assert overtaken(_of_a_key(_aside(0, alone=True), *passing)) == []
    assert overtaken(_of_a_key(_aside(0, skipped=True), *passing)) == []
    assert len(overtaken(_of_a_key(_aside(0), *passing))) == 2
    other = _aside(0, alone=True)._replace(group="other")
    assert len(overtaken(_of_a_key(other, *passing))) == 2


def test_message_waits_for_none_of_another_key_or_producer_or_without_a_key():
    first = [
        Sent(b"q.1:0", b"k", "q.1", 0, strict=True),
        Sent(b"p.1:9", b"other", "p.1", 9, strict=True),
        Sent(b"p.1:8", b"", "p.1", 8, strict=True),
    ]
    stored = [
        Stored(1, 5, b"k", b"q.1:0"),
        Stored(1, 6, b"other", b"p.1:9"),
        Stored(1, 7, b"", b"p.1:8"),
    ]
    history = _of_a_key(*_handled_all(5, 6, 7, 0, 1, 2))
    assert overtaken([*first, *history, *stored]) == []
    (passed,) = overtaken([*first, *_of_a_key(*_handled_all(5, 6, 7, 1, 0, 2)), *stored])
    assert "number 1 of p.1" in passed

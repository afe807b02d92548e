"""The checker of histories names every anomaly, and finds none in a good run."""

import time

import pytest

from keylane.checker.events import (
    Abandoned,
    AcceptedLost,
    Batched,
    Dropped,
    Edited,
    Ended,
    Granted,
    LeaseReleased,
    LeasesReported,
    Looked,
    Ranged,
    Recovered,
    Replaced,
    Resetting,
    Routed,
    Sent,
    Served,
    Settled,
    Started,
    Stored,
)
from keylane.checker.findings import ANOMALIES
from keylane.checker.judge import check_history

A, B = "a" * 16, "b" * 16


def sent(number, key=b"k", producer="p", *, strict=True):
    return Sent(b"%d" % number, key, producer, number, strict)


def settled(number, offset=None, outcome="stored", partition=1, *, reordered=False):
    return Settled(
        b"%d" % number, outcome, partition, number if offset is None else offset, reordered
    )


def stored(number, offset=None, key=b"k", partition=1):
    return Stored(partition, number if offset is None else offset, key, b"%d" % number)


def started(number, token=1, session=A, *, offset=None, clock=0, partition=1, ours=False):
    place = number if offset is None else offset
    return Started("g", session, partition, place, b"%d" % number, token, clock, 100, ours)


def ended(number, token=1, session=A, *, offset=None, partition=1):
    return Ended("g", partition, number if offset is None else offset, token, session)


def granted(token=1, session=A, holder="", left_ms=0):
    return Granted(1, 1, token, session, holder, left_ms)


def served(kind, token, began, cursor=-1, ranges=()):
    return Served(kind, "g", 1, token, began, cursor, tuple(ranges))


def looked(token, cursor):
    return Looked("g", 1, token, cursor, 0)


def handled(*numbers, token=1, session=A):
    return [
        event
        for number in numbers
        for event in (started(number, token, session), ended(number, token, session))
    ]


def good(count=4):
    """A run in which all is well: two owners, one failing handler, every message twice under
    watch.
    """
    numbers = range(count)
    return [
        *(sent(number) for number in numbers),
        *(settled(number) for number in numbers),
        granted(1),
        served("acquire", 1, 0, 0),
        started(0, ours=True),
        Dropped(A, 1, 0),
        *handled(0, 1),
        served("ack", 1, 3 * count, 2, [(0, 2)]),
        LeaseReleased(A, 1, 1),
        LeasesReported(A, ()),
        granted(2, B, A, 500),
        served("acquire", 2, 4 * count, 2),
        *handled(*numbers[2:], token=2, session=B),
        Routed("p", 1, (1,)),
        Routed("p", 2, (1, 2)),
        Ranged(1, 0, 1024),
        *(stored(number) for number in numbers),
        Batched(1, 0, 2, 7, 0, 0),
        Batched(1, 2, 1, 8, 3, 0),
        Batched(1, 3, 1, 7, 1, 0),
        Batched(2, 90, 2, 7, 1, 40),  # retention has removed what was before
        Batched(2, 92, 2, 7, 1, 42),
    ]


BAD = {
    "silent loss": [sent(0), settled(0, outcome="flushed")],
    "lost": [sent(0), settled(0)],
    "phantom": [sent(0), settled(0, outcome="not done"), stored(0), *handled(0)],
    "duplicate": [sent(0), settled(0), *handled(0), ended(0, offset=1), stored(0), stored(0, 1)],
    "inversion": [
        sent(0),
        sent(1),
        settled(0, 1),
        settled(1, 0),
        started(0, offset=1, token=1),
        ended(0, offset=1),
        started(1, offset=0, token=2),
        ended(1, offset=0, token=2),
        stored(1, 0),
        stored(0, 1),
    ],
    "skip": [sent(0), sent(1), settled(0), settled(1), *handled(1, 0), stored(0), stored(1)],
    "nonmonotonic": [
        sent(0),
        settled(0),
        *handled(0),
        *handled(0),
        stored(0),
    ],
    "stale effect": [
        sent(0),
        settled(0),
        *handled(0),
        served("acquire", 2, 0, 0),
        served("ack", 1, 5, 1, [(0, 1)]),
        stored(0),
    ],
    "late start": [sent(0), settled(0), started(0, clock=100), ended(0), stored(0)],
    "duplicate token": [granted(1), granted(1, B)],
    "two grants": [granted(1), granted(2, B, A, 300)],
    "starvation": [sent(0), settled(0), stored(0)],
}


def test_good_run_is_clean():
    """Nothing is found where nothing is wrong."""
    findings = check_history(good())
    assert not findings.total, findings.examples


def test_every_anomaly_has_a_case():
    """No name goes unproven."""
    assert set(BAD) == set(ANOMALIES)


def _kinds(events):
    if not any(type(event) is Started for event in events):
        # A group is known by its first event.
        events = [served("acquire", 1, 0, 0), *events]
    return {kind for kind, count in check_history(events).counts.items() if count}


@pytest.mark.parametrize("anomaly", ANOMALIES)
def test_each_anomaly_is_named(anomaly):
    """A history with one fault is told by that fault's name."""
    assert anomaly in _kinds(BAD[anomaly])


@pytest.mark.parametrize(
    ("what", "anomaly", "events"),
    [
        ("an ack of unhandled messages", "skip", [served("ack", 1, 0, 1, [(0, 1)])]),
        (
            "a cursor that falls",
            "nonmonotonic",
            [*handled(0), served("ack", 1, 4, 1, [(0, 1)]), served("acquire", 2, 9, 0)],
        ),
        (
            "an ack above the cursor that is forgotten",
            "nonmonotonic",
            [*handled(0), served("ack", 1, 4, 0, [(0, 1)]), served("acquire", 2, 9, 0)],
        ),
        (
            "a handler of an older grant",
            "two grants",
            [granted(1), LeaseReleased(A, 1, 1), granted(2, B, A, 9), *handled(0)],
        ),
        (
            "a lease let go under a running handler",
            "two grants",
            [started(0, ours=True), LeaseReleased(A, 1, 1), ended(0)],
        ),
        ("a token used by two sessions", "duplicate token", [*handled(0), started(0, session=B)]),
        ("a STRICT message given up", "lost", [sent(5), settled(5, outcome="unknown")]),
        ("a message that is not where it was told", "lost", [sent(5), settled(5, 7), stored(5, 8)]),
        ("handled where it is not", "phantom", [started(9)]),
        (
            "an ack of a fenced owner that counted",
            "stale effect",
            [started(0), granted(2, B), *handled(1, token=2, session=B), ended(0)],
        ),
        (
            "a handler of a session that has ended",
            "late start",
            [started(0)._replace(session_left_ms=0), ended(0)],
        ),
        (
            "a fence forgotten at a restart",
            "nonmonotonic",
            [*handled(0), served("acquire", 3, 4, 0), Recovered("g", 1, 2, 0)],
        ),
        (
            "a cursor forgotten at a restart",
            "nonmonotonic",
            [*handled(0), served("ack", 1, 4, 1, [(0, 1)]), Recovered("g", 1, 1, 0)],
        ),
        ("a cursor seen to fall", "nonmonotonic", [*handled(0), looked(1, 1), looked(1, 0)]),
        ("a token seen to fall", "nonmonotonic", [*handled(0), looked(2, 1), looked(1, 1)]),
        (
            "a cursor moved by another's ack",
            "stale effect",
            [*handled(0), looked(2, 0), looked(2, 1)],
        ),
        ("a STRICT message told as reordered", "inversion", [settled(0, reordered=True)]),
        (
            "a message without a key told as reordered",
            "inversion",
            [sent(7, b"", strict=False), settled(7, reordered=True), stored(7, key=b"")],
        ),
        (
            "stored twice where it was told",
            "inversion",
            [
                sent(7, strict=False),
                settled(7, 9),
                sent(8, strict=False),
                settled(8, 8)._replace(twice=True),
                stored(8, 8),
                stored(7, 9),
            ],
        ),
        ("a key where it does not belong", "inversion", [Ranged(1, 0, 1)]),
        ("stored, and told as withdrawn", "phantom", [settled(0, outcome="withdrawn")]),
        (
            "a batch of an older epoch",
            "stale effect",
            [Batched(1, 0, 1, 7, 1, 0), Batched(1, 1, 1, 7, 0, 0)],
        ),
        ("a batch behind a gap", "skip", [Batched(1, 0, 1, 7, 0, 0), Batched(1, 1, 1, 7, 0, 2)]),
        (
            "a first batch behind a gap",
            "skip",
            [Batched(1, 0, 1, 7, 0, 0), Batched(1, 1, 1, 8, 0, 2)],
        ),
        (
            "a batch taken twice",
            "duplicate",
            [Batched(1, 0, 1, 7, 0, 0), Batched(1, 1, 1, 7, 0, 0)],
        ),
        (
            "a producer that goes back to an older route",
            "nonmonotonic",
            [Routed("p", 2, (1,)), Routed("p", 1, (1,))],
        ),
        (
            "a handler of before a reset",
            "stale effect",
            [Resetting("g", 1, 2, 0), served("reset", 2, 4, 0), *handled(0)],
        ),
        (
            "a message below the cursor of a reset",
            "nonmonotonic",
            [*handled(0), Resetting("g", 1, 2, 1), served("reset", 2, 6, 1), started(0, token=3)],
        ),
        (
            "a parked message with the value of before its edit",
            "phantom",
            [Edited("g", 1, 0, b"new", False), Edited("g", 1, 0, b"new", True), *handled(0)],
        ),
        (
            "two routes of one version",
            "nonmonotonic",
            [Routed("p", 2, (1,)), Routed("q", 2, (1, 3))],
        ),
    ],
)
def test_finer_rules_of_an_anomaly(what, anomaly, events):
    """The rules behind the names."""
    base = [sent(0), settled(0), sent(1, b"other"), settled(1)]
    log = [stored(0), stored(1, key=b"other")]
    assert anomaly in _kinds([*base, *events, *log]), what


def test_process_whose_instance_was_started_anew_may_not_know_it_yet():
    """Its handlers may begin until it hears of it; its calls are judged as any others."""
    base = [sent(0), settled(0), stored(0), granted(1), Replaced(A), granted(2, B)]
    late = [*handled(0), *handled(0, token=2, session=B)]
    assert not _kinds([*base, *late])
    stale = [served("acquire", 2, 6, 0), served("ack", 1, 99, 1, [(0, 1)])]
    assert "stale effect" in _kinds([*base, *late, *stale])


def test_message_that_may_be_stored_twice_is_no_duplicate():
    """A second copy is one that the receipt speaks of, wherever it is; the place that it names
    keeps its order.
    """
    told = settled(1, 2)._replace(twice=True)
    log = [stored(0, 0), stored(1, 1), stored(1, 2)]
    history = [sent(0, strict=False), sent(1, strict=False), settled(0)]
    handled_all = [*handled(0), *handled(1), started(1, offset=2), ended(1, offset=2)]
    assert _kinds([*history, settled(1, 2), *handled_all, *log]) == {"duplicate"}
    assert not _kinds([*history, told, *handled_all, *log])


def _child_first(*, strict, reordered=False):
    """The parent, partition 1, has message 0 and the child, partition 2, message 1, which is
    handled first.
    """
    return [
        *(sent(number, strict=strict) for number in (0, 1)),
        settled(0, reordered=reordered),
        settled(1, 0, partition=2),
        stored(0),
        stored(1, 0, partition=2),
        *(started(1, offset=0, partition=2), ended(1, offset=0, partition=2)),
        *handled(0),
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_order_is_kept_from_one_partition_to_the_next(strict):
    """Whatever the strategy: a promised message in a child waits for the promised one in its
    parent.
    """
    assert _kinds(_child_first(strict=strict)) == {"skip"}


def test_message_declared_as_reordered_is_not_waited_for():
    """A best_tried message that was declared may be handled after a later one elsewhere."""
    assert not _kinds(_child_first(strict=False, reordered=True))


@pytest.mark.parametrize("in_time", [True, False])
def test_message_given_with_an_earlier_one_may_go_on_after_the_next_grant(in_time):
    """A batch handler of two messages goes on when its lease has ended; none begins then, whatever
    it was given with.
    """
    first, grant = started(0), granted(2, B, A)
    begun = [first, grant] if in_time else [grant, first._replace(with_earlier=True)]
    second = started(1)._replace(with_earlier=True)
    sends = [event for number in (0, 1) for event in (sent(number), settled(number))]
    again = handled(0, 1, token=2, session=B)
    history = [*sends, granted(1), *begun, ended(0), second, ended(1), *again, stored(0), stored(1)]
    assert ("two grants" in _kinds(history)) is not in_time
    if in_time:
        alone = [each if each is not second else started(1) for each in history]
        assert "two grants" in _kinds(alone)


def test_repeated_release_releases_nothing_newer():
    """The session has the partition again under a newer token, and handles it; of that one it would
    be a fault.
    """
    again = [granted(1), LeaseReleased(A, 1, 1), granted(2, A, A, 9)]
    running = [started(0, 2, ours=True), LeaseReleased(A, 1, 1), ended(0, 2), Dropped(A, 1, 0)]
    history = [sent(0), settled(0), *again, *running, stored(0)]
    assert not _kinds(history)
    assert _kinds(
        [LeaseReleased(A, 1, 2) if event == LeaseReleased(A, 1, 1) else event for event in history]
    ) == {"two grants"}


def test_abandoned_partition_is_not_waited_for():
    """Children of an abandoned partition are read without it, also messages of an outbox, which are
    stored in strict order.
    """
    declared = [Ranged(1, 0, 1024), Abandoned(1)]
    for strict in (False, True):
        assert not _kinds([*declared, *_child_first(strict=strict)])
        assert _kinds([Ranged(1, 0, 1024), *_child_first(strict=strict)]) == {"skip"}


def _around_a_lost_partition(*handled_before):
    """0 in partition 1, 1 in lost partition 2, 2 in partition 3; a group has begun with 3, and ends
    1 at last.
    """
    return [
        *(sent(number) for number in range(3)),
        *(settled(number, 0, partition=number + 1) for number in range(3)),
        *handled_before,
        started(2, offset=0, partition=3),
        ended(2, offset=0, partition=3),
        started(0, 2, offset=0, partition=1),
        ended(0, 2, offset=0, partition=1),
        *(stored(number, 0, partition=number + 1) for number in range(3)),
    ]


def test_lost_partition_is_not_owed_after_the_loss_is_accepted():
    """What continues it waits until then, and for ever for what is before it."""
    first = [started(0, offset=0), ended(0, offset=0)]
    assert not _kinds(_around_a_lost_partition(*first, AcceptedLost(2)))
    assert _kinds([*_around_a_lost_partition(*first), AcceptedLost(2)]) == {"skip"}
    assert _kinds(_around_a_lost_partition(AcceptedLost(2))) == {"skip"}
    assert "starvation" in _kinds(_around_a_lost_partition(*first))


def test_message_of_a_lost_partition_is_not_owed_when_a_fenced_owner_ends_it():
    """The owner after it may not have handled it before the disk was lost."""
    log = [sent(0), sent(1, b"j"), settled(0), settled(1), stored(0), stored(1, key=b"j")]
    fenced = [*log, started(0), granted(2, B), *handled(1, token=2, session=B)]
    assert not _kinds([*fenced, AcceptedLost(1), ended(0)])
    assert _kinds([*fenced, ended(0)]) == {"stale effect"}


def test_message_of_a_lost_partition_is_not_begun_behind_a_newer_message():
    """A consumer that still has some of it handles that first, or not at all."""
    first = [started(0, offset=0), ended(0, offset=0), AcceptedLost(2)]
    history = _around_a_lost_partition(*first)
    assert _kinds([*history, started(1, offset=0, partition=2)]) == {"inversion"}
    assert not _kinds(history)


def test_quarter_of_a_million_events_is_judged_in_one_pass():
    """A long history is judged whole, within seconds: the one fault at its end is found."""
    count = 50_000
    keys = [b"key%d" % (number % 500) for number in range(count)]
    events = [sent(number, keys[number]) for number in range(count)]
    events += [settled(number) for number in range(count)]
    events.append(served("acquire", 1, 0, 0))
    for number in range(count):
        events += handled(number)
        if number % 100 == 99:
            events.append(served("ack", 1, len(events), number + 1, [(number - 99, number + 1)]))
    events += [stored(number, None, keys[number]) for number in range(count - 1)]
    events.append(stored(count + 1, count - 1, keys[-1]))
    assert len(events) > 250_000
    began = time.process_time()
    findings = check_history(events)
    took = time.process_time() - began
    assert took < 5, f"{len(events):,} events judged in {took:.1f} s of the processor"
    assert findings.counts["lost"] == 1

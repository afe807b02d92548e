"""The checker of histories knows what a reset repeats, what it leaves out and what retention
removes; and excuses no more.
"""

import pytest

from keylane.checker.eras import Eras
from keylane.checker.events import (
    Ended,
    Expired,
    Recovered,
    Resetting,
    Sent,
    Served,
    SetAside,
    Settled,
    Started,
    Stored,
)
from keylane.checker.judge import check_history

COUNT = 4
LOG = [
    event
    for number in range(COUNT)
    for event in (
        Sent(b"%d" % number, b"k", "p", number, strict=True),
        Settled(b"%d" % number, "stored", 1, number),
        Stored(1, number, b"k", b"%d" % number),
    )
]
BEGAN = 10**6
"""Asked after everything that was answered before."""


def handled(*numbers, token):
    session = f"{token:016d}"
    return [
        event
        for number in numbers
        for event in (
            Started("g", session, 1, number, b"%d" % number, token, 0, 1),
            Ended("g", 1, number, token, session),
        )
    ]


def served(kind, token, cursor, ranges=()):
    return Served(kind, "g", 1, token, BEGAN, cursor, ranges)


def reset(token, cursor):
    """Asked and answered."""
    return [Resetting("g", 1, token, cursor), served("reset", token, cursor)]


def owner(token, start, end):
    """An owner that acquires at `start` and handles and acks up to `end`."""
    numbers = range(start, end)
    return [
        served("acquire", token, start),
        *handled(*numbers, token=token),
        served("ack", token, end),
    ]


ALL = owner(1, 0, COUNT)
ASKED = Resetting("g", 1, 2, 0)
ABOVE = [
    served("acquire", 1, 0),
    *handled(0, 1, 2, token=1),
    served("ack", 1, 0, ((2, 3),)),
    ASKED,
]
"""An unanswered reset to where the cursor is, with an ack above that."""


@pytest.mark.parametrize(
    ("what", "events"),
    [
        ("back, and everything again", [*ALL, *reset(2, 0), *owner(3, 0, COUNT)]),
        ("back to the middle", [*ALL, *reset(2, 2), *owner(3, 2, COUNT)]),
        ("past unhandled messages", [*owner(1, 0, 1), *reset(2, 3), *owner(3, 3, COUNT)]),
        ("to the end, without a later owner", [*owner(1, 0, 1), *reset(2, COUNT)]),
        ("asked, not answered, and done", [*ALL, ASKED, *owner(3, 0, COUNT)]),
        ("asked, not answered, and not done", [*ALL, ASKED, served("acquire", 3, COUNT)]),
        (
            "asked for the same cursor, and not done",
            [
                *ABOVE,
                served("acquire", 3, 0, ((2, 3),)),
                *handled(0, 1, 3, token=3),
                served("ack", 3, COUNT),
            ],
        ),
        ("asked for the same cursor, and done", [*ABOVE, *owner(3, 0, COUNT)]),
        ("not answered, and again", [*ALL, ASKED, *reset(5, 1), *owner(6, 1, COUNT)]),
        (
            "a broker that restarts after it",
            [*ALL, *reset(2, 0), Recovered("g", 1, 2, 0), *owner(3, 0, COUNT)],
        ),
        (
            "one that restarts, and it may be done or not",
            [*ALL, ASKED, Recovered("g", 1, 2, 0), *owner(3, 0, COUNT)],
        ),
        (
            "a handler of before that ends late",
            [
                *owner(1, 0, 1),
                Started("g", f"{1:016d}", 1, 1, b"1", 1, 0, 1),
                *reset(2, 2),
                *owner(3, 2, COUNT),
                Ended("g", 1, 1, 1),
            ],
        ),
    ],
)
def test_messages_that_a_reset_repeats_or_passes_are_no_anomaly(what, events):
    """Set back it is all owed again, set on the rest is; an unanswered one was done or was not."""
    findings = check_history([*LOG, *events])
    assert not findings.total, (what, findings.examples)


@pytest.mark.parametrize(
    ("what", "anomaly", "events"),
    [
        ("set back, and not handled again", "starvation", [*ALL, *reset(2, 0)]),
        ("set back, and begun in the middle", "skip", [*ALL, *reset(2, 0), *owner(3, 1, COUNT)]),
        (
            "set back, and passed by the cursor",
            "skip",
            [
                *ALL,
                *reset(2, 0),
                served("acquire", 3, 0),
                *handled(0, token=3),
                served("ack", 3, COUNT),
            ],
        ),
        (
            "set to the same cursor, and passed above it",
            "skip",
            [*ABOVE, served("acquire", 3, 0), *handled(0, 1, 3, token=3), served("ack", 3, COUNT)],
        ),
        (
            "set on, and begun before it",
            "nonmonotonic",
            [*owner(1, 0, 1), *reset(2, 3), *owner(3, 1, COUNT)],
        ),
        (
            "what is behind it is skipped",
            "skip",
            [*owner(1, 0, 1), *reset(2, 2), *owner(3, 3, COUNT)],
        ),
        ("answered, and not done", "skip", [*ALL, *reset(2, 0), served("acquire", 3, COUNT)]),
        (
            "its fence is forgotten",
            "nonmonotonic",
            [*ALL, *reset(2, 0), Recovered("g", 1, 1, 0), *owner(3, 0, COUNT)],
        ),
        (
            "its cursor is forgotten",
            "nonmonotonic",
            [*owner(1, 0, 1), *reset(2, 3), Recovered("g", 1, 2, 1), *owner(3, 3, COUNT)],
        ),
        (
            "an old owner acks after it",
            "stale effect",
            [*ALL, *reset(2, 0), served("ack", 1, COUNT), *owner(3, 0, COUNT)],
        ),
        (
            "done by an owner's word, and undone",
            "nonmonotonic",
            [*ALL, ASKED, served("acquire", 3, COUNT), served("reset", 2, 0)],
        ),
        (
            "a cursor without a request",
            "nonmonotonic",
            [*ALL, ASKED, served("acquire", 3, 1), *handled(1, 2, 3, token=3)],
        ),
    ],
)
def test_reset_does_not_excuse(what, anomaly, events):
    """Behind the cursor it set everything is owed, in order, to owners above its token."""
    findings = check_history([*LOG, *events])
    assert findings.counts[anomaly], (what, findings.examples)


@pytest.mark.parametrize(
    ("what", "events"),
    [
        ("what was handled", [*owner(1, 0, 2), Expired(1, 2, ("g",)), *owner(2, 2, COUNT)]),
        ("a group that comes later", [Expired(1, 2, ()), *owner(1, 2, COUNT)]),
        (
            "a reset to what is gone",
            [*ALL, Expired(1, 2, ("g",)), *reset(2, 0), *owner(3, 2, COUNT)],
        ),
        ("an unanswered one", [*ALL, Expired(1, 2, ("g",)), ASKED, *owner(3, 2, COUNT)]),
        (
            "removed when the reset comes",
            [*ALL, ASKED, Expired(1, 2, ("g",)), served("reset", 2, 0), *owner(3, 2, COUNT)],
        ),
        (
            "what a crash has brought back",
            [*ALL, Expired(1, 2, ("g",)), Recovered("g", 1, 1, COUNT), Expired(1, 2, ("g",))],
        ),
    ],
)
def test_messages_removed_by_retention_are_no_anomaly(what, events):
    """Messages that every known group has handled may be removed, and are not owed any more."""
    findings = check_history([*LOG, *events])
    assert not findings.total, (what, findings.examples)


@pytest.mark.parametrize(
    ("what", "anomaly", "events"),
    [
        ("not handled", "lost", [*owner(1, 0, 2), Expired(1, 3, ("g",)), *owner(2, 3, COUNT)]),
        (
            "set back, and not handled again",
            "lost",
            [*ALL, *reset(2, 0), Expired(1, 2, ("g",)), *owner(3, 2, COUNT)],
        ),
        (
            "what is left is skipped",
            "skip",
            [*owner(1, 0, 2), Expired(1, 2, ("g",)), *owner(2, 3, COUNT)],
        ),
        ("what is left is not handled", "starvation", [*owner(1, 0, 2), Expired(1, 2, ("g",))]),
    ],
)
def test_retention_must_not_remove(what, anomaly, events):
    """What a known group has not handled stays, and what stays is owed."""
    findings = check_history([*LOG, *events])
    assert findings.counts[anomaly], (what, findings.examples)


def parked_era(*resets):
    """An era with message 3 set aside, and resets of (token, alone) behind it."""
    eras = Eras(lambda *_problem: None)
    eras.all[0].parked.add(3)
    for token, alone in resets:
        eras.request_reset(token, 5, without_children=alone)
    return eras


@pytest.mark.parametrize(
    ("resets", "kept"),
    [([], True), ([(2, True), (4, True)], True), ([(2, True), (4, False)], False)],
)
def test_parked_message_is_kept_by_children_unless_a_reset_sets_them_too(resets, kept):
    assert parked_era(*resets).is_kept_by_children(3) is kept
    assert not parked_era(*resets).is_kept_by_children(4)


@pytest.mark.parametrize("alone", [True, False])
def test_child_handles_a_message_below_the_cursor_only_if_the_reset_left_it_out(alone):
    """Partition 2 has taken message 1 of partition 1 over."""
    events = [
        *ALL[:1],
        *handled(0, token=1),
        SetAside("g", 1, 1, ((1, 2),)),
        *handled(2, 3, token=1),
        Resetting("g", 1, 2, COUNT, alone),
        served("reset", 2, COUNT),
        Served("acquire", "g", 2, 3, BEGAN, 0),
        *handled(1, token=3),
    ]
    counts = check_history([*LOG, *events]).counts
    assert (counts["nonmonotonic"] == 0) is alone

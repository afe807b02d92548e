"""Parked messages that cannot be read now: they wait, and others go on."""

from keylane.consumer.session.events import (
    CallFailed,
    KeysListed,
    MessagesHandled,
    ReadWindow,
    SendChanges,
    SourceUnreadable,
    Tick,
    WindowRead,
    WorkWanted,
)
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import UnreachableError
from keylane.protocol.frames import Acquired, ParkedChanged
from keylane.protocol.ids import MAX_I64
from keylane.protocol.message import Message
from keylane.protocol.parked import Park, ParkedKeyRow, ParkState
from support.session.partition_model import PARTITION_ID
from support.session.steps import Steps

NEAR, AWAY = PARTITION_ID, 4
PAUSE = Backoff(first_ms=100, max_ms=1_000, factor=4)
LONGEST_MS = 150
"""Of the first pause."""


def redriving(*keys: bytes | None, aside: tuple = (), unreleased: bool = False) -> Steps:
    """A session whose partition has keys that are redriven, and messages that wait for a retry."""
    answer = Acquired(0, (), 0, False, parked_version=1, unreleased=unreleased)
    steps = Steps(acquired=answer, on_failure="park", backoff=PAUSE)
    rows = [ParkedKeyRow(key, ParkState.REDRIVING, 9) for key in keys]
    steps.step(KeysListed(1, rows, aside))
    return steps


def read(steps: Steps, number: int, *messages: tuple[int, int], key: bytes = b"") -> list[int]:
    """Messages of a window arrive, and are handled; returns what workers got."""
    made = [Message("s", key, b"", offset, source, 0) for source, offset in messages]
    steps.step(WindowRead(number, made))
    begun = [steps.step(WorkWanted(9)).hand_out for _ in messages]
    steps.step(MessagesHandled(made))
    return [message.offset for each in begun for message in each]


def windows(steps: Steps) -> list[ReadWindow]:
    return steps.requested(ReadWindow)


def test_dead_letters_of_other_sources_go_on_while_one_source_is_away():
    steps = redriving(None)
    [window] = windows(steps)
    steps.step(SourceUnreadable(window.number, AWAY))
    [window] = windows(steps)
    assert window.passed_over == ((AWAY, MAX_I64),)
    assert read(steps, window.number, (NEAR, 1), (NEAR, 2)) == [1, 2]


def test_dead_letters_after_a_damaged_batch_go_on():
    steps = redriving(None)
    [window] = windows(steps)
    steps.step(SourceUnreadable(window.number, AWAY, upto=30))
    steps.step(SourceUnreadable(window.number, AWAY, upto=20))
    [window] = windows(steps)
    assert window.passed_over == ((AWAY, 30),)


def test_rows_that_were_passed_over_are_read_again_after_a_pause_that_grows():
    steps = redriving(None)
    for shortest_ms in (50, 200):
        [window] = windows(steps)
        steps.step(SourceUnreadable(window.number, AWAY, first_row=7))
        steps.step(WindowRead(window.number, []))
        steps.step(Tick(), after_ms=shortest_ms - 1)
        assert not windows(steps)
        steps.step(Tick(), after_ms=2 * shortest_ms + 1)
        [again] = windows(steps)
        assert (again.passed_over, again.first_row) == ((), 0)


def test_rows_that_were_passed_over_are_not_listed_for_each_window():
    steps = redriving(None)
    [window] = windows(steps)
    steps.step(SourceUnreadable(window.number, AWAY, first_row=0))
    message = Message("s", b"", b"", 1, NEAR, 0)
    steps.step(WindowRead(window.number, [message], first_row=2_000))
    steps.step(WorkWanted(1))
    steps.step(MessagesHandled([message]))
    steps.step(ParkedChanged(1))
    assert windows(steps)[0].first_row == 2_000


def test_key_waits_as_a_whole_for_its_first_message():
    steps = redriving(b"a", None)
    first, other = windows(steps)
    steps.step(SourceUnreadable(first.number, AWAY))
    assert not windows(steps), "later messages of the key keep their order"
    assert read(steps, other.number, (NEAR, 1)) == [1], "another key goes on"
    steps.step(Tick(), after_ms=LONGEST_MS)
    [again] = windows(steps)
    assert (again.number, again.passed_over) == (first.number, ())


def test_list_that_cannot_be_read_makes_a_key_wait():
    steps = redriving(None)
    [window] = windows(steps)
    steps.step(CallFailed(window, UnreachableError("no answer")))
    assert not windows(steps)
    steps.step(Tick(), after_ms=LONGEST_MS)
    assert windows(steps)


def test_key_that_may_have_ended_a_process_lets_others_go_on_while_it_cannot_be_read():
    steps = redriving(b"a", b"b", unreleased=True)
    steps.step(ParkedChanged(1))
    [first] = windows(steps)
    assert first.key == b"a"
    steps.step(SourceUnreadable(first.number, AWAY))
    assert parked(steps) == [b"b"], "its turn: it is parked again before it begins"
    steps.step(ParkedChanged(1))
    [second] = windows(steps)
    assert second.key == b"b"
    steps.step(Tick(), after_ms=LONGEST_MS)
    assert not windows(steps), "one at a time"


def test_loose_message_that_may_have_ended_a_process_is_alone_behind_an_unreadable_one():
    """What is passed over is no window: the first messages that are handed out are the careful
    ones.
    """
    steps = redriving(b"", b"k", unreleased=True)
    assert parked(steps) == [b""]
    steps.step(ParkedChanged(1))
    [window] = windows(steps)
    steps.step(SourceUnreadable(window.number, AWAY))
    assert parked(steps) == [], "the other key waits"
    [window] = windows(steps)
    assert (window.key, window.passed_over) == (b"", ((AWAY, MAX_I64),))
    assert read(steps, window.number, (NEAR, 1)) == [1]
    assert parked(steps) == [], "that is not stored"


def parked(steps: Steps) -> list[object]:
    changes = [change for sent in steps.requested(SendChanges) for change in sent.changes]
    return [change.key for change in changes if isinstance(change, Park)]


# ── retries ───────────────────────────────────────────────────────────────────────────────────────
def test_retries_of_other_sources_go_on_while_one_source_is_away():
    steps = redriving(aside=((1, AWAY, 0, 2), (1, NEAR, 5, 6)))
    away, near = windows(steps)
    steps.step(SourceUnreadable(away.number, AWAY))
    assert read(steps, near.number, (NEAR, 5)) == [5]


def test_retries_behind_an_unreadable_one_take_turns():
    steps = redriving(aside=((1, AWAY, 0, 3),))
    [window] = windows(steps)
    assert window.ranges == ((0, 3),)
    steps.step(SourceUnreadable(window.number, AWAY))
    assert not windows(steps)
    steps.step(Tick(), after_ms=LONGEST_MS)
    [window] = windows(steps)
    assert window.ranges == ((0, 1),)
    steps.step(SourceUnreadable(window.number, AWAY))
    steps.step(Tick(), after_ms=LONGEST_MS)
    assert not windows(steps), "the pause grows"
    steps.step(Tick(), after_ms=4 * LONGEST_MS)
    assert windows(steps)[0].ranges == ((1, 3),)


def test_retries_behind_a_damaged_batch_do_not_wait_for_it():
    steps = redriving(aside=((1, AWAY, 0, 9),))
    [window] = windows(steps)
    steps.step(SourceUnreadable(window.number, AWAY, upto=4))
    steps.step(Tick(), after_ms=LONGEST_MS)
    [window] = windows(steps)
    assert window.ranges == ((0, 4),)
    steps.step(SourceUnreadable(window.number, AWAY, upto=4))
    steps.step(Tick(), after_ms=4 * LONGEST_MS)
    [window] = windows(steps)
    assert read(steps, window.number, (AWAY, 4), (AWAY, 8)) == [4, 8]


def test_retries_of_a_source_go_on_together_once_it_can_be_read():
    steps = redriving(aside=((1, AWAY, 0, 1), (2, AWAY, 5, 6)))
    first, second = windows(steps)
    steps.step(SourceUnreadable(first.number, AWAY))
    steps.step(SourceUnreadable(second.number, AWAY))
    steps.step(Tick(), after_ms=LONGEST_MS)
    [probe] = windows(steps)
    steps.step(WindowRead(probe.number, []))
    assert [window.source for window in windows(steps)] == [AWAY]

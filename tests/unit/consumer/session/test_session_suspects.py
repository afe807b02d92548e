"""Messages that may have ended their process: what docs/PARKING.md promises."""

from keylane.consumer.session.events import (
    CallFailed,
    LeaveTurn,
    NoteKind,
    Paused,
    SendChanges,
    Stopped,
    TakeTurn,
    Tick,
    TurnTaken,
    WorkWanted,
)
from keylane.consumer.session.state import CAREFUL_MAX
from keylane.protocol.errors import OverloadedError
from keylane.protocol.frames import Ack, Acquired, Release
from keylane.protocol.parked import Park
from support.session.steps import Steps, offsets_of

A, B, NONE = b"a", b"b", b""


def suspected(*keys: bytes, upto: int, begun=(), **settings) -> Steps:
    """A partition whose last two owners ended without a release."""
    acquired = Acquired(0, (), len(keys), False, (), 0, (), upto, begun, unreleased=True)
    steps = Steps(*keys, acquired=acquired, **settings)
    steps.pull(len(keys))
    return steps


def begin(steps: Steps) -> list[int]:
    """The consumer's turn, and the record of the broker; returns what is handed out."""
    assert steps.requested(TakeTurn)
    steps.step(TurnTaken())
    assert steps.requested(Ack)[0].begun
    return offsets_of(steps.ack().hand_out)


def test_suspect_is_handed_out_when_its_begin_is_stored():
    steps = suspected(A, B, upto=2)
    assert steps.want(2) == []
    assert steps.requested(TakeTurn)
    steps.step(TurnTaken())
    [ack] = steps.requested(Ack)
    assert ack.begun == ((0, 2),)
    assert offsets_of(steps.ack().hand_out) == [0]


def test_suspect_waits_while_its_partition_is_paused():
    steps = suspected(A, upto=1)
    steps.want()
    steps.step(TurnTaken())
    steps.step(Paused(True))
    assert steps.ack().hand_out == []
    assert steps.want() == []
    assert offsets_of(steps.step(Paused(False)).hand_out) == [0]


def test_next_suspect_begins_when_the_ack_of_the_last_one_is_stored():
    steps = suspected(A, B, NONE, upto=2)
    steps.want()
    assert begin(steps) == [0]
    assert not steps.ready.has_more
    assert steps.handle(0, wanted=1) == []
    assert steps.requested(Ack)[0].ranges == ((0, 1),)
    steps.ack(1)
    assert steps.requested(LeaveTurn)
    steps.want()
    assert begin(steps) == [1]


def test_messages_after_the_suspects_are_handed_out_freely():
    steps = suspected(A, NONE, NONE, upto=1)
    steps.want()
    begin(steps)
    steps.handle(0)
    steps.ack(1)
    assert steps.want(2) == [1, 2]


def test_suspect_that_fails_is_no_longer_one():
    steps = suspected(A, B, upto=2)
    steps.want()
    begin(steps)
    steps.fail(0)
    assert steps.requested(LeaveTurn)
    steps.want()
    assert steps.requested(TakeTurn)


def test_message_that_ended_two_processes_alone_is_parked():
    steps = suspected(A, A, B, upto=3, begun=((0, 2),), on_failure="park")
    steps.want()
    [sent] = steps.requested(SendChanges)
    [park] = sent.changes
    assert isinstance(park, Park)
    assert (park.key, park.ranges, park.failure.kind) == (A, ((0, 2),), "crashed")
    assert NoteKind.CRASHED in [note.kind for note in steps.ready.notes]


def test_accused_message_is_handed_out_alone_again_when_the_policy_blocks():
    steps = suspected(A, B, upto=2, begun=((0, 2),))
    steps.want()
    assert not steps.requested(SendChanges)
    assert begin(steps) == [0]


def test_careful_state_ends_after_its_time_but_not_before_an_accused_message():
    steps = suspected(*[NONE] * 4, upto=4, begun=((1, 1),), ttl_ms=120_000)
    steps.session.tenure.until_ms += 120_000
    steps.step(Tick(), after_ms=40_000)
    steps.ack()  # the renewal of the pull lock
    steps.want()
    assert begin(steps) == [0]
    steps.handle(0)
    steps.ack(1)
    steps.want()
    assert begin(steps) == [1]
    steps.handle(1)
    steps.ack(2)
    assert steps.want(2) == [2, 3]


def test_suspect_that_takes_too_long_is_not_waited_for():
    steps = suspected(NONE, NONE, upto=2, ttl_ms=120_000)
    steps.session.tenure.until_ms += 120_000
    steps.want()
    begin(steps)
    assert steps.want() == []
    steps.step(Tick(), after_ms=31_000)
    assert steps.requested(Ack)[0].begun == ((0, 1),), "others beside it may end the process too"
    assert steps.want() == []
    steps.ack()
    assert steps.requested(LeaveTurn)
    assert steps.want() == [1]


def test_suspect_that_was_accused_is_still_accused_when_it_takes_too_long():
    steps = suspected(NONE, NONE, upto=2, begun=((0, 1),), ttl_ms=120_000)
    steps.session.tenure.until_ms += 120_000
    steps.want()
    begin(steps)
    steps.step(Tick(), after_ms=31_000)
    assert not steps.requested(Ack)
    assert steps.requested(LeaveTurn)
    assert steps.want() == [1]


def test_suspect_that_fails_as_it_is_passed_over_is_accused_of_nothing():
    steps = suspected(NONE, NONE, upto=2, ttl_ms=60_000)
    steps.session.tenure.until_ms += 60_000
    steps.want()
    begin(steps)
    steps.step(Tick(), after_ms=20_000)
    assert steps.requested(Ack)[0].begun == ()
    steps.step(Tick(), after_ms=11_000)
    assert not steps.requested(Ack), "the renewal is in flight"
    steps.fail(0)
    steps.ack()
    [ack] = steps.requested(Ack)
    assert (ack.failed, ack.begun) == (((0, 1),), ())


def test_begin_of_a_suspect_is_sent_again_when_the_broker_refuses_it():
    steps = suspected(A, upto=1)
    steps.want()
    steps.step(TurnTaken())
    [ack] = steps.requested(Ack)
    steps.step(CallFailed(ack, OverloadedError("no room")))
    assert not steps.ready.hand_out
    steps.step(Tick(), after_ms=2_000)
    assert steps.requested(Ack)[0].begun == ((0, 2),)
    assert offsets_of(steps.ack().hand_out) == [0]


def test_end_that_made_suspects_counts_when_nothing_was_begun():
    """Once for each message that may have been in hand; one more end, alone, is the second."""
    steps = suspected(A, B, NONE, upto=2, begun=((2, 2),))
    assert steps.session.suspects.crashes_if_alone(0) == 1, "that end has its culprit"
    steps = suspected(A, B, NONE, upto=2)
    crashes = [steps.session.suspects.crashes_if_alone(offset) for offset in range(3)]
    assert crashes == [2, 2, 1]


def test_crashes_count_as_tries():
    """One crash is enough after all but the last of its tries have failed; those alone are not."""
    settings = {"on_failure": "dead", "tries_max": 4}
    acquired = Acquired(0, (), 2, False, ((0, 2), (1, 2)), 0, (), 2, ((0, 2), (1, 1)))
    steps = Steps(NONE, NONE, acquired=acquired, **settings)
    steps.pull(2)
    steps.want()
    [sent] = steps.requested(SendChanges)
    assert [change.ranges for change in sent.changes] == [((0, 1),)]
    steps = Steps(NONE, acquired=Acquired(0, (), 1, False, ((0, 3),), 0, (), 1), **settings)
    steps.pull(1)
    steps.want()
    assert begin(steps) == [0]
    assert steps.ready.hand_out[0].attempt == 4


def test_crash_counts_once_for_a_message_that_waits_for_its_key():
    steps = suspected(A, A, upto=2, begun=((1, 1),), on_failure="park")
    steps.want()
    begin(steps)
    steps.fail(0)
    assert steps.want() == []
    [first] = steps.step(WorkWanted(1), after_ms=100).hand_out
    assert first.offset == 0
    steps.ack()
    steps.handle(0)
    steps.ack(1)
    steps.want()
    assert begin(steps) == [1]
    assert steps.ready.hand_out[0].attempt == 2


def test_message_that_ends_processes_is_named_each_time_when_the_policy_blocks():
    steps = suspected(A, upto=1, begun=((0, 7),))
    steps.want()
    [note] = [note for note in steps.ready.notes if note.kind is NoteKind.CRASHED]
    assert (note.message.offset, note.count, note.is_set_aside) == (0, 7, False)
    steps.step(TurnTaken())
    assert steps.requested(Ack)[0].begun == ((0, 8),)
    assert [message.attempt for message in steps.ack().hand_out] == [8]


def test_key_of_a_suspect_is_parked_with_later_suspects_of_it_and_others_go_on():
    steps = suspected(A, A, B, upto=3, on_failure="park", tries_max=1)
    steps.want()
    begin(steps)
    steps.fail(0)
    assert steps.requested(LeaveTurn)
    [sent] = steps.requested(SendChanges)
    assert [(change.key, change.ranges) for change in sent.changes] == [(A, ((0, 2),))]
    steps.want()
    assert begin(steps) == [2]


def test_suspect_waits_for_an_earlier_message_of_its_key_that_has_failed():
    """It would overtake it otherwise."""
    steps = suspected(A, B, A, upto=3)
    steps.want()
    begin(steps)
    steps.fail(0)
    steps.want()
    assert begin(steps) == [1]
    steps.handle(1)
    steps.ack()
    assert steps.want() == []
    assert not steps.requested(TakeTurn)
    [failed] = steps.step(WorkWanted(1), after_ms=100).hand_out
    assert failed.offset == 0
    steps.handle(0)
    steps.ack(2)
    steps.want()
    assert begin(steps) == [2]


def test_careful_state_is_not_over_before_all_suspects_are_pulled():
    acquired = Acquired(0, (), 3, False, suspects_upto=3)
    steps = Steps(A, B, NONE, acquired=acquired)
    steps.pull(1)
    steps.want()
    begin(steps)
    steps.handle(0)
    steps.ack(1)
    assert steps.want() == []
    assert not steps.requested(TakeTurn)
    steps.pull(2)
    steps.want()
    assert begin(steps) == [1]


def test_careful_state_ends_after_so_many_suspects():
    count = CAREFUL_MAX + 2
    steps = suspected(*[NONE] * count, upto=count)
    for offset in range(CAREFUL_MAX):
        assert steps.want() == []
        assert begin(steps) == [offset]
        steps.handle(offset)
        steps.ack(offset + 1)
    assert steps.want(2) == [CAREFUL_MAX, CAREFUL_MAX + 1]


def test_hand_over_waits_for_the_suspect_in_hand_alone():
    steps = suspected(A, B, NONE, upto=3)
    steps.want()
    begin(steps)
    steps.step(Stopped(500))
    assert steps.session.intake.held == 1
    assert not steps.requested(Release)
    steps.handle(0)
    steps.ack(1)
    assert steps.requested(Release)


def test_suspect_that_waits_for_its_turn_is_left_to_the_next_owner_at_a_hand_over():
    steps = suspected(A, upto=1)
    steps.want()
    steps.step(Stopped(500))
    assert steps.requested(LeaveTurn)
    steps.step(TurnTaken())
    assert not steps.ready.hand_out

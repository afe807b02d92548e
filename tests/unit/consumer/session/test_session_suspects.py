"""Messages that may have ended their process: what docs/PARKING.md promises."""

from keylane.consumer.session.events import Paused, Stopped, Tick, TurnTaken
from keylane.consumer.session.ready import LeaveTurn, NoteKind, SendChanges, TakeTurn
from keylane.protocol.frames import Ack, Acquired
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
    assert steps.requested(LeaveTurn)
    assert steps.want() == [1]


def test_suspect_that_waits_for_its_turn_is_left_to_the_next_owner_at_a_hand_over():
    steps = suspected(A, upto=1)
    steps.want()
    steps.step(Stopped(500))
    assert steps.requested(LeaveTurn)
    steps.step(TurnTaken())
    assert not steps.ready.hand_out

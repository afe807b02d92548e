"""Programs that take several messages of a key at once, step by step."""

from keylane.consumer.session.events import MessagesReturned, RunSpread, Tick, WorkWanted
from keylane.consumer.session.failure import Treatment
from keylane.consumer.session.ready import FailureOutcome, SendChanges
from keylane.protocol.frames import Ack
from support.session.partition_model import PARTITION_ID
from support.session.steps import Steps, offsets_of

A, B, NONE = b"a", b"b", b""


def take_together(steps: Steps, count: int, *, run: int = 0) -> list[int]:
    return offsets_of(steps.step(WorkWanted(count, count, run, together=True)).hand_out)


def outcome_of(steps: Steps) -> FailureOutcome:
    [outcome] = [each for each in steps.ready.notes if isinstance(each, FailureOutcome)]
    return outcome


def spread(*keys: bytes, **settings) -> Steps:
    """A program has all messages of a run, none of which it has acked."""
    steps = Steps(*keys, **settings)
    steps.pull(len(keys))
    assert take_together(steps, len(keys), run=len(keys)) == list(range(len(keys)))
    steps.step(RunSpread())
    return steps


def test_key_is_free_when_all_of_its_messages_in_hand_are_acked():
    steps = Steps(A, A, B, A)
    steps.pull(3)
    assert take_together(steps, 3, run=3) == [0, 1, 2]
    steps.step(RunSpread())
    steps.pull(1)
    assert take_together(steps, 5) == []
    steps.handle(1)
    assert take_together(steps, 5) == []
    steps.handle(0)
    assert take_together(steps, 5) == [3]


def test_first_messages_of_a_spread_run_are_acked():
    steps = Steps(A, A, B)
    steps.pull(3)
    take_together(steps, 3, run=3)
    steps.step(RunSpread(2))
    assert list(steps.session.lanes.in_hand) == [(PARTITION_ID, 2)]
    steps.step(Tick(), after_ms=1_000)
    assert steps.requested(Ack)[0].ranges == ((0, 2),)


def test_messages_of_a_key_are_handed_out_together_beside_others_in_hand():
    steps = Steps(B, A, A, NONE, B, A)
    steps.pull(6)
    assert steps.want() == [0]
    assert take_together(steps, 5) == [1, 2, 3, 5]
    assert steps.handle(0, wanted=1) == [4]


def test_later_messages_of_a_key_come_back_with_one_that_fails():
    steps = spread(A, B, A, A)
    steps.fail(2, asked_ms=0)
    assert offsets_of(outcome_of(steps).returned) == [3]
    assert [offset for _, offset in steps.session.lanes.in_hand] == [0, 1]
    assert take_together(steps, 5) == [], "an earlier message of the key is in hand"
    steps.handle(0)
    assert take_together(steps, 5) == [2, 3]
    assert [each.attempt for each in steps.ready.hand_out] == [2, 2]


def test_failed_message_waits_for_its_pause_and_for_earlier_ones():
    steps = spread(A, A)
    steps.fail(1, asked_ms=500)
    steps.handle(0)
    assert take_together(steps, 2) == []
    steps.now_ms += 500
    assert take_together(steps, 2) == [1]


def test_key_is_parked_when_earlier_messages_in_hand_have_ended():
    steps = spread(A, A, A, on_failure="park", tries_max=1)
    steps.fail(1)
    outcome = outcome_of(steps)
    assert (outcome.treatment, offsets_of(outcome.returned)) == (Treatment.PARKED, [2])
    assert not steps.requested(SendChanges)
    steps.handle(0)
    assert take_together(steps, 3) == []
    [request] = steps.requested(SendChanges)
    assert [change.ranges for change in request.changes] == [((1, 3),)]


def test_key_is_parked_at_once_with_the_later_ones_in_hand():
    steps = spread(A, A, on_failure="park", tries_max=1)
    steps.fail(0)
    [request] = steps.requested(SendChanges)
    assert [change.ranges for change in request.changes] == [((0, 2),)]
    assert not steps.session.lanes.in_hand


def test_later_messages_follow_a_dead_letter_again():
    steps = spread(A, A, on_failure="dead", tries_max=1)
    steps.fail(0)
    assert offsets_of(outcome_of(steps).returned) == [1]
    assert take_together(steps, 2) == [1]


def test_returned_messages_come_first_and_count_no_try():
    steps = spread(A, A, B)
    steps.step(MessagesReturned(list(steps.session.lanes.in_hand.values())))
    assert sorted(take_together(steps, 3)) == [0, 1, 2]
    assert {each.attempt for each in steps.ready.hand_out} == {1}


def test_returned_message_waits_for_earlier_ones_of_its_key_in_hand():
    steps = spread(A, A)
    steps.step(MessagesReturned([steps.session.lanes.in_hand[PARTITION_ID, 1]]))
    assert take_together(steps, 2) == []
    steps.handle(0)
    assert take_together(steps, 2) == [1]


def test_key_with_acks_that_are_awaited_stays_busy():
    steps = Steps(A, A, A, ack="each")
    steps.pull(3)
    assert take_together(steps, 2) == [0, 1]
    steps.handle(0)
    steps.ack(1)
    assert take_together(steps, 2) == []
    steps.handle(1)
    assert take_together(steps, 2) == []
    steps.ack(2)
    assert take_together(steps, 2) == [2]

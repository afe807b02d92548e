"""Programs that take several messages of a key at once, step by step."""

import pytest

from keylane.consumer.session.events import (
    FailureOutcome,
    FlightsPulled,
    KeysListed,
    MessageFailed,
    MessagesHandled,
    MessagesReturned,
    OperatorChanged,
    Paused,
    ReadWindow,
    RunSpread,
    SendChanges,
    WindowRead,
    WorkWanted,
)
from keylane.consumer.session.failure import Treatment
from keylane.protocol.frames import ParkedChanged
from keylane.protocol.message import Message
from keylane.protocol.parked import ParkedKeyRow, ParkState
from support.session.partition_model import PARTITION_ID, BatchModel
from support.session.steps import FAILURE, LEASE, Steps, offsets_of

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
    assert steps.ready.hand_out[0].attempt == 1, "no try of it has failed"


def test_paused_messages_are_parked_behind_one_that_fails():
    steps = Steps(A, B, A, on_failure="park", tries_max=1)
    steps.pull(2)
    assert take_together(steps, 1) == [0]
    steps.step(Paused(True))
    steps.pull(1)
    steps.fail(0)
    steps.step(ParkedChanged(1))
    steps.step(Paused(False))
    assert take_together(steps, 3) == [1]
    [request] = steps.requested(SendChanges)
    assert [(change.key, change.ranges) for change in request.changes] == [(A, ((2, 3),))]


def test_messages_that_were_paused_come_in_the_order_of_their_key():
    """One waits behind a message in hand, and a later one arrives during the pause."""
    steps = Steps(A, A, A)
    steps.pull(2)
    assert take_together(steps, 1) == [0]
    assert steps.want(2) == []
    steps.step(Paused(True))
    steps.pull(1)
    assert take_together(steps, 3) == []
    steps.step(Paused(False))
    assert take_together(steps, 3) == []
    steps.handle(0)
    assert steps.ready.has_more
    assert take_together(steps, 1) == [1]
    assert steps.handle(1, wanted=1) == [2]


def test_message_that_was_paused_comes_at_once_when_its_key_became_free_meanwhile():
    steps = Steps(A, A)
    steps.pull(2)
    assert take_together(steps, 1) == [0]
    assert steps.want() == []
    steps.step(Paused(True))
    assert steps.handle(0, wanted=1) == []
    steps.step(Paused(False))
    assert steps.ready.has_more
    assert take_together(steps, 2) == [1]


def dead_letters(steps: Steps, *offsets: int) -> None:
    """An operator redrives dead letters of the key that partition 4 stores."""
    steps.step(OperatorChanged(1))
    steps.step(KeysListed(1, [ParkedKeyRow(0, ParkState.REDRIVING, len(offsets))]))
    [window] = steps.requested(ReadWindow)
    messages = [Message("s", A, b"", offset, 4, LEASE[3]) for offset in offsets]
    steps.step(WindowRead(window.number, messages))


@pytest.mark.parametrize(("policy", "own"), [("block", [0, 1]), ("dead", [1]), ("park", [])])
def test_dead_letters_that_wait_behind_a_message_given_back_come_in_their_order(policy, own):
    """Their offsets are those of messages that are in hand; each comes once."""
    steps = spread(A, A, on_failure=policy, tries_max=1)
    dead_letters(steps, 0, 1)
    assert take_together(steps, 4) == []
    steps.fail(0, asked_ms=0)
    came: list[tuple[int, int]] = []
    while take_together(steps, 4):
        taken = list(steps.ready.hand_out)
        came += [(message.partition_id, message.offset) for message in taken]
        steps.step(MessagesHandled(taken))
    assert [offset for partition, offset in came if partition == PARTITION_ID] == own
    assert [offset for partition, offset in came if partition == 4] == [0, 1]
    assert steps.session.lanes.is_idle
    assert steps.session.intake.held == 0


def test_pause_of_a_message_is_its_own_when_another_partition_has_its_offset():
    steps = Steps(A)
    steps.pull(1)
    dead_letters(steps, 0)
    [own] = steps.step(WorkWanted(2, 2, together=True)).hand_out
    assert own.partition_id == 4
    steps.step(MessageFailed(own, FAILURE, 5_000))
    assert take_together(steps, 2) == []
    steps.now_ms += 5_000
    [again] = steps.step(WorkWanted(2, 2, together=True)).hand_out
    assert (again.partition_id, again.attempt) == (4, 2)
    steps.step(MessagesHandled([again]))
    assert take_together(steps, 2) == [0]
    assert [(each.partition_id, each.attempt) for each in steps.ready.hand_out] == [
        (PARTITION_ID, 1)
    ]


def test_messages_of_a_shared_group_stay_in_hand_when_one_beside_them_is_set_aside():
    steps = Steps(A, A, on_failure="dead", tries_max=2, consume_strategy="shared")
    arrived = FlightsPulled([BatchModel(steps.keys, 0, 2)], ((0, 2),), steps.now_ms, 0, 2)
    steps.step(arrived)
    assert take_together(steps, 2) == [0, 1]
    steps.fail(1, asked_ms=0, holds_key=True)
    assert take_together(steps, 2) == [1]
    steps.session.lanes.in_hand[PARTITION_ID, 0].attempt = 2
    steps.fail(0, asked_ms=0, holds_key=True)
    assert outcome_of(steps).treatment is Treatment.DEAD
    assert take_together(steps, 2) == []
    steps.handle(1)
    assert steps.session.intake.held == 0


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

"""What a shared group's session begins, renews and drops: messages have a time in flight."""

from keylane.consumer.session.events import (
    FailureOutcome,
    FlightsPulled,
    MessagesReturned,
    WorkersFree,
    WorkWanted,
)
from keylane.consumer.session.failure import Treatment
from keylane.protocol.backoff import Backoff
from keylane.protocol.frames import Ack, PullShared
from support.session.partition_model import PARTITION_ID, BatchModel
from support.session.steps import Steps

KEY = b"a"
IN_FLIGHT_MS = 9_000
BEGIN_MS = 6_000
"""Two thirds of it."""


def shared(count: int = 20, **settings: object) -> Steps:
    options = {"consume_strategy": "shared", "in_flight_ms": IN_FLIGHT_MS, **settings}
    return Steps(*[KEY] * count, **options)


def arrive(steps: Steps, start: int, end: int) -> None:
    """Messages `[start, end)` are in flight here from now on."""
    batch = BatchModel(steps.keys, start, end)
    steps.step(FlightsPulled([batch], ((start, end),), steps.now_ms, 0, len(steps.keys)))


def outcomes(steps: Steps) -> list[tuple[int, Treatment]]:
    return [
        (note.message.offset, note.treatment)
        for note in steps.ready.notes
        if isinstance(note, FailureOutcome)
    ]


def test_failed_message_waits_beside_the_limit_of_messages_in_flight():
    steps = shared(in_flight_messages=2)
    arrive(steps, 0, 2)
    assert steps.want(2) == [0, 1]
    steps.step(WorkersFree(4))
    assert steps.requested(PullShared) == []
    steps.fail(0)
    assert [pull.count_max for pull in steps.requested(PullShared)] == [1]


def test_failed_message_is_dropped_and_named_when_its_time_in_flight_is_over():
    steps = shared(handler_backoff=Backoff(first_ms=60_000, max_ms=60_000))
    arrive(steps, 0, 1)
    assert steps.want() == [0]
    (outcome,) = [note for note in steps.fail(0).notes if isinstance(note, FailureOutcome)]
    assert (outcome.treatment, outcome.pause_ms) == (Treatment.AGAIN, BEGIN_MS)
    assert steps.step(WorkWanted(1), after_ms=BEGIN_MS).hand_out == []
    assert outcomes(steps) == [(0, Treatment.EXPIRED)]
    assert outcome.message.attempt == 1, "no second try has begun"
    assert steps.session.intake.held == 0


def test_late_message_takes_no_place_of_another():
    """A worker that asks for one gets the one that it may begin."""
    steps = shared(handler_backoff=Backoff(first_ms=60_000, max_ms=60_000))
    arrive(steps, 0, 1)
    assert steps.want() == [0]
    steps.fail(0)
    steps.now_ms += BEGIN_MS
    arrive(steps, 1, 2)
    assert steps.want() == [1]


def test_returned_message_is_handed_out_once_when_its_broker_hands_it_out_again():
    steps = shared()
    arrive(steps, 0, 2)
    (message, _) = steps.step(WorkWanted(2)).hand_out
    steps.step(MessagesReturned([message]))
    arrive(steps, 0, 1)
    steps.handle(1)
    assert steps.want(5) == [0]
    assert steps.want(5) == []
    assert steps.session.intake.held == 1


def test_message_that_waits_for_its_ack_begins_once_when_its_broker_hands_it_out_again():
    steps = shared(ack="before")
    arrive(steps, 0, 1)
    assert steps.want() == [], "its ack is not stored"
    arrive(steps, 0, 1)
    assert steps.want() == []
    assert steps.session.intake.held == 1
    ready = steps.ack()
    assert [each.offset for each in ready.hand_out] == [0]
    assert steps.handle(0) == []
    assert steps.session.intake.held == 0


def test_acks_renew_what_handlers_have_and_nothing_that_waits():
    steps = shared()
    arrive(steps, 0, 3)
    assert steps.want(2) == [0, 1]
    steps.fail(1)
    steps.ready = steps.step(WorkersFree(-1), after_ms=IN_FLIGHT_MS // 6)
    (ack,) = steps.requested(Ack)
    assert (ack.held, ack.in_flight_ms) == (((0, 1),), IN_FLIGHT_MS)
    steps.ack()
    begin = steps.session.flights.begin_until_ms
    assert begin[0] == steps.now_ms + BEGIN_MS
    assert begin[1] < begin[0]
    assert (PARTITION_ID, 2) not in steps.session.lanes.in_hand

"""What a shared group's session pulls: what free workers can begin."""

from keylane.consumer.session.events import FlightsPulled, Tick, WorkersFree, WorkWanted
from keylane.consumer.session.offsets import PullSize
from keylane.protocol.frames import PullShared
from support.session.partition_model import BatchModel
from support.session.steps import Steps

NONE = b""


def shared(**settings: int) -> Steps:
    steps = Steps(*[NONE] * 20, consume_strategy="shared", **settings)
    assert not steps.requested(PullShared), "no worker is known to be free"
    return steps


def arrive(steps: Steps, start: int, end: int) -> None:
    """Messages `[start, end)` are in flight here."""
    batch = BatchModel(steps.keys, start, end)
    steps.step(FlightsPulled([batch], ((start, end),), steps.now_ms, 0, 20))


def pulled(steps: Steps) -> list[int]:
    """How many messages the last step asked for."""
    return [pull.count_max for pull in steps.requested(PullShared)]


def test_session_pulls_one_message_for_each_free_worker():
    steps = shared()
    steps.step(WorkersFree(3))
    assert pulled(steps) == [3]


def test_session_pulls_nothing_while_messages_wait_for_workers():
    steps = shared()
    steps.step(WorkersFree(2))
    arrive(steps, 0, 2)
    assert pulled(steps) == [2]
    steps.step(WorkersFree(-2))
    arrive(steps, 2, 4)
    assert pulled(steps) == []
    steps.step(Tick(), after_ms=5_000)
    assert pulled(steps) == []
    steps.step(WorkersFree(1))
    assert pulled(steps) == [1]


def test_session_pulls_ahead_what_it_handles_in_a_second():
    steps = shared()
    steps.step(WorkersFree(4))
    steps.step(WorkersFree(0))
    arrive(steps, 0, 4)
    assert pulled(steps) == []
    messages = steps.step(WorkWanted(4)).hand_out
    assert len(messages) == 4
    steps.handle(0)
    assert pulled(steps) == [], "half of one message is not worth a pull"
    steps.handle(1)
    assert pulled(steps) == [2]


def test_session_pulls_no_more_than_may_be_in_flight():
    steps = shared(in_flight_messages=5)
    steps.step(WorkersFree(50))
    assert pulled(steps) == [5]
    arrive(steps, 0, 5)
    assert pulled(steps) == []


def test_pull_size_is_what_was_handled_in_the_last_second():
    size = PullSize()
    size.received = 100
    assert size.decide(100, 0, 200, 10_000) == 0
    assert size.decide(60, 0, 200, 10_100) == 40
    assert size.decide(60, 0, 200, 14_000) == 10


def test_pull_size_grows_while_a_program_takes_what_it_does_not_ack():
    size, taken = PullSize(by_hand=True), 0
    sizes = []
    while taken < 1_000:
        size.free = 1
        count = size.decide(taken, taken, 10_000, 10_000 + len(sizes))
        sizes.append(count)
        size.received += count
        taken += count
    assert sizes[:5] == [1, 2, 4, 8, 16]


def test_pull_size_is_nothing_while_more_wait_than_are_handled():
    size = PullSize()
    size.received, size.free = 100, -30
    assert size.decide(100, 0, 200, 0) == 0
    assert size.decide(60, 0, 200, 1_000) == 0

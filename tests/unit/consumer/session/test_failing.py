"""What operators see of a message that fails or hangs, step by step."""

from keylane.consumer.session.events import (
    KeysListed,
    MessageFailed,
    MessageHangs,
    MessagesHandled,
    MessagesReturned,
    OperatorChanged,
    ReadWindow,
    Stopped,
    Tick,
    WindowRead,
    WorkWanted,
)
from keylane.consumer.session.offsets import FailingMessages, HandledOffsets
from keylane.protocol.frames import Ack, Acquired
from keylane.protocol.message import Message
from keylane.protocol.parked import (
    FAILING_COUNTED_MAX,
    FailingMessage,
    Failure,
    ParkedKeyRow,
    ParkState,
    hanging_failure,
)
from support.session.partition_model import PARTITION_ID
from support.session.steps import LEASE, Steps

A, B = b"a", b"b"
FAILED_AT_MS = 5_000


def failure(at_ms: int = FAILED_AT_MS, attempts: int = 1) -> Failure:
    return Failure("ValueError", "no such account", "till", at_ms, attempts)


def hang(at_ms: int, attempts: int = 0) -> Failure:
    return hanging_failure("it has not returned", client="till", at_ms=at_ms, attempts=attempts)


def fail(steps: Steps, offset: int, **given: int) -> None:
    message = steps.session.lanes.in_hand[PARTITION_ID, offset]
    steps.step(MessageFailed(message, failure(**given)))


def hang_on(steps: Steps, offset: int, *, running_ms: int, at_ms: int = 20_000) -> None:
    message = steps.session.lanes.in_hand[PARTITION_ID, offset]
    steps.step(MessageHangs(message, hang(at_ms), running_ms))


def named(steps: Steps, *, after_ms: int = 20) -> FailingMessage | None:
    """What the next ack request names."""
    steps.step(Tick(), after_ms=after_ms)
    [ack] = steps.requested(Ack)
    failing: FailingMessage | None = ack.failing
    steps.ack()
    return failing


def test_ack_names_the_message_that_fails():
    steps = Steps(A, B)
    steps.pull(2)
    steps.want()
    fail(steps, 0)
    told = named(steps)
    assert (told.offset, told.kind, told.text) == (0, "ValueError", "no such account")
    assert (told.since_ms, told.at_ms, told.attempts) == (FAILED_AT_MS, FAILED_AT_MS, 1)
    assert (told.source, told.running_ms) == (None, None)


def test_message_is_named_since_its_first_failure():
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    fail(steps, 0)
    named(steps)
    steps.step(WorkWanted(1), after_ms=100)
    fail(steps, 0, at_ms=9_000, attempts=2)
    told = named(steps)
    assert (told.since_ms, told.at_ms, told.attempts) == (FAILED_AT_MS, 9_000, 2)


def test_oldest_of_two_failing_messages_is_named():
    steps = Steps(A, B)
    steps.pull(2)
    steps.want(2)
    fail(steps, 1)
    assert named(steps).offset == 1
    fail(steps, 0)
    assert named(steps).offset == 0


def test_others_are_named_with_the_oldest_the_last_failure_first():
    steps = Steps(*(b"%d" % number for number in range(6)))
    steps.pull(6)
    steps.want(6)
    for at_ms, offset in enumerate((3, 0, 5, 1, 4), start=FAILED_AT_MS):
        fail(steps, offset, at_ms=at_ms)
    hang_on(steps, 2, running_ms=10_000, at_ms=FAILED_AT_MS + 9)
    told = named(steps)
    assert (told.offset, told.others_count) == (0, 5)
    assert [each.offset for each in told.others] == [2, 4, 1]
    assert [each.running_ms for each in told.others] == [10_000, None, None]
    assert [each.others for each in told.others] == [(), (), ()]
    steps.step(WorkWanted(6), after_ms=100)
    while steps.want(6):
        pass
    for offset in (0, 4):
        steps.handle(offset)
    told = named(steps)
    assert (told.offset, told.others_count) == (1, 3)
    assert [each.offset for each in told.others] == [2, 5, 3]


def test_error_of_another_message_is_cut_and_that_of_the_oldest_is_not():
    failing = FailingMessages()
    for offset in range(2):
        message = Message("s", A, b"", offset, PARTITION_ID, 0)
        failing.record(message, Failure("E", "x" * 1_000, "till", 1, 1), is_own=True)
    told = failing.oldest(HandledOffsets())
    assert len(told.text) == 1_000
    assert [len(each.text) for each in told.others] == [200]


def test_handled_message_is_named_no_more():
    steps = Steps(A, B)
    steps.pull(2)
    steps.want(2)
    fail(steps, 0)
    assert named(steps).offset == 0
    steps.step(WorkWanted(2), after_ms=100)
    steps.handle(0)
    assert named(steps) is None


def test_parked_message_is_named_no_more():
    steps = Steps(A, on_failure="park", tries_max=2)
    steps.pull(1)
    steps.want()
    fail(steps, 0)
    assert named(steps).offset == 0
    steps.step(WorkWanted(1), after_ms=100)
    fail(steps, 0)
    assert named(steps, after_ms=10_000) is None


def test_hanging_message_is_named_soon_and_its_time_with_later_requests():
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    hang_on(steps, 0, running_ms=10_000)
    told = named(steps)
    assert (told.offset, told.running_ms, told.attempts, told.since_ms) == (0, 10_000, 0, 10_000)
    hang_on(steps, 0, running_ms=11_000, at_ms=21_000)
    assert steps.ready.wait_until_ms == steps.now_ms + 10_000, "a third of the ttl: no request more"
    told = named(steps, after_ms=10_000)
    assert (told.running_ms, told.since_ms) == (11_000, 10_000)


def test_message_that_hung_and_then_failed_waits():
    steps = Steps(A)
    steps.pull(1)
    steps.want()
    hang_on(steps, 0, running_ms=10_000)
    fail(steps, 0)
    told = named(steps)
    assert (told.running_ms, told.kind, told.since_ms) == (None, "ValueError", 10_000)


def test_hang_of_a_message_that_has_ended_says_nothing():
    steps = Steps(A)
    steps.pull(1)
    message = steps.step(WorkWanted(1)).hand_out[0]
    steps.handle(0)
    steps.step(MessageHangs(message, hang(20_000), 10_000))
    assert named(steps) is None


def test_try_that_fails_while_its_handler_goes_on_is_counted_once():
    """In a thread, which cannot be cancelled: the next owner counts on."""
    steps = Steps(A)
    steps.pull(1)
    message = steps.step(WorkWanted(1)).hand_out[0]
    steps.step(MessageHangs(message, hang(20_000, attempts=1), 10_000, is_failed_try=True))
    steps.step(Tick(), after_ms=20)
    [ack] = steps.requested(Ack)
    assert ack.failed == ((0, 1),)
    steps.ack()
    fail(steps, 0)
    steps.step(Tick(), after_ms=20)
    assert steps.requested(Ack)[0].failed == ((0, 1),)


def test_try_of_a_message_that_is_acked_before_is_not_counted_while_its_handler_goes_on():
    steps = Steps(A, ack="before")
    steps.pull(1)
    steps.want()
    [message] = steps.ack(1).hand_out
    steps.step(MessageHangs(message, hang(20_000, attempts=1), 10_000, is_failed_try=True))
    assert steps.requested(Ack)[0].failed == ()


def test_try_of_a_redriven_message_is_not_counted_as_one_of_an_offset_of_this_partition():
    steps = Steps(*[A] * 9)
    redriven = redrive(steps, b"c", 7)
    steps.step(MessageHangs(redriven, hang(20_000, attempts=1), 10_000, is_failed_try=True))
    steps.step(Tick(), after_ms=20)
    assert steps.requested(Ack)[0].failed == ()


def test_message_acked_before_its_handler_is_named_while_it_hangs():
    steps = Steps(A, ack="before")
    steps.pull(1)
    steps.want()
    steps.ack(1)
    hang_on(steps, 0, running_ms=10_000)
    assert steps.requested(Ack)[0].failing.offset == 0
    steps.ack(1)
    steps.handle(0)
    assert steps.requested(Ack)[0].failing is None


def test_message_whose_process_ended_is_named_while_it_is_handled_alone():
    steps = Steps(A, acquired=Acquired(0, (), 1, False, begun=((0, 1),)))
    steps.pull(1)
    steps.want()
    told = named(steps)
    assert (told.offset, told.attempts) == (0, 1)


def test_redriven_message_is_named_only_if_no_other_fails():
    steps = Steps(A, B)
    steps.pull(2)
    steps.want(2)
    redriven = redrive(steps, b"c", 7)
    steps.step(MessageFailed(redriven, failure()))
    told = named(steps)
    assert (told.source, told.offset) == (4, 7)
    fail(steps, 1)
    assert (named(steps).source, named(steps, after_ms=10_000).offset) == (None, 1)


def test_redriven_message_is_named_since_its_first_failure():
    steps = Steps(A)
    steps.pull(1)
    redriven = redrive(steps, b"c", 7)
    steps.step(MessageFailed(redriven, failure()))
    named(steps)
    assert steps.step(WorkWanted(1), after_ms=100).hand_out[-1:] == [redriven]
    steps.step(MessageFailed(redriven, failure(at_ms=9_000, attempts=2)))
    told = named(steps)
    assert (told.source, told.since_ms, told.attempts) == (4, FAILED_AT_MS, 2)


def test_failures_of_a_limited_number_of_messages_are_kept():
    """Those that came first: what is named is the oldest of them."""
    failing = FailingMessages()
    for offset in (*range(10, 10 + FAILING_COUNTED_MAX), 3):
        message = Message("s", A, b"", offset, PARTITION_ID, 0)
        failing.record(message, failure(), is_own=True)
    told = failing.oldest(HandledOffsets())
    assert (told.offset, told.others_count) == (10, FAILING_COUNTED_MAX - 1)


def test_redriven_message_is_named_no_more_once_it_is_handled():
    steps = Steps(A)
    steps.pull(1)
    redriven = redrive(steps, b"c", 7)
    steps.step(MessageHangs(redriven, hang(20_000), 10_000))
    assert named(steps).source == 4
    steps.step(MessagesHandled([redriven]))
    assert named(steps, after_ms=10_000) is None


def test_cancelled_message_is_not_named_by_the_last_ack():
    steps = Steps(A, B)
    steps.pull(2)
    messages = steps.step(WorkWanted(2)).hand_out
    hang_on(steps, 1, running_ms=10_000)
    assert named(steps).offset == 1
    steps.step(Stopped(0))
    steps.step(MessagesReturned(messages[1:]))
    steps.handle(0)
    assert steps.requested(Ack)[0].failing is None


def redrive(steps: Steps, key: bytes, offset: int) -> Message:
    """Have a message of another partition redriven, and begin it."""
    steps.step(OperatorChanged(1))
    steps.step(KeysListed(1, [ParkedKeyRow(key, ParkState.REDRIVING, 1)]))
    [window] = steps.requested(ReadWindow)
    message = Message("s", key, b"", offset, 4, LEASE[3])
    steps.step(WindowRead(window.number, [message]))
    assert steps.step(WorkWanted(1)).hand_out == [message]
    return message

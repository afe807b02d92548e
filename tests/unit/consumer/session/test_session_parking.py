"""Parked keys, dead letters and retries of a session: what docs/PARKING.md promises."""

from keylane.consumer.session.events import (
    CallFailed,
    KeysListed,
    MessageFailed,
    MessagesHandled,
    Note,
    NoteKind,
    OperatorChanged,
    Pulled,
    ReadWindow,
    SendChanges,
    SettingsStored,
    Tick,
    WindowRead,
    WorkWanted,
)
from keylane.consumer.session.parking import (
    CHANGES_MAX,
    WAITING_MAX,
    PartitionAncestors,
    PartitionParking,
)
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import (
    InvalidRequestError,
    OverloadedError,
    Reason,
    UnreachableError,
)
from keylane.protocol.frames import Acquire, Acquired, ListParked, ParkedChanged, Pull
from keylane.protocol.message import Message
from keylane.protocol.parked import (
    PARKED_ROWS_MAX,
    Free,
    Park,
    ParkedKeyRow,
    ParkOrDeadLetter,
    ParkState,
    Shift,
    Unpark,
)
from support.session.partition_model import PARTITION_ID
from support.session.steps import FAILURE, Steps

A, B, NONE = b"a", b"b", b""
PARKS = {"on_failure": "park", "tries_max": 1}


def changes_of(steps: Steps) -> list[object]:
    return [change for sent in steps.requested(SendChanges) for change in sent.changes]


def message(key: bytes, offset: int, source: int = PARTITION_ID) -> Message:
    return Message("s", key, b"", offset, source, 0)


def redriving(*rows: tuple[bytes | int, int]) -> Steps:
    """A session whose partition has keys that an operator has chosen."""
    steps = Steps(A, A, A, B, acquired=Acquired(0, ((0, 2),), 4, False, (), 1), **PARKS)
    listed = [ParkedKeyRow(key, ParkState.REDRIVING, count) for key, count in rows]
    steps.step(KeysListed(1, listed))
    return steps


def test_key_is_parked_with_the_messages_that_wait_for_it():
    steps = Steps(A, B, A, A, **PARKS)
    steps.pull(3)
    assert steps.want(2) == [0, 1]
    assert steps.want() == []
    steps.fail(0)
    assert changes_of(steps) == [Park(A, ((0, 1), (2, 3)), FAILURE)]
    assert steps.session.intake.held == 1


def test_later_messages_of_a_parked_key_are_parked_when_their_batch_is_opened():
    steps = Steps(A, B, A, A, NONE, **PARKS)
    steps.pull(1, 4)
    steps.want()
    steps.fail(0)
    steps.step(ParkedChanged(1))
    assert steps.want(5) == [1, 4]
    assert changes_of(steps) == [Park(A, ((2, 4),), None)]


def test_message_without_a_key_becomes_a_dead_letter_in_place_of_a_parked_key():
    steps = Steps(NONE, **PARKS)
    steps.pull(1)
    steps.want()
    steps.fail(0)
    assert changes_of(steps) == [Park(None, ((0, 1),), FAILURE)]


def test_dead_letter_lets_its_key_continue():
    steps = Steps(A, A, on_failure="dead", tries_max=1)
    steps.pull(2)
    steps.want()
    steps.want()
    steps.fail(0)
    assert steps.want() == [1]


def test_policy_that_is_stored_while_a_message_waits_counts_from_its_next_failure():
    steps = Steps(A)
    steps.pull(1)
    for policy in ("block", "park", "block"):
        steps.step(SettingsStored(ConsumerSettings(on_failure=policy, tries_max=4)))
        assert steps.want() == [0]
        steps.fail(0, asked_ms=0)
        assert changes_of(steps) == []
        steps.now_ms += 1_000
    assert steps.want() == [0]
    steps.step(SettingsStored(ConsumerSettings(on_failure="park", tries_max=4)))
    steps.fail(0)
    assert changes_of(steps) == [Park(A, ((0, 1),), FAILURE)]


def test_message_is_retried_alone_when_its_pause_is_over():
    backoff = Backoff(first_ms=1_000, max_ms=1_000)
    steps = Steps(A, A, on_failure="retry", retry_backoff=backoff)
    steps.pull(2)
    steps.want()
    steps.fail(0)
    assert changes_of(steps) == [Park(1, ((0, 1),), FAILURE)]
    assert steps.want() == [1]
    steps.step(ParkedChanged(1))
    steps.step(Tick(), after_ms=1_000)
    [window] = steps.requested(ReadWindow)
    assert (window.key, window.ranges) == (1, ((0, 1),))
    steps.step(WindowRead(window.number, [message(A, 0)]))
    steps.handle(1)
    [again] = steps.step(WorkWanted(1)).hand_out
    assert (again.offset, again.attempt) == (0, 2)
    steps.fail(0)
    assert changes_of(steps) == [Shift(1, 2, PARTITION_ID, ((0, 1),), FAILURE)]


def test_redriven_key_is_handled_in_order_and_then_freed():
    steps = redriving((A, 2))
    [window] = steps.requested(ReadWindow)
    steps.step(WindowRead(window.number, [message(A, 0), message(A, 1)]))
    assert steps.want(2) == [0]
    assert steps.handle(0, wanted=1) == [1]
    assert changes_of(steps) == [Unpark(A, PARTITION_ID, ((0, 1),))]
    steps.step(ParkedChanged(1))
    steps.handle(1)
    assert not steps.requested(ReadWindow), "the last change is not stored yet"
    steps.step(ParkedChanged(1))
    [window] = steps.requested(ReadWindow)
    steps.step(WindowRead(window.number, []))
    assert changes_of(steps) == [Free(A)]


def test_key_is_freed_at_once_when_its_last_message_was_skipped():
    steps = redriving((A, 0))
    assert not steps.session.redrives
    assert changes_of(steps) == [Free(A)]
    steps.pull(4)
    assert steps.want(4) == [3]
    steps.step(ParkedChanged(1))
    assert steps.want(4) == [2]


def test_messages_that_come_while_a_key_is_freed_are_handed_out_after_it():
    steps = redriving((A, 1))
    steps.pull(4)
    [window] = list(steps.session.redrives.windows)
    steps.step(WindowRead(window, []))
    assert steps.want(4) == [3]
    steps.step(ParkedChanged(1))
    assert steps.want(4) == [2]


def test_redriven_key_whose_message_fails_is_parked_again():
    steps = redriving((A, 2))
    [window] = steps.requested(ReadWindow)
    steps.step(WindowRead(window.number, [message(A, 0), message(A, 1)]))
    steps.want()
    steps.fail(0)
    assert changes_of(steps) == [Park(A, (), FAILURE)]
    steps.step(ParkedChanged(1))
    assert steps.want() == []
    assert not steps.session.redrives


def test_redriven_dead_letter_that_fails_is_set_aside_alone():
    """Neither the dead letter after it nor a message that was pulled goes with it."""
    steps = Steps(A, B, **PARKS)
    steps.pull(2)
    steps.step(OperatorChanged(1))
    steps.step(KeysListed(1, [ParkedKeyRow(0, ParkState.REDRIVING, 2)]))
    [window] = steps.requested(ReadWindow)
    dead = [message(A, offset, source=4) for offset in (7, 8)]
    steps.step(WindowRead(window.number, dead))
    assert steps.step(WorkWanted(3)).hand_out[0] is dead[0]
    steps.step(MessageFailed(dead[0], FAILURE))
    [change] = changes_of(steps)
    assert (type(change), change.ranges) == (Shift, ((7, 8),))
    steps.step(ParkedChanged(1))
    assert steps.step(WorkWanted(3)).hand_out == [dead[1]]
    steps.step(MessagesHandled([dead[1]]))
    assert changes_of(steps) == [Unpark(0, 4, ((8, 9),))]
    assert steps.want(3) == [0]


def test_key_is_not_redriven_again_before_its_failure_is_stored():
    steps = redriving((A, 1))
    [window] = steps.requested(ReadWindow)
    steps.step(WindowRead(window.number, [message(A, 0)]))
    steps.want()
    steps.fail(0)
    steps.step(OperatorChanged(2))
    assert steps.requested(ListParked)
    steps.step(KeysListed(2, [ParkedKeyRow(A, ParkState.REDRIVING, 1)]))
    assert not steps.requested(ReadWindow)


def test_messages_removed_by_retention_are_given_up():
    steps = redriving((A, 1))
    [window] = steps.requested(ReadWindow)
    steps.step(WindowRead(window.number, [], [(PARTITION_ID, 0, 1)]))
    assert changes_of(steps) == [Unpark(A, PARTITION_ID, ((0, 1),))]


def test_key_is_parked_again_before_it_is_redriven_after_an_unclean_end():
    acquired = Acquired(0, ((0, 2),), 4, False, (), 1, unreleased=True)
    steps = Steps(A, A, A, B, acquired=acquired, **PARKS)
    rows = [ParkedKeyRow(key, ParkState.REDRIVING, 1) for key in (A, B)]
    steps.step(KeysListed(1, rows))
    [park] = changes_of(steps)
    assert (park.key, park.ranges, park.failure.kind, park.token) == (A, (), "crashed", 5)
    assert park.failure.attempts == 2, "that of the last owner, and this one"
    assert park.failure.text.endswith("while it was handled, 2 times")
    assert steps.ready.notes == (Note(NoteKind.PROTECTED, key=A),)
    assert not steps.requested(ReadWindow)
    steps.step(ParkedChanged(1))
    assert [each.key for each in steps.requested(ReadWindow)] == [A]


def test_changes_are_sent_again_in_order_until_they_are_stored():
    """What came meanwhile waits for the next request."""
    steps = Steps(A, A, B, **PARKS)
    steps.pull(1, 2)
    steps.want()
    steps.fail(0)
    [sent] = steps.requested(SendChanges)
    assert steps.want() == [2]
    assert not steps.requested(SendChanges), "one is in flight at a time"
    steps.step(CallFailed(sent, UnreachableError("no answer")))
    steps.step(Tick(), after_ms=2_000)
    assert changes_of(steps) == [Park(A, ((0, 1),), FAILURE)]
    steps.step(ParkedChanged(1))
    assert changes_of(steps) == [Park(A, ((1, 2),), None)]
    steps.step(ParkedChanged(1))
    assert not steps.session.parking


def test_messages_that_follow_a_parked_one_stop_no_redrive():
    """They may come all the time: a redrive that waited for them would never begin."""
    steps = Steps(A, A, **PARKS)
    steps.pull(1, 1)
    steps.want()
    steps.fail(0)
    steps.step(ParkedChanged(1))
    steps.want()
    assert changes_of(steps) == [Park(A, ((1, 2),), None)]
    steps.step(OperatorChanged(2))
    steps.step(KeysListed(2, [ParkedKeyRow(A, ParkState.REDRIVING, 1)]))
    assert [window.key for window in steps.requested(ReadWindow)] == [A]


def test_dead_letters_that_fail_anew_stop_no_redrive_of_others():
    """They fail all the time, each for itself."""
    steps = Steps(NONE, **PARKS)
    steps.pull(1)
    steps.want()
    steps.fail(0)
    assert changes_of(steps) == [Park(None, ((0, 1),), FAILURE)]
    steps.step(OperatorChanged(2))
    steps.step(KeysListed(2, [ParkedKeyRow(None, ParkState.REDRIVING, 1)]))
    assert [window.key for window in steps.requested(ReadWindow)] == [None]


def test_request_has_a_limited_number_of_changes_and_rows():
    """The messages of a key come in several requests, in their order."""
    parking = PartitionParking(None, PartitionAncestors(exist=False))
    for number in range(CHANGES_MAX + 1):
        parking.free(b"%d" % number)
    assert len(parking.take(may_die=False)) == CHANGES_MAX
    parking.confirm()
    parking.park(A, list(range(0, 4 * PARKED_ROWS_MAX, 2)), FAILURE)
    assert [type(change) for change in parking.take(may_die=False)] == [Free, Park]
    parking.confirm()
    [second] = parking.take(may_die=False)
    assert (second.ranges[0][0], second.failure) == (2 * PARKED_ROWS_MAX, None)
    assert parking.messages == PARKED_ROWS_MAX


def test_full_broker_gets_what_makes_room_and_keeps_the_messages_of_a_key_in_order():
    parking = PartitionParking(None, PartitionAncestors(exist=False))
    parking.park(A, [1], FAILURE)
    parking.park(B, [2], None)
    parking.park(A, [3], None)
    assert len(parking.take(may_die=False)) == 3
    assert parking.refuse()
    parking.add(Unpark(b"c", 7, ((0, 1),)))
    assert parking.take(may_die=False) == [Unpark(b"c", 7, ((0, 1),))]
    parking.confirm()
    assert parking.take(may_die=False) == [Park(A, ((1, 2),), FAILURE)]
    parking.refuse()
    assert parking.take(may_die=False) == [Park(B, ((2, 3),), None)]
    parking.confirm()
    assert not parking.is_full
    both = [Park(A, ((1, 2),), FAILURE), Park(A, ((3, 4),), None)]
    assert parking.take(may_die=False) == both


def test_pulls_wait_while_many_messages_wait_to_be_parked():
    count = WAITING_MAX + 1
    steps = Steps(*[A] * count, buffer_messages=2 * count, **PARKS)
    steps.pull(count)
    steps.want()
    steps.fail(0)
    steps.step(Pulled([], count, count))
    assert not steps.requested(Pull)
    while steps.session.parking:
        steps.step(ParkedChanged(1))
    assert steps.session.calls.pull.is_in_flight


def test_key_that_is_chosen_after_an_unclean_end_counts_one_try_before_it_begins():
    """The last owner did not have it."""
    acquired = Acquired(0, ((0, 2),), 4, False, (), unreleased=True)
    steps = Steps(A, A, A, B, acquired=acquired, **PARKS)
    steps.step(OperatorChanged(1))
    steps.step(KeysListed(1, [ParkedKeyRow(A, ParkState.REDRIVING, 1)]))
    [park] = changes_of(steps)
    assert park.failure.attempts == 1
    assert park.failure.text.endswith("while it was handled, 1 time")


def test_full_broker_gets_one_park_at_a_time():
    steps = Steps(A, B, **PARKS)
    steps.pull(2)
    steps.want(2)
    steps.fail(0)
    [sent] = steps.requested(SendChanges)
    steps.fail(1)
    steps.step(CallFailed(sent, OverloadedError(Reason.PARK_FULL, "full")))
    assert changes_of(steps) == [Park(A, ((0, 1),), FAILURE)]
    [sent] = steps.requested(SendChanges)
    steps.step(CallFailed(sent, OverloadedError(Reason.PARK_FULL, "full")))
    steps.step(Tick(), after_ms=2_000)
    assert changes_of(steps) == [Park(B, ((1, 2),), FAILURE)]


def test_full_broker_makes_dead_keys_when_the_policy_says_so():
    steps = Steps(A, on_full="dead", **PARKS)
    steps.pull(1)
    steps.want()
    steps.fail(0)
    assert changes_of(steps) == [ParkOrDeadLetter(A, ((0, 1),), FAILURE)]


def test_key_that_the_broker_does_not_know_is_parked_with_its_failure():
    """Retention had removed the message that failed, so the broker has parked nothing."""
    steps = Steps(A, A, **PARKS)
    steps.pull(1, 1)
    steps.want()
    steps.fail(0)
    steps.step(ParkedChanged(0))
    assert steps.want() == []
    [sent] = steps.requested(SendChanges)
    steps.step(CallFailed(sent, InvalidRequestError("the key is not parked")))
    assert changes_of(steps) == [Park(A, ((1, 2),), FAILURE)]


def test_consumer_that_cannot_redrive_leaves_keys_parked():
    steps = redriving()
    steps.session.redrives.is_allowed = False
    steps.step(KeysListed(2, [ParkedKeyRow(A, ParkState.REDRIVING, 1)]))
    assert not steps.requested(ReadWindow)
    assert steps.ready.notes


def unreleased(*aside: tuple[int, int, int, int]) -> Steps:
    """A session after an unclean end, with messages that wait for a retry."""
    acquired = Acquired(0, ((0, 3),), 4, False, (), 1, unreleased=True)
    steps = Steps(A, A, A, B, acquired=acquired, on_failure="retry")
    steps.step(KeysListed(1, [], aside))
    return steps


def test_retry_after_an_unclean_end_begins_when_that_is_stored_and_alone():
    steps = unreleased((2, PARTITION_ID, 0, 2))
    assert changes_of(steps) == [Shift(2, -3, PARTITION_ID, ((0, 1),))]
    assert not steps.requested(ReadWindow)
    steps.step(ParkedChanged(1))
    [window] = steps.requested(ReadWindow)
    assert (window.key, window.ranges) == (-3, ((0, 1),))
    steps.step(WindowRead(window.number, [message(A, 0)]))
    [again] = steps.step(WorkWanted(1)).hand_out
    assert again.attempt == 3
    steps.handle(0)
    assert changes_of(steps) == [Unpark(-3, PARTITION_ID, ((0, 1),))]
    steps.step(ParkedChanged(1))
    assert changes_of(steps) == [Shift(2, -3, PARTITION_ID, ((1, 2),))]


def test_retry_that_had_begun_at_an_unclean_end_becomes_a_dead_letter():
    steps = unreleased((-3, PARTITION_ID, 0, 1))
    [shift] = changes_of(steps)
    assert (shift.key, shift.to, shift.ranges) == (-3, None, ((0, 1),))
    assert (shift.failure.kind, shift.failure.attempts) == ("crashed", 3)


def test_dead_letters_chosen_before_an_unclean_end_stay_dead():
    acquired = Acquired(0, ((0, 2),), 4, False, (), 1, unreleased=True)
    steps = Steps(A, A, A, B, acquired=acquired, **PARKS)
    steps.step(KeysListed(1, [ParkedKeyRow(0, ParkState.REDRIVING, 1)]))
    [window] = steps.requested(ReadWindow)
    steps.step(WindowRead(window.number, [message(A, 0)]))
    assert changes_of(steps) == [Shift(0, None, PARTITION_ID, ((0, 1),))]
    assert steps.want() == []


def test_parked_keys_are_listed_again_when_the_partition_is_acquired_again():
    """A broker that was restarted counts the versions of its list anew."""
    steps = Steps(A, acquired=Acquired(0, (), 1, False, (), 7))
    steps.step(KeysListed(7, []))
    steps.step(CallFailed(steps.requested(Pull)[0], UnreachableError("the broker is gone")))
    assert steps.requested(Acquire)
    steps.step(Acquired(0, (), 1, False, (), 1))
    assert steps.requested(ListParked)
    assert steps.session.tenure.is_acquired
    steps.step(KeysListed(1, []))
    assert not steps.requested(ListParked)

"""How ancestors learn that none of their parked messages is needed any more."""

import random

from keylane.consumer.session.events import (
    AncestorLeft,
    CallFailed,
    KeysListed,
    LeaseGranted,
    LeaveAncestor,
    MessageFailed,
    MessagesHandled,
    ReadWindow,
    SendChanges,
    Stopped,
    Tick,
    WindowRead,
    WorkWanted,
)
from keylane.consumer.session.state import PartitionSession
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.errors import FencedError, UnreachableError
from keylane.protocol.frames import Acquired, ListParked, ParkedChanged
from keylane.protocol.message import Message
from keylane.protocol.parked import AncestorNotified, FailAgain, Park, ParkedKeyRow, ParkState
from support.session.partition_model import PARTITION_ID
from support.session.steps import FAILURE, LEASE, LEASE_MS, Steps

GRANDPARENT, PARENT = 3, 4
KEY = b"a"


def child(
    *unneeded: int,
    key: bytes | None = KEY,
    aside: tuple[tuple[int, int, int, int], ...] = (),
    has_ancestors: bool = True,
    **settings: object,
) -> Steps:
    """A session of a partition with parents, after its first list of parked keys."""
    steps = Steps()
    steps.session = PartitionSession(
        LEASE, ConsumerSettings(**settings), random.Random(1), has_ancestors=has_ancestors
    )
    steps.step(LeaseGranted(steps.now_ms + LEASE_MS))
    steps.step(Acquired(0, (), 0, False, (), 1))
    rows = [] if aside else [ParkedKeyRow(key, ParkState.REDRIVING, 1)]
    steps.step(KeysListed(1, rows, aside, unneeded))
    return steps


def read(steps: Steps, *offsets: int, source: int = PARENT) -> list[Message]:
    """Messages of the window that is asked for are here, and workers have them."""
    [window] = steps.requested(ReadWindow)
    messages = [Message("s", b"", b"", offset, source, 0) for offset in offsets]
    steps.step(WindowRead(window.number, messages))
    for message in messages:
        assert steps.step(WorkWanted(1)).hand_out == [message]
    return messages


def free_key(steps: Steps) -> None:
    """The last message of the parked key is handled."""
    [window] = steps.requested(ReadWindow)
    steps.step(WindowRead(window.number, []))
    steps.step(ParkedChanged(1))


def left(steps: Steps) -> list[int]:
    """The ancestors that the last step has told."""
    return [request.source for request in steps.requested(LeaveAncestor)]


def changes_of(steps: Steps) -> list[object]:
    return [change for sent in steps.requested(SendChanges) for change in sent.changes]


def test_ancestor_is_told_when_its_last_key_is_free():
    steps = child()
    assert left(steps) == []
    free_key(steps)
    assert steps.requested(ListParked)
    steps.step(KeysListed(1, [], (), (PARENT,)))
    assert left(steps) == [PARENT]
    steps.step(AncestorLeft(PARENT))
    assert changes_of(steps) == [AncestorNotified(PARENT)]


def test_ancestor_is_told_when_its_last_dead_letter_is_handled():
    """No key is freed by that, and its segments would be kept until the next owner asks."""
    steps = child(key=None)
    steps.step(MessagesHandled(read(steps, 7)))
    steps.step(ParkedChanged(1))
    assert not steps.requested(ListParked)
    read(steps)
    assert steps.requested(ListParked)
    steps.step(KeysListed(1, [], (), (PARENT,)))
    assert left(steps) == [PARENT]


def test_ancestor_is_told_when_its_last_dead_letter_is_removed_by_retention():
    steps = child(key=None)
    [window] = steps.requested(ReadWindow)
    steps.step(WindowRead(window.number, [], [(PARENT, 7, 8)]))
    steps.step(ParkedChanged(1))
    read(steps)
    assert steps.requested(ListParked)


def test_keys_are_listed_when_the_failure_of_another_dead_letter_is_stored():
    """Before, the list would have the dead letters redriven once more."""
    steps = child(key=None, on_failure="park", tries_max=1)
    [own] = read(steps, 6, source=PARTITION_ID)
    steps.step(MessageFailed(own, FAILURE))
    assert [type(change) for change in changes_of(steps)] == [FailAgain]
    steps.step(ParkedChanged(1))
    assert [type(change) for change in changes_of(steps)] == [Park]
    assert not steps.requested(ListParked)
    steps.step(ParkedChanged(1))
    assert steps.requested(ListParked)


def test_ancestor_is_told_when_its_last_retry_is_handled():
    steps = child(aside=((1, PARENT, 5, 6), (2, PARENT, 7, 8)), on_failure="retry")
    first, second = steps.requested(ReadWindow)
    messages = [Message("s", b"", b"", offset, PARENT, 0) for offset in (5, 7)]
    steps.step(WindowRead(first.number, messages[:1]))
    steps.step(WindowRead(second.number, messages[1:]))
    steps.step(WorkWanted(2))
    steps.step(MessagesHandled(messages[:1]))
    steps.step(ParkedChanged(1))
    assert not steps.requested(ListParked), "another one is retried"
    steps.step(MessagesHandled(messages[1:]))
    assert not steps.requested(ListParked), "that is not stored"
    steps.step(ParkedChanged(1))
    assert steps.requested(ListParked)


def test_keys_are_not_listed_when_a_retry_waits_for_its_next_try():
    steps = child(aside=((1, PARENT, 5, 6),), on_failure="retry")
    [message] = read(steps, 5)
    steps.step(MessageFailed(message, FAILURE))
    steps.step(ParkedChanged(1))
    assert not steps.requested(ListParked)


def test_keys_are_not_listed_for_retries_that_no_ancestor_keeps():
    steps = child(aside=((1, PARTITION_ID, 5, 6),), on_failure="retry")
    steps.step(MessagesHandled(read(steps, 5, source=PARTITION_ID)))
    steps.step(ParkedChanged(1))
    assert not steps.requested(ListParked)


def test_keys_are_not_listed_for_the_sake_of_ancestors_that_do_not_exist():
    steps = child(has_ancestors=False)
    free_key(steps)
    assert not steps.requested(ListParked)


def test_keys_are_listed_again_when_that_list_has_failed():
    steps = child()
    free_key(steps)
    [request] = steps.requested(ListParked)
    steps.step(CallFailed(request, UnreachableError("no answer")))
    steps.step(Tick(), after_ms=2_000)
    assert steps.requested(ListParked)


def test_ancestors_that_an_earlier_owner_did_not_tell_are_told_at_the_beginning():
    steps = child(GRANDPARENT, PARENT)
    assert left(steps) == [GRANDPARENT]
    steps.step(AncestorLeft(GRANDPARENT))
    assert left(steps) == [PARENT], "one after the other"


def test_ancestor_that_does_not_answer_is_told_again():
    steps = child(PARENT)
    [request] = steps.requested(LeaveAncestor)
    steps.step(CallFailed(request, UnreachableError("no answer")))
    assert left(steps) == []
    assert changes_of(steps) == []
    steps.step(Tick(), after_ms=2_000)
    assert left(steps) == [PARENT]


def test_ancestor_that_was_reset_keeps_its_messages_and_the_partition_goes_on():
    steps = child(PARENT)
    [request] = steps.requested(LeaveAncestor)
    steps.step(CallFailed(request, FencedError(token=5, current_token=9)))
    assert steps.session.tenure.fence is None
    assert changes_of(steps) == []
    free_key_of_second_list(steps)
    assert left(steps) == [PARENT], "named again, told again"


def free_key_of_second_list(steps: Steps) -> None:
    window = next(iter(steps.session.redrives.windows))
    steps.step(WindowRead(window, []))
    steps.step(ParkedChanged(1))
    steps.step(KeysListed(1, [], (), (PARENT,)))


def test_ancestor_is_told_once_though_a_list_still_names_it():
    steps = child(PARENT)
    steps.step(AncestorLeft(PARENT))
    free_key_of_second_list(steps)
    assert left(steps) == []


def test_answer_of_an_ancestor_during_the_hand_over_is_left_to_the_next_owner():
    steps = child(PARENT)
    steps.step(Stopped(500))
    steps.step(AncestorLeft(PARENT))
    assert changes_of(steps) == []

"""The changes of parked messages that a broker does not have yet."""

from __future__ import annotations

import pytest

from keylane.consumer.parking.park_queue import CHANGES_MAX, ParkQueue
from keylane.protocol.parked import PARKED_ROWS_MAX, Failure, Free, Park, Unpark

FAILURE = Failure("ValueError", "no", "c", 1, 3)


def nothing() -> None:
    pass


def test_change_stays_until_it_is_confirmed():
    """A failed request is sent again; what came meanwhile waits for the next one."""
    queue = ParkQueue()
    queue.park(b"a", [3, 4, 9], FAILURE)
    assert queue.take() == [Park(b"a", ((3, 5), (9, 10)), FAILURE)]
    queue.park(b"a", [11], None)
    assert queue.take() == [Park(b"a", ((3, 5), (9, 10)), FAILURE)]
    assert (queue.messages, queue.has_parks_of(b"a"), queue.has_parks_of(b"b")) == (4, True, False)
    queue.confirm()
    assert queue.take() == [Park(b"a", ((11, 12),), None)]
    queue.confirm()
    assert (bool(queue), queue.messages, queue.has_parks_of(b"a")) == (False, 0, False)


def test_only_a_failed_message_that_waits_stops_a_redrive():
    """Messages that follow a parked one may come all the time: a redrive that waited for them would
    never begin.
    """
    queue = ParkQueue()
    queue.park(b"a", [3], None)
    assert (queue.has_parks_of(b"a"), queue.ends_redrive(b"a")) == (True, False)
    queue.park(b"a", [4], FAILURE)
    queue.take()
    assert (queue.ends_redrive(b"a"), queue.ends_redrive(b"b")) == (True, False)
    queue.confirm()
    assert not queue.ends_redrive(b"a")


@pytest.mark.parametrize("key", [None, b""])
def test_only_a_redriven_message_that_failed_stops_a_redrive_of_loose_ones(key: bytes | None):
    """Others fail all the time, each for itself."""
    queue = ParkQueue()
    queue.park(key, [4], FAILURE)
    assert not queue.ends_redrive(key)
    queue.park(key, [], FAILURE)
    assert queue.ends_redrive(key)


def test_callback_is_called_when_its_change_is_durable():
    queue, called = ParkQueue(), []
    queue.unpark(b"a", 7, 1, 2, lambda: called.append("handled"))
    queue.release_key(b"a", lambda: called.append("free"))
    assert queue.take() == [Unpark(b"a", 7, ((1, 2),)), Free(b"a")]
    assert not called
    queue.confirm()
    assert called == ["handled", "free"]


def test_request_is_limited():
    """In changes, and in rows: the messages of a key come in several requests, in their order."""
    queue = ParkQueue()
    for number in range(CHANGES_MAX + 1):
        queue.release_key(b"%d" % number, nothing)
    assert len(queue.take()) == CHANGES_MAX
    queue.confirm()
    queue.park(b"a", list(range(0, 4 * PARKED_ROWS_MAX, 2)), FAILURE)
    first = queue.take()
    assert [type(change) for change in first] == [Free, Park]
    queue.confirm()
    (second,) = queue.take()
    assert isinstance(second, Park)
    assert (second.ranges[0][0], second.failure) == (2 * PARKED_ROWS_MAX, None)


def test_full_broker_gets_what_makes_room_and_one_key_at_a_time():
    """A key that is refused alone goes to the end; its later messages stay behind it."""
    queue = ParkQueue()
    queue.park(b"a", [1], FAILURE)
    queue.park(b"b", [2], None)
    queue.park(b"a", [3], None)
    assert len(queue.take()) == 3
    queue.requeue_parks()
    queue.unpark(b"c", 7, 0, 1, nothing)
    assert [type(change) for change in queue.take()] == [Unpark]
    queue.confirm()
    assert queue.take() == [Park(b"a", ((1, 2),), FAILURE)]
    queue.requeue_parks()
    assert queue.take() == [Park(b"b", ((2, 3),), None)]
    queue.confirm()
    assert not queue.full
    assert queue.take() == [Park(b"a", ((1, 2),), FAILURE), Park(b"a", ((3, 4),), None)]


def test_queue_is_long_when_a_request_is_full():
    """Then it is sent without a wait for others."""
    queue = ParkQueue()
    for offset in range(CHANGES_MAX):
        assert not queue.is_long
        queue.park(b"a", [2 * offset], None)
    assert queue.is_long
    queue.take()
    assert not queue.is_long
    assert queue.messages == CHANGES_MAX
    queue.confirm()
    assert queue.messages == 0

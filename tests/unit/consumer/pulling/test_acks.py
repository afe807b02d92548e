"""The queue of handled offsets."""

from keylane.consumer.pulling.acks import RANGES_PER_REQUEST, AckQueue, ranges_of
from keylane.protocol.message import Message
from keylane.protocol.offsets import IntervalSet


def test_offsets_handled_in_order_are_one_range():
    """A contiguous run is sent as one range."""
    queue = AckQueue()
    for offset in range(10, 20):
        queue.mark_handled(offset)
    assert queue.take() == ((10, 20),)


def test_offsets_handled_out_of_order_are_joined():
    """Ranges are sorted and joined before they are sent."""
    queue = AckQueue()
    for offset in (5, 3, 4, 9, 8, 1):
        queue.mark_handled(offset)
    assert queue.take() == ((1, 2), (3, 6), (8, 10))


def test_range_stays_queued_until_it_is_confirmed():
    """A failed request is repeated, together with offsets handled meanwhile."""
    queue = AckQueue()
    queue.mark_handled(3)
    assert queue.take() == ((3, 4),)
    queue.mark_handled(1)
    assert queue.take() == ((1, 2), (3, 4))
    queue.confirm()
    assert not queue
    assert queue.take() == ()


def test_request_has_a_limited_number_of_ranges():
    """However scattered the handled offsets are, one request carries RANGES_PER_REQUEST at most."""
    queue = AckQueue()
    for offset in range(0, 2 * (RANGES_PER_REQUEST + 5), 2):
        queue.mark_handled(offset)
    assert len(queue.take()) == RANGES_PER_REQUEST
    queue.confirm()
    assert len(queue.take()) == 5


def test_refusal_halves_the_request_until_one_range_is_left():
    """The lowest ranges go first; a single refused range waits until more is handled."""
    queue = AckQueue()
    for offset in (3, 5, 7, 9, 11):
        queue.mark_handled(offset)
    assert len(queue.take()) == 5
    assert queue.shrink_request()
    assert queue.take() == ((3, 4), (5, 6))
    assert queue.shrink_request()
    assert queue.take() == ((3, 4),)
    assert not queue.shrink_request()
    queue.mark_handled(2)
    assert queue.take() == ((2, 4),)


def test_requests_grow_again_after_a_refusal():
    """The limit counts until the broker has taken everything; each confirmed request doubles the
    next one.
    """
    queue = AckQueue()
    for offset in range(1, 17, 2):
        queue.mark_handled(offset)
    queue.take()
    queue.shrink_request()
    sizes = []
    while queue:
        assert queue.at_range_limit
        sizes.append(len(queue.take()))
        queue.confirm()
    assert sizes == [4, 4]
    assert not queue.at_range_limit
    for offset in range(101, 141, 2):
        queue.mark_handled(offset)
    assert len(queue.take()) == 16


def test_ranges_are_those_of_the_messages_offsets():
    for offsets in ([4], [1, 2, 3], [1, 2, 4], [0, 2, 4, 6, 7], [0, 1, 2, 3, 4, 9, 10, 99]):
        messages = [Message("s", b"", b"", offset, 1, 0) for offset in offsets]
        ranges = ranges_of(messages)
        assert ranges == list(IntervalSet((offset, offset + 1) for offset in offsets))


def test_single_range_is_sent_again_with_others_when_its_request_failed():
    """What was handled meanwhile is joined to it."""
    queue = AckQueue()
    queue.mark_range_handled(0, 5)
    assert queue.take() == ((0, 5),)
    assert not queue.is_partial
    queue.mark_handled(5)
    queue.mark_handled(9)
    assert queue.take() == ((0, 6), (9, 10))
    queue.confirm()
    queue.mark_handled(10)
    assert queue.take() == ((10, 11),)
    queue.confirm()
    assert not queue

"""The queue of handled offsets."""

from keylane.consumer.acks import RANGES_PER_REQUEST, AckQueue


def test_handled_in_order_is_one_range():
    """A contiguous run is sent as one range."""
    queue = AckQueue()
    for offset in range(10, 20):
        queue.done(offset)
    assert queue.take() == ((10, 20),)


def test_handled_out_of_order_is_joined():
    """Ranges are sorted and joined before they are sent."""
    queue = AckQueue()
    for offset in (5, 3, 4, 9, 8, 1):
        queue.done(offset)
    assert queue.take() == ((1, 2), (3, 6), (8, 10))


def test_nothing_leaves_before_it_is_confirmed():
    """A failed request is repeated with the same ranges; later ones wait for the next."""
    queue = AckQueue()
    queue.done(0)
    assert queue.take() == ((0, 1),)
    queue.done(1)
    assert queue.take() == ((0, 1),)
    queue.confirmed()
    assert queue.take() == ((1, 2),)
    queue.confirmed()
    assert not queue
    assert queue.take() == ()


def test_a_request_is_bounded():
    """However scattered the handled offsets are, one request carries so many ranges and no more."""
    queue = AckQueue()
    for offset in range(0, 2 * (RANGES_PER_REQUEST + 5), 2):
        queue.done(offset)
    assert len(queue.take()) == RANGES_PER_REQUEST
    queue.confirmed()
    assert len(queue.take()) == 5

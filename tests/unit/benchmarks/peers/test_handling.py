"""What consumers of the comparison do with messages: each is touched, and the first and the last
are timed.
"""

import time

import pytest
from peers.systems.base import FIRST, Handling, StampedHandling, decode_message, encode_message

KEY = b"key-00001"


def test_handling_times_the_first_and_the_last_message():
    handling = Handling(3, 2)
    handling.message(KEY, FIRST)
    first_at = handling.first_at
    handling.message(KEY, b"ab")
    assert (handling.remaining, handling.last_at) == (1, 0.0)
    handling.message(KEY, b"ab")
    assert handling.remaining == 0
    assert handling.last_at >= handling.first_at == first_at > 0


@pytest.mark.parametrize(("key", "value"), [(b"x", b"ab"), (KEY, b"abc")])
def test_handling_refuses_a_message_that_was_not_sent(key, value):
    with pytest.raises(AssertionError):
        Handling(1, 2).message(key, value)


def test_handling_counts_batches_by_column():
    handling = Handling(5, 2)
    handling.count(4)
    assert handling.first_at > 0 == handling.last_at
    handling.count(4)  # a batch may have more than was asked for
    assert handling.remaining < 0 < handling.last_at


def test_stamped_handling_measures_from_the_send():
    handling = StampedHandling(2, 8)
    handling.message(KEY, FIRST)
    handling.message(KEY, (time.monotonic_ns() - 5_000_000).to_bytes(8, "little"))
    assert len(handling.took_ms) == 1
    assert 5 <= handling.took_ms[0] < 1_000


def test_key_and_value_come_back_when_framed_in_one_body():
    assert decode_message(encode_message(KEY, b"value")) == (KEY, b"value")
    assert decode_message(encode_message(b"", b"")) == (b"", b"")

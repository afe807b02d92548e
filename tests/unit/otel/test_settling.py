"""Spans that are kept until their messages are acked."""

from typing import Any

import pytest
from opentelemetry.trace import SpanContext

from keylane.otel.settling import FOLLOWED_MAX, FollowedMessages
from keylane.protocol.message import Delivery, Message


class Shell:
    """Takes acks, as the shell of a partition does."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nobody calls {name}")


def new_delivery() -> Delivery:
    return Delivery("orders", 0, 0, None, "billing", "c", 1, shell=Shell())


def context(number: int) -> SpanContext:
    return SpanContext(1, number + 1, is_remote=False)


def add(followed: FollowedMessages, delivery: Delivery, *offsets: int) -> None:
    for offset in offsets:
        message = Message("orders", b"", b"", offset, 1, 0, delivery=delivery)
        followed.add([message], context(offset))


@pytest.mark.parametrize(
    ("ranges", "taken"),
    [
        (((0, 3),), [0, 1, 2]),
        (((0, 1), (2, 3), (9, 12)), [0, 2, 9]),
        (((3, 9),), []),
        (((0, 100),), [0, 1, 2, 9]),
    ],
)
def test_spans_of_acked_offsets_are_taken_once(ranges, taken):
    followed, delivery = FollowedMessages(), new_delivery()
    add(followed, delivery, 0, 1, 2, 9)
    assert followed.take(delivery, ranges) == [context(offset) for offset in taken]
    assert followed.take(delivery, ranges) == []
    left = [context(offset) for offset in (0, 1, 2, 9) if offset not in taken]
    assert followed.take(delivery, ((0, 100),)) == left


def test_partitions_are_kept_apart():
    followed, first, second = FollowedMessages(), new_delivery(), new_delivery()
    add(followed, first, 0)
    add(followed, second, 1)
    assert followed.take(second, ((0, 10),)) == [context(1)]
    assert followed.take(first, ((0, 10),)) == [context(0)]


def test_oldest_span_is_forgotten_at_the_limit():
    followed, delivery = FollowedMessages(), new_delivery()
    add(followed, delivery, *range(FOLLOWED_MAX + 5))
    assert len(followed.take(delivery, ((0, FOLLOWED_MAX + 5),))) == FOLLOWED_MAX


def test_message_that_nobody_acks_is_not_kept():
    followed, read = FollowedMessages(), Delivery("orders", 0, 0, None)
    add(followed, read, 0)
    assert followed.take(read, ((0, 1),)) == []


def test_spans_of_a_partition_end_with_it():
    followed, delivery = FollowedMessages(), new_delivery()
    add(followed, delivery, 0)
    del delivery
    assert len(followed._spans) == 0

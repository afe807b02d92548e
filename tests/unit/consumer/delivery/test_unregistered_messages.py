"""Unregistered messages: they are acked as they were taken, or registered before anything else
happens to them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from keylane.consumer.delivery.user_acks import UserAcks
from keylane.consumer.handling.in_hand import UnackedMessages
from keylane.protocol.message import Message


class Own(UserAcks):
    """A delivery whose lease is valid."""

    reports_runs = True
    deadline_ns = 2**62
    acks_each, by_hand = False, True

    def __init__(self) -> None:
        super().__init__()
        self.client = self
        self.owner: Any = self
        self.handled: list[int] = []
        self.acked: list[int] = []

    def mark_handled(self, offset: int) -> None:
        self.handled.append(offset)

    def check_can_ack(self, _offset: int) -> None:
        """Accept every ack."""

    def release_acked_keys(self, messages: Any) -> None:
        self.acked += [message.offset for message in messages]


def arrived(delivery: Own, *keys: bytes) -> deque[Message]:
    return deque(
        Message("s", key, b"", offset, 1, 0, delivery=delivery)  # type: ignore[arg-type]
        for offset, key in enumerate(keys)
    )


def now_ns() -> int:
    return 0


async def test_message_in_hand_alone_is_acked_without_a_lane():
    own, lanes = Own(), UnackedMessages()
    waiting = arrived(own, b"a", b"a")
    first = lanes.take_unregistered(waiting, now_ns)
    assert first is not None
    assert lanes.take_unregistered(waiting, now_ns) is None, "the first one is not acked"
    await own.ack(first)
    assert (own.handled, own.acked, bool(lanes)) == ([0], [], False)
    await own.ack(first)
    assert own.handled == [0], "a second ack has no effect"
    assert lanes.take_unregistered(waiting, now_ns) is not None


async def test_message_in_hand_holds_its_key_when_another_is_taken():
    own, lanes = Own(), UnackedMessages()
    waiting = arrived(own, b"a", b"a", b"b")
    first = lanes.take_unregistered(waiting, now_ns)
    assert first is not None
    second = lanes.take_first(waiting, 0, ordered=True)
    assert second is not None
    assert second.key == b"b"
    assert own.is_delivered(first)
    await own.ack(first)
    assert (own.handled, own.acked) == ([0], [0])


def test_messages_taken_together_are_acked_together():
    own, lanes = Own(), UnackedMessages()
    taken = lanes.take_many_unregistered(arrived(own, b"a", b"b", b"a"), 3, 0)
    assert taken is not None
    assert not lanes.ack_unregistered(taken[:2]), "these are not all"
    assert lanes.ack_unregistered(taken)
    assert own.handled == [0, 1, 2]
    assert lanes.is_free
    assert not lanes.ack_unregistered(taken), "nor are they acked twice"


def test_part_of_messages_taken_together_is_acked_alone():
    """The others stay in hand, and block their keys."""
    own, lanes = Own(), UnackedMessages()
    waiting = arrived(own, b"a", b"b", b"a", b"b", b"c")
    taken = lanes.take_many_unregistered(waiting, 3, 0)
    assert taken is not None
    assert own.accept_acks(taken[1:2])
    lanes.record_acks(taken[1:2])
    assert own.handled == [1]
    assert [own.is_delivered(message) for message in taken] == [True, False, True]
    assert [message.key for message in lanes.collect(waiting, 9, 0, ordered=True)] == [b"b", b"c"]
    assert lanes.take_many_unregistered(arrived(own, b"d"), 1, 0) is None, "others are in hand"


def test_message_given_back_takes_the_later_ones_of_its_key_along():
    own, lanes = Own(), UnackedMessages()
    taken = lanes.take_many_unregistered(arrived(own, b"a", b"b", b"a"), 3, 0)
    assert taken is not None
    assert lanes.requeue(taken[0], 5) == [taken[0], taken[2]]
    assert not lanes.ack_unregistered(taken)
    assert lanes.take(5) is taken[0]


def test_message_of_an_ended_lease_is_not_taken_in_hand():
    own, lanes = Own(), UnackedMessages()
    own.deadline_ns = 7
    waiting = arrived(own, b"a")
    assert lanes.take_unregistered(waiting, lambda: 7) is None
    assert lanes.take_many_unregistered(waiting, 1, 7) is None
    assert len(waiting) == 1

"""Copies of a delivered message: in the same process they can be acked, elsewhere they are
read-only.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from asyncio import get_running_loop
from typing import Any

import pytest

from keylane import JsonCodec
from keylane.protocol.errors import ClosedError
from keylane.protocol.message import Delivery, Message


class LoopShell:
    """A shell that pickle refuses, because it has a future of the event loop."""

    def __init__(self) -> None:
        self.waits = get_running_loop().create_future()


def delivered(*offsets: int) -> list[Message]:
    shell: Any = LoopShell()
    delivery = Delivery("s", 2, 100, JsonCodec(), "g", "5ea", 7, True, shell=shell)
    return [Message("s", b"k", b"[1]", at, 7, 0, 3, 2, b"", delivery) for at in offsets]


async def test_pickled_message_says_what_the_message_said():
    """A process pool used to raise "cannot pickle '_asyncio.Future' object"."""
    message = delivered(5)[0]
    carried = pickle.loads(pickle.dumps(message))
    for each in (message, carried):
        assert (each.key, each.value, each.offset, each.partition_id) == (b"k", b"[1]", 5, 7)
        assert (each.group, each.queue, each.logic_offset) == ("g", 2, 105)
        assert (each.fencing_token, each.attempt, each.decode()) == (3, 2, [1])
        where = each.delivery.leased_id, each.delivery.exclusive, each.delivery.cursor
        assert where == (7, True, 0)
        assert each.delivery.cluster_id == "5ea"


async def test_pickled_messages_share_a_delivery_that_a_sink_can_hold():
    """A sink's state of a delivery lives as long as the delivery, and belongs to it only."""
    first, second = pickle.loads(pickle.dumps(delivered(5, 6)))
    assert first.delivery is second.delivery
    assert pickle.loads(pickle.dumps(first)).delivery != first.delivery
    assert weakref.ref(first.delivery)() is first.delivery


@pytest.mark.parametrize("call", ["ack", "nack"])
async def test_pickled_message_refuses_an_ack(call):
    carried = pickle.loads(pickle.dumps(delivered(5)[0]))
    with pytest.raises(ClosedError, match="copy of message 5 of partition 7") as caught:
        await getattr(carried, call)()
    assert "in the process whose consumer delivered it" in caught.value.hint


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
async def test_copy_in_the_process_is_of_the_same_delivery(way):
    """Its ack counts as the message's."""
    message = delivered(5)[0]
    assert way(message).delivery is message.delivery


def test_message_of_a_reader_equals_itself_when_it_is_read_again_or_pickled():
    def read(logic_start: int) -> Message:
        return Message("s", b"k", b"[1]", 5, 7, 0, 0, 1, b"", Delivery("s", 2, logic_start, None))

    message = read(100)
    assert message == read(100) == pickle.loads(pickle.dumps(message))
    assert {message} == {read(100)}
    assert message != read(0)


async def test_messages_of_two_owners_differ():
    (first,), (second,) = delivered(5), delivered(5)
    assert first != second
    assert first == copy.copy(first)

"""A user's messages of one delivery, while another delivery of the same pull client has the same
offsets.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from keylane.consumer.delivery.user_acks import UserAcks
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.message import Message


class TwoSources:
    """A pull client, its own owner, with messages from its partition and from an ancestor."""

    acks_each, by_hand = False, True

    def __init__(self) -> None:
        self.owner = self
        self.lanes: list[Message] = []

    def check_can_ack(self, offset: int) -> None:
        """Accept every ack."""

    def release_acked_keys(self, messages: Sequence[Message]) -> None:
        self.lanes += messages

    def nack(self, message: Message, _after_s: float) -> list[Message]:
        return [message]


class TakenSource(UserAcks):
    """The messages of one partition."""

    def __init__(self, client: TwoSources, partition_id: int) -> None:
        super().__init__()
        self.client = client
        self.partition_id = partition_id
        self.handled: list[int] = []

    def mark_handled(self, offset: int) -> None:
        self.handled.append(offset)

    def hand_out(self, offset: int) -> Message:
        message = Message("s", b"k", b"", offset, self.partition_id, 0, delivery=self)
        self.register_delivered(message)
        return message


@pytest.fixture
def sources() -> tuple[TakenSource, TakenSource]:
    client = TwoSources()
    return TakenSource(client, 1), TakenSource(client, 2)


async def test_message_given_back_is_of_its_own_partition(sources):
    """The other partition's message at the same offset is still in hand: its ack counts, and frees
    its lane.
    """
    ancestor, own = sources
    old, new = ancestor.hand_out(7), own.hand_out(7)
    await old.nack()
    with pytest.raises(InvalidRequestError, match="ack it when it is delivered again"):
        await old.ack()
    await new.ack()
    assert (own.handled, ancestor.handled) == ([7], [])
    assert own.client.lanes == [new]


async def test_second_ack_and_nack_do_nothing_when_the_message_is_acked(sources):
    """A second ack is not an error, but a nack after it is; the error names the partition."""
    _, own = sources
    message = own.hand_out(3)
    await message.ack()
    await message.ack()
    assert own.handled == [3]
    with pytest.raises(
        InvalidRequestError, match="message 3 of partition 2 is already acked or given back"
    ):
        await message.nack()


async def test_message_is_in_hand_again_when_it_was_given_back_and_comes_again(sources):
    """Its ack counts then."""
    own, _ = sources
    message = own.hand_out(3)
    await message.nack()
    assert not own.is_delivered(message)
    own.register_delivered(message)
    await message.ack()
    assert own.handled == [3]

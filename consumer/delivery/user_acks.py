"""The messages of one delivery that the user has in hand: acked by hand, or given back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ...protocol.errors import InvalidRequestError
from ...protocol.message import Message


class UserAcks(ABC):
    """
    What was taken of a delivery: of a pull client, a hand-out of a shared group, or a window of redriven messages.

    Each counts for itself, because their messages may come from several partitions.
    """

    __slots__ = ("_given_back", "_taken", "in_lanes")

    client: Any
    """The pull client whose messages end together."""
    is_apart = False
    """Messages are of another account than what the client has pulled: they were parked, and are handled again."""
    is_loose = False
    """Each message is for itself, whatever its key is."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        """Offsets that iteration gave to the user and the user has not acked."""
        self._given_back: set[int] = set()
        """Offsets that the user gave back, and was not given again."""
        self.in_lanes: set[int] = set()
        """Those taken whose ack lets the next message of a key be handed out."""

    @abstractmethod
    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""

    def taken(self, message: Message) -> None:
        """Note that the iteration gave the message to the user, who will ack it."""
        self._taken.add(message.offset)
        if self._given_back:
            self._given_back.discard(message.offset)

    def has_taken(self, message: Message) -> bool:
        """True if the user has the message, neither acked nor given back."""
        return message.offset in self._taken

    async def ack(self, message: Message) -> None:
        """
        Take the user's ack; no effect for a second ack, or for a message that a handler was given.

        Raises:
            InvalidRequestError: the message was given back.
            LeaseLostError: it is delivered to another consumer.
        """
        client = self.client
        if self.take_ack(message) and client.acks_each and not await client.acked():
            client.check_takes_acks(message.offset)

    def take_ack(self, message: Message) -> bool:
        """As `ack`, which then waits until it is durable; True if this is the message's first ack."""
        offset = message.offset
        self.client.check_takes_acks(offset)
        if offset not in self._taken:
            self.check_not_given_back(message)
            return False
        self._taken.remove(offset)
        self.done(offset)
        if offset in self.in_lanes:
            self.in_lanes.remove(offset)
            self.client.owner.acked_again(message)
        return True

    def check_not_given_back(self, message: Message) -> None:
        """Raises InvalidRequestError: the user gave the message back, and it comes again."""
        if message.offset in self._given_back:
            raise InvalidRequestError(
                f"message {message.offset} of partition {message.partition_id} was given back; "
                "ack it when it comes again"
            )

    async def nack(self, message: Message, after_s: float) -> None:
        """Hand a message out again that the user has.  Raises InvalidRequestError, LeaseLostError, ConfigError."""
        client = self.client
        client.check_takes_acks(message.offset)
        if message.offset not in self._taken:
            raise InvalidRequestError(
                f"message {message.offset} of partition {message.partition_id} is acked or given back already, or a "
                "handler has it: that raises keylane.Retry"
            )
        for each in client.owner.nack(message, after_s):
            each.delivery.take_back(each.offset)

    def take_back(self, offset: int) -> None:
        """Note that the user has given a message back."""
        self._taken.discard(offset)
        self._given_back.add(offset)
        self.in_lanes.discard(offset)

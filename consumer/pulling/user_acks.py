"""The messages of one partition that an iteration has given to the user: acked by hand, or given back."""

from __future__ import annotations

from typing import Any

from ...protocol.clock import Clock
from ...protocol.errors import InvalidRequestError, LeaseLostError
from ...protocol.message import Message
from ...rpc.connections import Connections
from .lifetime import Lifetime
from .pull_owner import PullOwner


class UserAcks:
    """The part of a pull client that the user's acks meet."""

    partition_id: int
    acks_each: bool
    life: Lifetime
    _connections: Connections
    _clock: Clock
    _owner: PullOwner

    def begin_taking(self) -> None:
        """Begin with no message in the user's hands."""
        self._taken: set[int] = set()
        """Offsets that iteration gave to the user and the user has not acked."""
        self._given_back: set[int] = set()
        """Offsets that the user gave back, and was not given again."""
        self.in_lanes: set[int] = set()
        """Those of them whose ack lets the next message of a key be handed out."""

    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        raise NotImplementedError

    async def acked(self) -> bool:
        """Wait until the acks of all that was handled before are durable; False if they are not."""
        raise NotImplementedError

    def taken(self, message: Message) -> None:
        """Note that the iteration gave the message to the user, who will ack it."""
        self._taken.add(message.offset)
        if self._given_back:
            self.given_again(message)

    def given_again(self, message: Message) -> None:
        """Note that the user has a message again that was given back."""
        self._given_back.discard(message.offset)

    def has_taken(self, message: Message) -> bool:
        """True if the user has the message, neither acked nor given back."""
        return message.offset in self._taken

    def check_takes_ack(self, message: Message) -> None:
        """
        Check that the user may ack.

        Raises:
            LeaseLostError: the partition was handed over, or its lease has ended.
            ForkedError, OtherLoopError: the consumer is open in another process or event loop.
        """
        self.check_lease(message.offset)

    def check_lease(self, offset: int) -> None:
        """As `check_takes_ack`, for a message at `offset`."""
        self._connections.home.check_thread()
        if not self.life.takes_acks(self._clock.boot_ms()):
            raise LeaseLostError(partition_id=self.partition_id, offset=offset)

    async def ack(self, message: Message) -> None:
        """Take the user's ack; no effect for a second ack, or for a message that a handler was given."""
        if self.take_ack(message) and self.acks_each and not await self.acked():
            self.check_takes_ack(message)

    def take_ack(self, message: Message) -> bool:
        """As `ack`, which then waits until it is durable; True if this is the message's first ack."""
        self.check_takes_ack(message)
        if message.offset not in self._taken:
            self.check_not_given_back(message)
            return False
        self._taken.remove(message.offset)
        self.done(message.offset)
        if self.in_lanes:
            self.left_hand(message)
        return True

    def check_not_given_back(self, message: Message) -> None:
        """Raises InvalidRequestError: the user gave the message back, and it comes again."""
        if message.offset in self._given_back:
            raise InvalidRequestError(
                f"message {message.offset} of partition {self.partition_id} was given back; ack it when it comes again"
            )

    async def nack(self, message: Message, after_s: float) -> None:
        """Take a message back from the user.  Raises InvalidRequestError, LeaseLostError, ConfigError."""
        self.take_back(message, self._taken, after_s)

    def take_back(self, message: Message, taken: set[int], after_s: float) -> None:
        """Hand a message out again that is among those `taken`."""
        self.check_takes_ack(message)
        if message.offset not in taken:
            raise InvalidRequestError(
                f"message {message.offset} of partition {self.partition_id} is acked or given back already, or a "
                "handler has it: that raises keylane.Retry"
            )
        for each in self._owner.nack(message, after_s):
            taken.discard(each.offset)
            self._given_back.add(each.offset)
            self.in_lanes.discard(each.offset)

    def left_hand(self, message: Message) -> None:
        """Let the next message of a lane be handed out, if the acked one was of a lane."""
        if message.offset in self.in_lanes:
            self.in_lanes.remove(message.offset)
            self._owner.acked_again(message)


class TakenMessages:
    """Messages of a pull client that end together, with their own place in the user's hands."""

    __slots__ = ("_taken",)

    client: Any

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        raise NotImplementedError

    def taken(self, message: Message) -> None:
        """Note that the iteration gave the message to the user, who will ack it."""
        self._taken.add(message.offset)
        self.client.given_again(message)

    def has_taken(self, message: Message) -> bool:
        """True if the user has the message, neither acked nor given back."""
        return message.offset in self._taken

    async def ack(self, message: Message) -> None:
        """Take the user's ack; a second ack does nothing.  Raises LeaseLostError."""
        client = self.client
        if self.take_ack(message) and client.acks_each and not await client.acked():
            client.check_takes_ack(message)

    def take_ack(self, message: Message) -> bool:
        """As `ack`, which then waits until it is durable; True if this is the message's first ack."""
        self.client.check_takes_ack(message)
        if message.offset not in self._taken:
            self.client.check_not_given_back(message)
            return False
        self._taken.remove(message.offset)
        self.done(message.offset)
        self.client.left_hand(message)
        return True

    async def nack(self, message: Message, after_s: float) -> None:
        """Take a message back from the user.  Raises InvalidRequestError, LeaseLostError, ConfigError."""
        self.client.take_back(message, self._taken, after_s)

"""The messages of one delivery that the user has in hand: acked by hand, or given back."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from operator import attrgetter
from typing import Any, Self

from ...protocol.errors import InvalidRequestError, LeaseLostError, OverloadedError
from ...protocol.message import Message
from ...rpc.race import start_task
from .copied import copied_delivery
from .hand import Hand

LYING_S = 30.0
"""The seconds for which a refused ack is waited for, and once more, while a message lies ready that
the program does not take.
"""


class UserAcks(ABC):
    """
    The messages that were taken from a delivery: a pull client, a hand-out of a shared group, or a
    window of redriven messages.

    Each delivery counts separately, because their messages may come from several partitions.
    """

    # A sink keeps its state of a delivery for as long as the delivery lives.
    __slots__ = ("__weakref__", "_given_back", "_taken", "hand", "takes_hand")

    client: Any
    """The pull client whose messages end together."""
    is_apart = False
    """True if the messages are accounted for separately from those that the client has pulled: they
    were parked, and are handled again.
    """
    is_copied = False
    """True for a copy; see `Delivery`."""
    is_loose = False
    """True if each message stands alone, whatever its key is."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        """The offsets that the iteration gave to the user and the user has not acked."""
        self._given_back: set[int] = set()
        """The offsets that the user gave back and was not given again."""
        self.hand: Hand | None = None
        """The hand that may have messages which the user has and which are not in `_taken`."""
        self.takes_hand = self.runs
        """True if a message may be in a hand: the user was given again every message that was given
        back.
        """

    def __reduce_ex__(self, _protocol: object) -> Any:
        # A handler may pass its message to a pool of processes, where there is no client.
        delivery: Any = self  # each subclass is a Delivery
        return copied_delivery(delivery)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    runs = False
    """True if it has `deadline_s`, and messages that are handled one after another may be reported
    to `done_all` together.
    """

    @abstractmethod
    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""

    def done_all(self, messages: list[Message]) -> None:
        """Note that the messages, which are sorted by offset, are handled."""
        for message in messages:
            self.done(message.offset)

    def taken(self, message: Message) -> None:
        """Note that the iteration gave a message to the user, who will ack it."""
        self._taken.add(message.offset)
        if self._given_back:
            self._given_back.discard(message.offset)
            self.takes_hand = self.runs and not self._given_back

    def taken_all(self, messages: list[Message]) -> None:
        """Note that the iteration gave several messages to the user."""
        offsets = [message.offset for message in messages]
        self._taken.update(offsets)
        if self._given_back:
            self._given_back.difference_update(offsets)
            self.takes_hand = self.runs and not self._given_back

    def _spread(self) -> None:
        if self.hand is not None:
            self.hand.spread()

    def has_taken(self, message: Message) -> bool:
        """Return True if the user has the message, neither acked nor given back."""
        self._spread()
        return message.offset in self._taken

    def ack(self, message: Message) -> Coroutine[Any, Any, None]:
        """
        Take the user's ack; a second ack only waits, if necessary, until the first is durable.

        Raises:
            InvalidRequestError: a handler has the message. It is raised before the wait, because a
                handler that is not a coroutine cannot await, and its ack would be silently lost.
        """
        check_by_hand(message)
        return self._take_ack(message)

    def nack(self, message: Message, after_s: float) -> Coroutine[Any, Any, None]:
        """Hand out again a message that the user has. Raises InvalidRequestError, as `ack` does."""
        check_by_hand(message)
        return self._take_back(message, after_s)

    async def _take_ack(self, message: Message) -> None:
        """
        Take the ack of a message that no handler has.

        Raises:
            InvalidRequestError: the message was given back.
            LeaseLostError: the message is delivered to another consumer.
        """
        client, offset = self.client, message.offset
        client.check_takes_acks(offset)
        hand = self.hand
        if hand is not None:
            if hand.message is message and not client.acks_each:
                hand.message = None
                self.done(offset)
                return
            hand.spread()
        if offset in self._taken:
            self._taken.remove(offset)
            self.done(offset)
            if not client.acks_each:
                client.owner.acked_again((message,))
                return
        else:
            self.check_not_given_back((message,))
        if client.acks_each:
            await self.acked_each([message])

    async def acked(self, offset: int) -> bool:
        """Wait until the ack of a handled message is durable, and return False if it never
        will be.
        """
        durable: bool = await self.client.acks.durable(offset)
        return durable

    async def answered(self, offset: int) -> bool:
        """Wait for the broker's answer to the ack, and return False if it is not durable now."""
        durable: bool = await self.client.acks.answered(offset)
        return durable

    async def acked_each(self, messages: list[Message]) -> None:
        """
        Wait until handled messages are acked durably, and only then let later ones of their keys be
        handed out.

        The later ones are released at that time even if this wait is cancelled, or raises
        OverloadedError.

        Raises:
            LeaseLostError: the messages are delivered to another consumer.
            OverloadedError: the broker takes no more ranges, and the program takes none of the
                messages that could make room.
        """
        acking, lying = start_task(self._let_go_later(messages)), None
        client, offset = self.client, messages[0].offset
        while not (await asyncio.wait((acking,), timeout=LYING_S))[0]:
            before, lying = lying, client.owner.lying
            if lying is not None and lying is before and client.acks.handled.at_range_limit:
                raise _no_room(client.partition_id, offset)
        if not acking.result():
            raise LeaseLostError(partition_id=client.partition_id, offset=offset)

    async def _let_go_later(self, messages: list[Message]) -> bool:
        durable = await self.acked(max(message.offset for message in messages))
        if durable:
            self.client.owner.acked_again(messages)
        return durable

    def take_acks(self, messages: list[Message]) -> bool:
        """Take acks of messages that were not given back, and return False if all of them were
        acked before.
        """
        self._spread()
        offsets = {message.offset for message in messages}
        taken = self._taken
        if len(offsets) < len(messages) or not taken.issuperset(offsets):
            offsets &= taken
            messages = list(
                {each.offset: each for each in messages if each.offset in taken}.values()
            )
        if not messages:
            return False
        taken -= offsets
        messages.sort(key=_by_offset)
        self.done_all(messages)
        if not self.client.acks_each:
            self.client.owner.acked_again(messages)
        return True

    def check_not_given_back(self, messages: Iterable[Message]) -> None:
        """Raise InvalidRequestError if the user gave a message back, so that it is delivered
        again.
        """
        if not self._given_back:
            return
        for message in messages:
            if message.offset in self._given_back:
                raise InvalidRequestError(
                    f"message {message.offset} of partition {message.partition_id} was given back; "
                    "ack it when it comes again"
                )

    async def _take_back(self, message: Message, after_s: float) -> None:
        """Hand out again a message that no handler has. Raises InvalidRequestError, LeaseLostError,
        ConfigError.
        """
        client = self.client
        client.check_takes_acks(message.offset)
        self._spread()
        if message.offset not in self._taken:
            raise InvalidRequestError(
                f"message {message.offset} of partition {message.partition_id} is acked or given "
                f"back already"
            )
        for each in client.owner.nack(message, after_s):
            each.delivery.take_back(each.offset)

    def take_back(self, offset: int) -> None:
        """Note that the user has given a message back."""
        self._taken.discard(offset)
        self._given_back.add(offset)
        self.takes_hand = False


_by_offset = attrgetter("offset")


def _no_room(partition_id: int, offset: int) -> OverloadedError:
    error = OverloadedError(
        f"the ack of message {offset} of partition {partition_id} is not durable: too many "
        f"messages behind one that is not "
        "acked are acked, and one that may be taken now, given back or behind such "
        "a one, is not taken"
    )
    error.hint = (
        "Go on taking messages, which makes room. This ack is kept and sent again by itself, and "
        "later messages of its key "
        "wait until it is durable."
    )
    return error


def check_by_hand(message: Message) -> None:
    """Raise InvalidRequestError if a handler was given the message, because the handler's return
    acks it.
    """
    delivery: Any = message.delivery
    if delivery.client.owner.by_hand:
        return
    error = InvalidRequestError(
        f"message {message.offset} of partition {message.partition_id} was given to a handler, "
        "whose return acks it: ack() and nack() are of messages that a program takes itself"
    )
    error.hint = (
        "Take the call out of the handler: return to ack the message, raise keylane.Retry or "
        "return keylane.NACK to "
        "have it tried again. To ack by hand, make the consumer without a handler."
    )
    raise error


def are_parked_together(failed: Message, other: Message) -> bool:
    """Return True if `other`, of the same key, is set aside with a failed message: it was handed
    out in the same way.
    """
    first: UserAcks = failed.delivery  # type: ignore[assignment]
    second: UserAcks = other.delivery  # type: ignore[assignment]
    if first is second:
        return True
    return first.client is second.client and not (first.is_apart or second.is_apart)

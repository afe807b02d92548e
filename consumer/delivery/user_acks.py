"""Accepts a user's acks and nacks for the messages of one delivery."""

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
from .unregistered_messages import UnregisteredMessages

ACK_STALL_S = 30.0
"""How often, in seconds, a wait for a refused ack checks whether the program still takes messages.
It gives up if the same message is ready at two checks.
"""


class UserAcks(ABC):
    """
    Tracks the messages that the user took from one delivery: a pull client, a batch from a shared
    group, or a window of redriven messages.

    Deliveries keep separate sets because their messages may come from different partitions, whose
    offsets overlap.
    """

    # A sink keeps its state of a delivery for as long as the delivery lives.
    __slots__ = (
        "__weakref__",
        "_nacked",
        "_delivered_offsets",
        "unregistered",
        "may_be_unregistered",
    )

    client: Any
    """The pull client under whose lease the messages are handled."""
    is_apart = False
    """True for redriven messages, which the client does not count among those it has pulled."""
    is_copied = False
    """True for the delivery of a copy; see `Delivery`."""
    is_loose = False
    """True if later messages of the same key do not wait for these."""

    def __init__(self) -> None:
        self._delivered_offsets: set[int] = set()
        """The offsets of messages that the user has not acked yet."""
        self._nacked: set[int] = set()
        """The offsets of messages that were nacked and not yet handed out again."""
        self.unregistered: UnregisteredMessages | None = None
        """The consumer's unregistered messages; some may belong to this delivery although they are
        not in `_delivered_offsets`.
        """
        self.may_be_unregistered = self.reports_runs
        """True if messages may be handed out without registering them: no nacked message is waiting
        to be handed out again.
        """

    def __reduce_ex__(self, _protocol: object) -> Any:
        # A handler may pass its message to a pool of processes, where there is no client.
        delivery: Any = self  # each subclass is a Delivery
        return copied_delivery(delivery)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    reports_runs = False
    """True for a delivery with `deadline_s`, whose handled messages may be reported together
    through `mark_all_handled`.
    """

    @abstractmethod
    def mark_handled(self, offset: int) -> None:
        """Mark the message at `offset` as handled."""

    def mark_all_handled(self, messages: list[Message]) -> None:
        """Mark messages, in offset order, as handled."""
        for message in messages:
            self.mark_handled(message.offset)

    def register_delivered(self, message: Message) -> None:
        """Register a message that was handed to the user, who must ack it."""
        self._delivered_offsets.add(message.offset)
        if self._nacked:
            self._nacked.discard(message.offset)
            self.may_be_unregistered = self.reports_runs and not self._nacked

    def register_all_delivered(self, messages: list[Message]) -> None:
        """Register several messages that were handed to the user."""
        offsets = [message.offset for message in messages]
        self._delivered_offsets.update(offsets)
        if self._nacked:
            self._nacked.difference_update(offsets)
            self.may_be_unregistered = self.reports_runs and not self._nacked

    def _register_messages(self) -> None:
        if self.unregistered is not None:
            self.unregistered.register()

    def is_delivered(self, message: Message) -> bool:
        """Return True if the user has the message and has neither acked nor nacked it."""
        self._register_messages()
        return message.offset in self._delivered_offsets

    def ack(self, message: Message) -> Coroutine[Any, Any, None]:
        """
        Ack a message for the user. A repeated ack only waits until the first one is durable, if the
        settings require that.

        Raises:
            InvalidRequestError: a handler has the message. Raised by the call, not by the await: a
                synchronous handler cannot await, so its ack would be silently lost.
        """
        check_not_in_handler(message)
        return self._accept_ack(message)

    def nack(self, message: Message, after_s: float) -> Coroutine[Any, Any, None]:
        """Nack a message for the user, so that it is handed out again after `after_s`. Raises
        InvalidRequestError as `ack` does.
        """
        check_not_in_handler(message)
        return self._accept_nack(message, after_s)

    async def _accept_ack(self, message: Message) -> None:
        """
        Ack a message that is not in a handler.

        Raises:
            InvalidRequestError: the message was nacked.
            LeaseLostError: the message is delivered to another consumer.
        """
        client, offset = self.client, message.offset
        client.check_can_ack(offset)
        unregistered = self.unregistered
        if unregistered is not None:
            if unregistered.message is message and not client.acks_each:
                unregistered.message = None
                self.mark_handled(offset)
                return
            unregistered.register()
        if offset in self._delivered_offsets:
            self._delivered_offsets.remove(offset)
            self.mark_handled(offset)
            if not client.acks_each:
                client.owner.release_acked_keys((message,))
                return
        else:
            self.check_not_nacked((message,))
        if client.acks_each:
            await self.wait_until_acks_durable([message])

    async def wait_until_acked(self, offset: int) -> bool:
        """Wait until the ack of a handled message is durable. Return False if it never will be."""
        durable: bool = await self.client.acks.wait_until_durable(offset)
        return durable

    async def wait_for_ack_reply(self, offset: int) -> bool:
        """Wait for the broker's reply to the ack. Return False if the ack is not durable yet."""
        durable: bool = await self.client.acks.wait_for_ack_reply(offset)
        return durable

    async def wait_until_acks_durable(self, messages: list[Message]) -> None:
        """
        Wait until the acks of handled messages are durable.

        Later messages of their keys are handed out only then, even if this call is cancelled or
        raises OverloadedError.

        Raises:
            LeaseLostError: the messages are delivered to another consumer.
            OverloadedError: the broker cannot store more acked ranges, and the program does not
                take the messages whose acks would free some.
        """
        ack_task, ready = start_task(self._release_when_durable(messages)), None
        client, offset = self.client, messages[0].offset
        while not (await asyncio.wait((ack_task,), timeout=ACK_STALL_S))[0]:
            previous, ready = ready, client.owner.ready_redelivery
            if ready is not None and ready is previous and client.acks.handled.at_range_limit:
                raise range_limit_error(client.partition_id, offset)
        if not ack_task.result():
            raise LeaseLostError(partition_id=client.partition_id, offset=offset)

    async def _release_when_durable(self, messages: list[Message]) -> bool:
        durable = await self.wait_until_acked(max(message.offset for message in messages))
        if durable:
            self.client.owner.release_acked_keys(messages)
        return durable

    def accept_acks(self, messages: list[Message]) -> bool:
        """Ack messages, none of which was nacked. Return False if all were acked already."""
        self._register_messages()
        offsets = {message.offset for message in messages}
        taken = self._delivered_offsets
        if len(offsets) < len(messages) or not taken.issuperset(offsets):
            offsets &= taken
            acked = {message.offset: message for message in messages if message.offset in taken}
            messages = list(acked.values())
        if not messages:
            return False
        taken -= offsets
        messages.sort(key=_by_offset)
        self.mark_all_handled(messages)
        if not self.client.acks_each:
            self.client.owner.release_acked_keys(messages)
        return True

    def check_not_nacked(self, messages: Iterable[Message]) -> None:
        """Raise InvalidRequestError if the user nacked one of the messages, because it will be
        redelivered.
        """
        if not self._nacked:
            return
        for message in messages:
            if message.offset in self._nacked:
                raise InvalidRequestError(
                    f"message {message.offset} of partition {message.partition_id} was given back; "
                    "ack it when it is delivered again"
                )

    async def _accept_nack(self, message: Message, after_s: float) -> None:
        """
        Nack a message that is not in a handler.

        Raises:
            InvalidRequestError: it is already acked or nacked.
            LeaseLostError: it is delivered to another consumer.
        """
        client = self.client
        client.check_can_ack(message.offset)
        self._register_messages()
        if message.offset not in self._delivered_offsets:
            raise InvalidRequestError(
                f"message {message.offset} of partition {message.partition_id} is already acked or "
                "given back"
            )
        for returned in client.owner.nack(message, after_s):
            returned.delivery.record_nack(returned.offset)

    def record_nack(self, offset: int) -> None:
        """Record that the user has nacked the message at `offset`."""
        self._delivered_offsets.discard(offset)
        self._nacked.add(offset)
        self.may_be_unregistered = False


_by_offset = attrgetter("offset")


def range_limit_error(partition_id: int, offset: int) -> OverloadedError:
    """Return the error for an ack that waits for room which only the program can make."""
    error = OverloadedError(
        f"the ack of message {offset} of partition {partition_id} is not durable: the broker "
        "stores no more acks above the oldest unacked message, and the program does not take "
        "the messages that are ready for it again"
    )
    error.hint = (
        "Keep taking and acking messages, which makes room. This ack is retried automatically; "
        "later messages of its key wait until it is durable."
    )
    return error


def check_not_in_handler(message: Message) -> None:
    """Raise InvalidRequestError if the message is in a handler, whose return acks it."""
    delivery: Any = message.delivery
    if delivery.client.owner.by_hand:
        return
    error = InvalidRequestError(
        f"message {message.offset} of partition {message.partition_id} was given to a handler, "
        "whose return acks it: ack() and nack() are for messages that the program takes itself"
    )
    error.hint = (
        "Remove the call from the handler: return to ack the message, or raise keylane.Retry or "
        "return keylane.NACK to have it retried. To ack messages yourself, create the consumer "
        "without a handler."
    )
    raise error


def are_parked_together(failed: Message, other: Message) -> bool:
    """Return True if `other`, a message of the same key, must be parked together with `failed`:
    both come from the client itself, or from the same delivery.
    """
    first: UserAcks = failed.delivery  # type: ignore[assignment]
    second: UserAcks = other.delivery  # type: ignore[assignment]
    if first is second:
        return True
    return first.client is second.client and not (first.is_apart or second.is_apart)

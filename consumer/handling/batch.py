"""
Messages of one partition that a handler gets together, and that workers treat as one message.
Pure.

    workers read from a message:  partition_id  offset  key  attempt
                                  delivery.deadline_ns  delivery.mark_handled
                                  delivery.discard_in_flight
    a batch provides these for    all its messages; its offset and the digest of its key are
                                  those of the first message

Invariant
    The messages are in offset order.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec.structs import replace

from ...protocol.message import Message
from ...protocol.parked import Failure


class BatchClient(Protocol):
    """The part of a pull client that a batch uses."""

    def mark_all_handled(self, messages: list[Message[Any]]) -> None:
        """Mark messages as handled."""
        ...

    def discard_in_flight(self, count: int) -> None:
        """Stop counting `count` messages that will not be handled by this consumer."""
        ...


class BatchKey(bytes):
    """The key of a batch's first message, with a reference to the batch. Lanes need the reference
    when a worker reports that the key is finished.
    """

    batch: Batch


class Batch:
    """
    Messages of one partition, handled together.

    Args:
        messages: at least one, in offset order.
        keys: the distinct keys except b""; empty if the messages are unordered; None: computed on
            demand.
        one_delivery: True if all messages are under the same lease.
        acks_per_delivery: True: each message is acked or discarded through its own delivery; False:
            all through their pull client.
        attempt: the number of attempts of the batch, including the next one.
    """

    __slots__ = ("_attempt", "_keys", "_one_delivery", "acks_per_delivery", "client", "messages")

    def __init__(
        self,
        messages: list[Message],
        keys: set[bytes] | None,
        *,
        one_delivery: bool = True,
        acks_per_delivery: bool = False,
        attempt: int = 1,
    ) -> None:
        first = messages[0].delivery
        self.client: BatchClient = first.client  # type: ignore[union-attr]
        self._one_delivery = one_delivery
        self.acks_per_delivery = acks_per_delivery
        self.messages = messages
        self._keys = keys
        self._attempt = attempt

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def key(self) -> BatchKey:
        """The first message's key with a reference to this batch. It is not cached, because a
        reference cycle would delay freeing the messages.
        """
        key = BatchKey(self.messages[0].key)
        key.batch = self
        return key

    @property
    def keys(self) -> set[bytes]:
        """The distinct keys except b""; empty if the messages are unordered."""
        if self._keys is None:
            self._keys = {message.key for message in self.messages if message.key}
        return self._keys

    @property
    def subject(self) -> str:
        """The subject of the messages."""
        return self.messages[0].subject

    @property
    def partition_id(self) -> int:
        """The partition of the messages."""
        return self.messages[0].partition_id

    @property
    def leased_id(self) -> int:
        """The id of the partition whose pull client handed the messages out."""
        first: Any = self.messages[0].delivery
        leased_id: int = first.leased_id
        return leased_id

    @property
    def offset(self) -> int:
        """The offset of the first message."""
        return self.messages[0].offset

    @property
    def attempt(self) -> int:
        """The number of attempts of the batch, including the next one; individual messages may have
        had more.
        """
        return self._attempt

    @attempt.setter
    def attempt(self, attempt: int) -> None:
        delta = attempt - self._attempt
        self._attempt = attempt
        for message in self.messages:
            message.attempt += delta

    # ── as the delivery of its messages ───────────────────────────────────────────────────────────
    @property
    def delivery(self) -> Batch:
        """The object that receives the outcome: the batch itself."""
        return self

    @property
    def group(self) -> str:
        """The consumer group, for log lines."""
        return self.messages[0].group

    @property
    def is_loose(self) -> bool:
        """True if no later message waits for these; for log lines."""
        first: Any = self.messages[0].delivery
        return bool(first.is_loose)

    @property
    def deadline_ns(self) -> int:
        """The boot time after which the handler must not start."""
        first: Any = self.messages[0].delivery
        if self._one_delivery:
            return int(first.deadline_ns)
        deliveries: set[Any] = {message.delivery for message in self.messages}
        deadlines_ns: list[int] = [delivery.deadline_ns for delivery in deliveries]
        return min(deadlines_ns)

    def mark_handled(self, _offset: int) -> None:
        """Mark all messages as handled."""
        if not self.acks_per_delivery:
            self.client.mark_all_handled(self.messages)
            return
        for message in self.messages:
            message.delivery.mark_handled(message.offset)  # type: ignore[union-attr]

    async def wait_for_ack_reply(self, _offset: int) -> bool:
        """Wait for the broker's replies to all acks. Return False if some are not durable yet."""
        last_offsets = self._last_offsets().items()
        return all([await delivery.wait_for_ack_reply(offset) for delivery, offset in last_offsets])

    async def wait_until_acked(self, _offset: int) -> bool:
        """Wait until all acks are durable. Return False if some never will be."""
        last_offsets = self._last_offsets().items()
        return all([await delivery.wait_until_acked(offset) for delivery, offset in last_offsets])

    def _last_offsets(self) -> dict[Any, int]:
        """Return the last offset of each delivery."""
        return {message.delivery: message.offset for message in self.messages}

    def report_failure(self, _message: Message, failure: Failure) -> None:
        """Record a failed attempt of each message, and its error, at the broker."""
        for message in self.messages:
            own_failure = replace(failure, attempts=message.attempt)
            message.delivery.report_failure(message, own_failure)  # type: ignore[union-attr]

    def report_hang(self, _message: Message, failure: Failure, running_ms: int) -> None:
        """Report to the broker, for the first message, how long the batch has been in its
        handler.
        """
        first = self.messages[0]
        first_failure = replace(failure, attempts=first.attempt - 1)
        first.delivery.report_hang(first, first_failure, running_ms)  # type: ignore[union-attr]

    def discard_in_flight(self, _count: int) -> None:
        """Stop counting all messages, because this consumer will handle none of them."""
        if not self.acks_per_delivery:
            self.client.discard_in_flight(len(self.messages))
            return
        for message in self.messages:
            message.delivery.discard_in_flight(1)  # type: ignore[union-attr]

    # ── smaller batches ───────────────────────────────────────────────────────────────────────────
    def split(self) -> list[Message]:
        """
        Keep the first half, and return the messages of the other half, which may be empty.

        Messages of one key stay together, unless all have the same key: then the older half is
        kept.
        """
        ordered = bool(self.keys)
        units = [(message.key if ordered else b"") or message.offset for message in self.messages]
        distinct = list(dict.fromkeys(units))
        if len(distinct) == 1:
            middle = (len(self.messages) + 1) // 2
            first_half, second_half = self.messages[:middle], self.messages[middle:]
        else:
            first = set(distinct[: (len(distinct) + 1) // 2])
            pairs = list(zip(self.messages, units, strict=True))
            first_half = [message for message, unit in pairs if unit in first]
            second_half = [message for message, unit in pairs if unit not in first]
        self.messages = first_half
        if ordered:
            self._keys = {message.key for message in first_half if message.key}
        return second_half

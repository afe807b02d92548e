"""Messages of one partition that a handler gets together, and that workers hold like one message.
Pure.

    workers read of a message:   partition_id  offset  key  attempt
                                 delivery.deadline_ns  delivery.done  delivery.forget
    a batch answers for:         all its messages; its offset and the digest of its key are
                                 those of the first message

Invariant
    Messages are in the order of their offsets.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec.structs import replace

from ...protocol.message import Message
from ...protocol.parked import Failure


class BatchClient(Protocol):
    """The pull client of the messages of a batch."""

    def done_all(self, messages: list[Message[Any]]) -> None:
        """Note that the messages are handled."""
        ...

    def forget(self, count: int) -> None:
        """Note that `count` messages will not be handled here."""
        ...


class BatchKey(bytes):
    """The key of the first message, with its batch: lanes find the batch when workers report that
    the key is finished.
    """

    batch: Batch


class Batch:
    """
    Some messages of one partition.

    Args:
        messages: by offset; at least one.
        keys: the keys of the messages, without b""; empty if they have no order; None: found on
            demand.
        one_delivery: whether all messages end with the same lease.
        acked_each: whether messages are acked and forgotten at their deliveries; False: together,
            at their pull client.
        attempt: the number of tries of the batch, its next one included.
    """

    __slots__ = ("_attempt", "_keys", "_one_delivery", "acked_each", "client", "messages")

    def __init__(
        self,
        messages: list[Message],
        keys: set[bytes] | None,
        *,
        one_delivery: bool = True,
        acked_each: bool = False,
        attempt: int = 1,
    ) -> None:
        first = messages[0].delivery
        self.client: BatchClient = first.client  # type: ignore[union-attr]
        self._one_delivery = one_delivery
        self.acked_each = acked_each
        self.messages = messages
        self._keys = keys
        self._attempt = attempt

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def key(self) -> BatchKey:
        """Return the key of the first message, which refers to its batch; the batch does not keep
        it, so that its end frees the messages.
        """
        key = BatchKey(self.messages[0].key)
        key.batch = self
        return key

    @property
    def keys(self) -> set[bytes]:
        """Return the keys of the messages, without b""; empty if they have no order."""
        if self._keys is None:
            self._keys = {message.key for message in self.messages if message.key}
        return self._keys

    @property
    def subject(self) -> str:
        """Return the subject of the messages."""
        return self.messages[0].subject

    @property
    def partition_id(self) -> int:
        """Return the partition of the messages."""
        return self.messages[0].partition_id

    @property
    def leased_id(self) -> int:
        """Return the partition whose pull client handed the messages out."""
        first: Any = self.messages[0].delivery
        leased_id: int = first.leased_id
        return leased_id

    @property
    def offset(self) -> int:
        """Return the offset of the first message."""
        return self.messages[0].offset

    @property
    def attempt(self) -> int:
        """Return the number of tries of the batch, its next one included; each of its messages may
        have been tried more often.
        """
        return self._attempt

    @attempt.setter
    def attempt(self, attempt: int) -> None:
        more = attempt - self._attempt
        self._attempt = attempt
        for message in self.messages:
            message.attempt += more

    # ── as the delivery of its messages ───────────────────────────────────────────────────────────
    @property
    def delivery(self) -> Batch:
        """Return the object that is notified of the end of the messages: the batch itself."""
        return self

    @property
    def group(self) -> str:
        """Return the consumer group of the messages, which log lines name."""
        return self.messages[0].group

    @property
    def is_loose(self) -> bool:
        """Return True if no message waits for these, which log lines mention."""
        first: Any = self.messages[0].delivery
        return bool(first.is_loose)

    @property
    def deadline_ns(self) -> int:
        """Return the time after which the handler does not start."""
        first: Any = self.messages[0].delivery
        if self._one_delivery:
            return int(first.deadline_ns)
        deliveries: set[Any] = {message.delivery for message in self.messages}
        deadlines_ns: list[int] = [delivery.deadline_ns for delivery in deliveries]
        return min(deadlines_ns)

    def done(self, _offset: int) -> None:
        """Note that all messages are handled."""
        if not self.acked_each:
            self.client.done_all(self.messages)
            return
        for message in self.messages:
            message.delivery.done(message.offset)  # type: ignore[union-attr]

    async def answered(self, _offset: int) -> bool:
        """Wait for the broker's answer to the acks of all messages, and return False if some are
        not durable now.
        """
        lasts = self._last_offsets().items()
        return all([await delivery.answered(offset) for delivery, offset in lasts])

    async def acked(self, _offset: int) -> bool:
        """Wait until the acks of all messages are durable, and return False if some never
        will be.
        """
        lasts = self._last_offsets().items()
        return all([await delivery.acked(offset) for delivery, offset in lasts])

    def _last_offsets(self) -> dict[Any, int]:
        """Return the offset of the last message of each delivery."""
        return {message.delivery: message.offset for message in self.messages}

    def note_failed(self, _message: Message, failure: Failure) -> None:
        """Have the broker record how often each message has failed, and show why."""
        for message in self.messages:
            own = replace(failure, attempts=message.attempt)
            message.delivery.note_failed(message, own)  # type: ignore[union-attr]

    def note_hangs(self, _message: Message, why: Failure, running_ms: int) -> None:
        """Have the broker show, at the first message, for how long the batch has been with its
        handler.
        """
        first = self.messages[0]
        failure = replace(why, attempts=first.attempt - 1)
        first.delivery.note_hangs(first, failure, running_ms)  # type: ignore[union-attr]

    def forget(self, _count: int) -> None:
        """Note that no message will be handled here."""
        if not self.acked_each:
            self.client.forget(len(self.messages))
            return
        for message in self.messages:
            message.delivery.forget(1)  # type: ignore[union-attr]

    # ── smaller batches ───────────────────────────────────────────────────────────────────────────
    def split(self) -> list[Message]:
        """
        Keep the first half, and return the messages of the other one, which may be empty.

        Messages of one key stay together; if there is one key only, the older messages are kept.
        """
        ordered = bool(self.keys)
        units = [(message.key if ordered else b"") or message.offset for message in self.messages]
        distinct = list(dict.fromkeys(units))
        if len(distinct) == 1:
            middle = (len(self.messages) + 1) // 2
            kept, rest = self.messages[:middle], self.messages[middle:]
        else:
            first = set(distinct[: (len(distinct) + 1) // 2])
            pairs = list(zip(self.messages, units, strict=True))
            kept = [message for message, unit in pairs if unit in first]
            rest = [message for message, unit in pairs if unit not in first]
        self.messages = kept
        if ordered:
            self._keys = {message.key for message in kept if message.key}
        return rest

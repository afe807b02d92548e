"""Decodes messages for readers, which have neither a lease nor acks. Pure."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from ...protocol.batch import batch_starts, columns
from ...protocol.codecs.codec import Codec
from ...protocol.message import Message, not_delivered_error
from ...protocol.routing import Partition
from ..delivery.decode import decode_messages


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """The delivery of a reader's messages: it refuses acks."""

    queue: int
    logic_start: int
    codec: Codec[Any] | None
    group: str = ""
    cursor: int = 0
    leased_id: int = 0
    exclusive: bool = False
    cluster_id: str = ""

    @property
    def is_copied(self) -> bool:
        """False: a pickled copy behaves like the original."""
        return False

    def ack(self, message: Message) -> Coroutine[Any, Any, None]:
        """Raise ClosedError: a reader's messages cannot be acked."""
        raise not_delivered_error(f"message {message.offset}")

    def nack(self, message: Message, after_s: float) -> Coroutine[Any, Any, None]:
        """Raise ClosedError: a reader's messages cannot be nacked."""
        return self.ack(message)


def read_messages(
    payload: memoryview,
    offset: int,
    *,
    subject: str,
    partition: Partition,
    codec: Codec[Any] | None,
) -> list[Message[Any]]:
    """Return the messages in a broker's reply, starting at a physical offset."""
    delivery = ReadFrom(partition.queue, partition.logic_start, codec)
    messages: list[Message[Any]] = []
    for start, header in batch_starts(payload):
        batch = columns(payload, header, start)
        decoded = decode_messages(batch, header, subject, partition.partition_id, 0, delivery)
        messages += decoded[max(offset - header.base_offset, 0) :]
    return messages

"""Messages that are only read: they are decoded from a broker's answer, without a lease or acks.
Pure.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from ...protocol.batch import batch_starts, columns
from ...protocol.codecs.codec import Codec
from ...protocol.message import Message, not_handed_out
from ...protocol.routing import Partition
from ..delivery.decode import decode_messages


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """The delivery of messages that are only read: it takes no acks."""

    queue: int
    logic_start: int
    codec: Codec[Any] | None
    group: str = ""
    cursor: int = 0
    leased_id: int = 0
    exclusive: bool = False

    @property
    def is_copied(self) -> bool:
        """Return True; see `Delivery`: nothing of it changes."""
        return False

    def ack(self, message: Message) -> Coroutine[Any, Any, None]:
        """Refuse the ack: raise ClosedError."""
        raise not_handed_out(f"message {message.offset}")

    def nack(self, message: Message, after_s: float) -> Coroutine[Any, Any, None]:
        """Refuse the return of the message: raise ClosedError."""
        return self.ack(message)


def read_messages(
    payload: memoryview,
    offset: int,
    *,
    subject: str,
    partition: Partition,
    codec: Codec[Any] | None,
) -> list[Message[Any]]:
    """Return the messages of a payload from a physical offset on."""
    delivery = ReadFrom(partition.queue, partition.logic_start, codec)
    messages: list[Message[Any]] = []
    for start, header in batch_starts(payload):
        batch = columns(payload, header, start)
        whole = decode_messages(batch, header, subject, partition.partition_id, 0, delivery)
        messages += whole[max(offset - header.base_offset, 0) :]
    return messages

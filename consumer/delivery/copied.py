"""The delivery of a message that was copied into another process. Pure."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from ...protocol.codecs.codec import Codec
from ...protocol.errors import ClosedError
from ...protocol.message import Delivery, Message


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class CopiedDelivery:
    """
    The delivery of a pickled message: a snapshot of the real delivery, without the client that
    receives acks.

    Compared by identity, because a sink keeps state for each delivery object.
    """

    queue: int
    logic_start: int
    codec: Codec[Any] | None
    group: str
    cursor: int
    leased_id: int
    exclusive: bool
    cluster_id: str

    @property
    def is_copied(self) -> bool:
        """True: this is the delivery of a copy."""
        return True

    def refusal(self, message: Message) -> ClosedError:
        """Return the error for an ack or nack of a copied message."""
        error = ClosedError(
            f"this is a copy of message {message.offset} of partition "
            f"{message.partition_id}, made by pickle"
        )
        error.hint = (
            "Ack or give back the message itself, in the process whose consumer delivered it."
        )
        return error

    def ack(self, message: Message) -> Coroutine[Any, Any, None]:
        """Raise ClosedError: a copy cannot be acked."""
        raise self.refusal(message)

    def nack(self, message: Message, after_s: float) -> Coroutine[Any, Any, None]:
        """Raise ClosedError: a copy cannot be nacked."""
        raise self.refusal(message)


def copied_delivery(delivery: Delivery) -> tuple[type[CopiedDelivery], tuple[Any, ...]]:
    """Return the value that `__reduce_ex__` should return for `delivery`. If its codec cannot be
    pickled, pickling raises the codec's error.
    """
    return CopiedDelivery, (
        delivery.queue,
        delivery.logic_start,
        delivery.codec,
        delivery.group,
        delivery.cursor,
        delivery.leased_id,
        delivery.exclusive,
        delivery.cluster_id,
    )

"""The delivery of a copied message in another process. Pure."""

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
    The delivery of a message that was pickled: the state of the real one at that time, without the
    client that takes acks.

    A sink keeps its state of a delivery for as long as the delivery lives, so deliveries are
    compared by identity.
    """

    queue: int
    logic_start: int
    codec: Codec[Any] | None
    group: str
    cursor: int
    leased_id: int
    exclusive: bool

    @property
    def is_copied(self) -> bool:
        """Return True; see `Delivery`."""
        return True

    def refusal(self, message: Message) -> ClosedError:
        """Make the error of an ack of a copy."""
        error = ClosedError(
            f"this is a copy of message {message.offset} of partition "
            f"{message.partition_id}, made by pickle"
        )
        error.hint = (
            "Ack or give back the message itself, in the process whose consumer delivered it."
        )
        return error

    def ack(self, message: Message) -> Coroutine[Any, Any, None]:
        """Refuse the ack: raise ClosedError."""
        raise self.refusal(message)

    def nack(self, message: Message, after_s: float) -> Coroutine[Any, Any, None]:
        """Refuse the return of the message: raise ClosedError."""
        raise self.refusal(message)


def copied_delivery(delivery: Delivery) -> tuple[type[CopiedDelivery], tuple[Any, ...]]:
    """Return the result of `__reduce_ex__` for `delivery`; a codec that cannot be pickled raises
    its own error.
    """
    return CopiedDelivery, (
        delivery.queue,
        delivery.logic_start,
        delivery.codec,
        delivery.group,
        delivery.cursor,
        delivery.leased_id,
        delivery.exclusive,
    )

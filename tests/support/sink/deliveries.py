"""Messages as a consumer of a group gets them, without a consumer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keylane import Message


@dataclass(eq=False)
class GroupDelivery:
    """What a message has of the client that delivered it."""

    group: str = "g"
    cursor: int = 0
    exclusive: bool = True
    leased_id: int = 7
    cluster_id: str = "5ea"
    queue: int = 0
    logic_start: int = 0
    codec: Any = None
    is_copied: bool = False

    async def ack(self, message: Message) -> None:
        raise AssertionError("acks are not of this test")

    async def nack(self, message: Message, after_s: float) -> None:
        raise AssertionError("acks are not of this test")


def delivered(
    offset: int,
    *,
    token: int = 1,
    partition_id: int = 7,
    key: bytes = b"k",
    value: bytes = b"v",
    delivery: GroupDelivery | None = None,
) -> Message:
    """A message of subject `s`."""
    by = GroupDelivery(leased_id=partition_id) if delivery is None else delivery
    return Message("s", key, value, offset, partition_id, 0, token, delivery=by)

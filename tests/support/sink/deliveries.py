"""Messages as a consumer of a group gets them, without a consumer."""

from __future__ import annotations

from keylane import Message
from keylane.protocol.message import Delivery
from keylane.protocol.offsets import AckedOffsets


def group_delivery(
    group: str = "g",
    *,
    cursor: int = 0,
    exclusive: bool = True,
    leased_id: int = 7,
    cluster_id: str = "5ea",
    is_copied: bool = False,
) -> Delivery:
    """A delivery without a shell: acks are not of these tests."""
    return Delivery(
        "s",
        0,
        0,
        None,
        group,
        cluster_id,
        leased_id,
        exclusive,
        acked=AckedOffsets(cursor),
        is_copied=is_copied,
    )


def delivered(
    offset: int,
    *,
    token: int = 1,
    partition_id: int = 7,
    key: bytes = b"k",
    value: bytes = b"v",
    delivery: Delivery | None = None,
) -> Message:
    """A message of subject `s`."""
    by = group_delivery(leased_id=partition_id) if delivery is None else delivery
    return Message("s", key, value, offset, partition_id, 0, token, delivery=by)

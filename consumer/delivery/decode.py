"""Decodes the messages of a batch from its columns. Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

from ...protocol.batch import Columns, slices
from ...protocol.message import Delivery, Message
from ...protocol.record import Header


def decode_messages(
    batch: Columns[bytes] | Columns[memoryview],
    header: Header,
    subject: str,
    partition_id: int,
    token: int,
    delivery: Delivery,
) -> list[Message[Any]]:
    """
    Return every message of a batch, by offset.

    Args:
        batch: the columns of the batch; keys, values and properties are slices of `batch.blob`.
        header: has the offset of the first message.
        token: the fencing token under which the messages are delivered; 0 for messages that are
            only read.
        delivery: takes the acks of the messages.
    """
    blob, props = batch.blob, batch.property_edges
    if header.count == 1:
        (key_start, key_end), (start, end) = batch.key_edges, batch.value_edges
        return [
            Message(
                subject,
                bytes(blob[key_start:key_end]),
                bytes(blob[start:end]),
                header.base_offset,
                partition_id,
                batch.sent_at_ns[0],
                token,
                1,
                bytes(blob[props[0] : props[1]]),
                delivery,
            )
        ]
    bare = props[0] == props[-1]
    make: Callable[..., Message[Any]] = Message
    return list(
        map(
            make,
            repeat(subject),
            slices(blob, batch.key_edges),
            slices(blob, batch.value_edges),
            range(header.base_offset, header.next_offset),
            repeat(partition_id),
            batch.sent_at_ns,
            repeat(token),
            repeat(1),
            repeat(b"") if bare else slices(blob, props),
            repeat(delivery),
        )
    )

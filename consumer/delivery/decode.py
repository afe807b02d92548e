"""Decodes the columns of a batch into messages. Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

from ...protocol.batch import Columns, slice_column
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
    Return all messages of a batch in offset order.

    Args:
        batch: the columns; keys, values and properties are slices of `batch.blob`.
        header: the header, with the offset of the first message.
        token: the fencing token of the lease; 0 for a reader, which has none.
        delivery: the object that receives the messages' acks.
    """
    blob, property_edges = batch.blob, batch.property_edges
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
                bytes(blob[property_edges[0] : property_edges[1]]),
                delivery,
            )
        ]
    has_no_properties = property_edges[0] == property_edges[-1]
    make_message: Callable[..., Message[Any]] = Message
    return list(
        map(
            make_message,
            repeat(subject),
            slice_column(blob, batch.key_edges),
            slice_column(blob, batch.value_edges),
            range(header.base_offset, header.next_offset),
            repeat(partition_id),
            batch.sent_at_ns,
            repeat(token),
            repeat(1),
            repeat(b"") if has_no_properties else slice_column(blob, property_edges),
            repeat(delivery),
        )
    )

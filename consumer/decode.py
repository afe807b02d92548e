"""Decodes stored batches into messages. Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

from ..protocol.batch import Columns, batch_starts, columns, slice_column
from ..protocol.codecs.codec import Codec
from ..protocol.message import Delivery, Message
from ..protocol.record import Header
from ..protocol.routing import Partition


def decode_messages(
    batch: Columns[bytes] | Columns[memoryview],
    header: Header,
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
        delivery: what the messages have in common.
    """
    blob, property_edges = batch.blob, batch.property_edges
    if header.count == 1:
        (key_start, key_end), (start, end) = batch.key_edges, batch.value_edges
        return [
            Message(
                delivery.subject,
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
            repeat(delivery.subject),
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


def read_messages(
    payload: memoryview,
    offset: int,
    *,
    subject: str,
    partition: Partition,
    codec: Codec[Any] | None,
) -> list[Message[Any]]:
    """Return the messages in a broker's reply to a reader, which has neither a lease nor acks,
    starting at a physical offset.
    """
    delivery = Delivery(subject, partition.queue, partition.logic_start, codec)
    messages: list[Message[Any]] = []
    for start, header in batch_starts(payload):
        batch = columns(payload, header, start)
        decoded = decode_messages(batch, header, partition.partition_id, 0, delivery)
        messages += decoded[max(offset - header.base_offset, 0) :]
    return messages

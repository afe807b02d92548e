"""Messages cut out of a batch's columns.  Pure."""

from __future__ import annotations

from itertools import pairwise, repeat

from ...protocol.batch import Columns
from ...protocol.message import Delivery, Message
from ...protocol.record import Header


def cut_messages(
    cut: Columns,
    header: Header,
    subject: str,
    partition_id: int,
    token: int,
    delivery: Delivery,
) -> list[Message]:
    """Every message of the batch, by offset, handed out by `delivery` under `token`."""
    blob, props = cut.blob, cut.property_edges
    bare = props[0] == props[-1]
    return list(
        map(
            Message,
            repeat(subject),
            [blob[low:high] for low, high in pairwise(cut.key_edges)],
            [blob[low:high] for low, high in pairwise(cut.value_edges)],
            range(header.base_offset, header.next_offset),
            repeat(partition_id),
            cut.sent_at_ns,
            repeat(token),
            repeat(1),
            repeat(b"") if bare else [blob[low:high] for low, high in pairwise(props)],
            repeat(delivery),
        )
    )

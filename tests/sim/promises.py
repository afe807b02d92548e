"""What brokers stand for at any moment: which partitions are sealed, and where what is durable ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keylane.broker.store import Store
from keylane.protocol.frames import Answer, Batches, Handed, Request


def is_sealed(stores: Iterable[Store | None], partition_id: int) -> bool | None:
    """True if its broker has told its end; None if nobody who runs has it."""
    for store in stores:
        partition = None if store is None else store.state.partitions.get(partition_id)
        if partition is not None:
            return partition.ended
    return None


class DurableEnds:
    """One past the last message that a store's commits have made durable, of each partition."""

    def __init__(self, store: Store) -> None:
        found = store.state.partitions.items()
        self._ends = {number: partition.readable_offset for number, partition in found}
        self._then = store._stored
        store._stored = self._stored  # type: ignore[method-assign]

    def _stored(self, partition: Any, entry: Any) -> None:
        self._ends[entry.partition_id] = entry.base_offset + entry.count
        self._then(partition, entry)

    def told_early(self, request: Request, answer: Answer) -> str:
        """What a reader is about to be told too early; "" if all of it is durable."""
        match answer:
            case Batches():
                upto = max(answer.upto, answer.next_offset)
            case Handed():
                upto = max((end for _, end in answer.ranges), default=0)
            case _:
                return ""
        end = self._ends.get(request.partition_id, 0)
        if upto <= end:
            return ""
        return f"partition {request.partition_id} is read up to {upto}, and is durable up to {end}"

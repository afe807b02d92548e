"""A partition's log as the checker reads it: its batches and their messages, those that retention
has removed too.
"""

from __future__ import annotations

from collections.abc import Iterator

from keylane.broker.store.store import Store
from keylane.checker.events import Batched, Stored
from keylane.protocol.batch import batch_starts, columns


def read_log(store: Store, partition_id: int, start: int, end: int) -> Iterator[Batched | Stored]:
    """The batches and messages in `[start, end)`, each batch before its messages."""
    offset = start
    while offset < end:
        data, upto = store._reader.read(partition_id, offset, end, 1 << 20)
        for at, header in batch_starts(data):
            who = (header.producer_id, header.producer_epoch, header.sequence)
            yield Batched(partition_id, header.base_offset, header.count, *who)
            cut = columns(data, header, at)
            for index in range(header.count):
                key, value = (
                    cut.blob[edges[index] : edges[index + 1]]
                    for edges in (cut.key_edges, cut.value_edges)
                )
                yield Stored(partition_id, header.base_offset + index, key, value)
        offset = upto


class Removed:
    """The messages that retention has removed from a broker's logs, or was removing when the broker
    died.
    """

    def __init__(self) -> None:
        self._events: dict[int, dict[tuple[int, bool], Batched | Stored]] = {}

    def note(self, store: Store, partition_id: int, start: int, end: int) -> None:
        """Note the messages that are removed now."""
        kept = self._events.setdefault(partition_id, {})
        for event in read_log(store, partition_id, start, end):
            kept[event.offset, type(event) is Stored] = event

    def before(self, partition_id: int, first_offset: int) -> list[Batched | Stored]:
        """The removed messages before the first offset, in the order of the log."""
        kept = self._events.get(partition_id, {})
        return [kept[place] for place in sorted(kept) if place[0] < first_offset]

    def upto(self, partition_id: int) -> int:
        """The offset up to which messages were removed, or were being removed when the broker died;
        some may be there again.
        """
        return max((offset + 1 for offset, _ in self._events.get(partition_id, ())), default=0)

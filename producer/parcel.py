"""A parcel: messages of one message group that travel as one batch, and what became of them.  Pure but for its future.

    open ──roll──▶ queued ──pack──▶ in flight ──answer──▶ settled
                                      │ ▲
                                      └─┘ sent again, under the same sequence

Invariants
    A parcel keeps its sequence and its bytes from the first sending on: a repeat is the same batch.
    It settles once: with one receipt for all, with one per message (after a route change split it), or with an error.
"""

from __future__ import annotations

import asyncio

from ..protocol.batch import BYTES_PER_MESSAGE, encode_batch
from ..protocol.errors import Fate, KeylaneError
from ..protocol.message import Receipt

Outcome = Receipt | KeylaneError


class Parcel:
    """Columns of messages while they gather; then their bytes; then their fate."""

    __slots__ = (
        "_left",
        "data",
        "doubtful",
        "future",
        "keys",
        "opened_at_ms",
        "origins",
        "outcome",
        "properties",
        "reordered",
        "sequence",
        "size",
        "times",
        "tries",
        "values",
    )

    def __init__(self, future: asyncio.Future[None], *, reordered: bool = False) -> None:
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.times: list[int] = []
        self.properties: list[bytes] | None = None
        self.size = 0
        """Bytes of keys, values and properties, and of their columns."""
        self.reordered = reordered
        self.sequence = -1
        self.data: bytes | None = None
        self.tries = 0
        self.doubtful = False
        """True once a try ended without an answer: it may be stored, whatever later tries say."""
        self.opened_at_ms = 0
        self.future = future
        self.outcome: Outcome | list[Outcome | None] | None = None
        """One for all (the receipt of the first message, from which the others follow), or one of each."""
        self.origins: list[tuple[Parcel, int]] | None = None
        """Where each message's ticket looks, when these messages came out of other parcels."""
        self._left = 0

    def __len__(self) -> int:
        return len(self.values)

    def add(self, key: bytes, value: bytes, packed_properties: bytes, sent_at_ns: int) -> int:
        """Put a message at the end; returns its index."""
        index = len(self.values)
        self.keys.append(key)
        self.values.append(value)
        self.times.append(sent_at_ns)
        if packed_properties or self.properties is not None:
            self.add_properties(index, packed_properties)
        self.size += len(key) + len(value) + len(packed_properties) + BYTES_PER_MESSAGE
        return index

    def add_properties(self, index: int, packed_properties: bytes) -> None:
        """The properties of the message just added; the column begins with the first that has any."""
        if self.properties is None:
            self.properties = [b""] * index
        self.properties.append(packed_properties)

    def adopt(self, parcel: Parcel, index: int) -> None:
        """Put message `index` of another parcel at the end; its ticket learns its fate from here."""
        if self.origins is None:
            assert not len(self), "a parcel holds either its own messages or adopted ones"
            self.origins = []
        self.origins.append(parcel.origins[index] if parcel.origins else (parcel, index))
        self.doubtful = self.doubtful or parcel.doubtful
        self.reordered = self.reordered or parcel.reordered
        properties = parcel.properties[index] if parcel.properties else b""
        self.add(parcel.keys[index], parcel.values[index], properties, parcel.times[index])

    def pack(
        self, *, partition_id: int, producer_id: int, producer_epoch: int, sequence: int
    ) -> bytes:
        """The batch's bytes, made at the first call and kept."""
        if self.data is None:
            self.sequence = sequence
            self.data = encode_batch(
                partition_id=partition_id,
                sent_at_ns=self.times,
                keys=self.keys,
                values=self.values,
                properties=self.properties or (),
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                sequence=sequence,
            )
        return self.data

    def unpack(self) -> None:
        """Forget bytes and sequence: the batch was refused for good where it was sent, and goes elsewhere."""
        self.data = None
        self.sequence = -1

    def settle(self, outcome: Outcome) -> None:
        """
        All messages met this fate: stored one after another from `outcome.offset` on, or given up.
        """
        if self.origins is None:
            if not self.future.done():
                self.outcome = outcome
                self.future.set_result(None)
            return
        for index, (origin, origin_index) in enumerate(self.origins):
            origin._settle_one(origin_index, _of_message(outcome, index))

    def give_up(self, error: KeylaneError) -> None:
        """Settle with an error, whose fate is UNKNOWN if any try left it open."""
        if self.doubtful:
            error.fate = Fate.UNKNOWN
        self.settle(error)

    def _settle_one(self, index: int, outcome: Outcome) -> None:
        if not isinstance(self.outcome, list):
            self.outcome = [None] * len(self)
            self._left = len(self)
        if self.outcome[index] is None:
            self.outcome[index] = outcome
            self._left -= 1
            if not self._left and not self.future.done():
                self.future.set_result(None)

    def receipt(self, index: int) -> Receipt:
        """The receipt of one message of a settled parcel; raises the error it was given up with."""
        outcome = self.outcome
        if isinstance(outcome, list):
            found = outcome[index]
        else:
            found = outcome if outcome is None else _of_message(outcome, index)
        assert found is not None
        if isinstance(found, KeylaneError):
            found.told = True
            raise found
        return found


def _of_message(first: Outcome, index: int) -> Outcome:
    if not index or isinstance(first, KeylaneError) or first.offset < 0:
        return first
    return Receipt(
        first.partition_id, first.offset + index, first.durable, first.duplicate, first.reordered
    )

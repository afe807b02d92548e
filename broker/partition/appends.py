"""Whether a batch is stored, was stored before, or is refused: one producer's sequence on one partition.  Pure.

    sequence == next          store                     sequence > next     gap: refuse
    sequence <  next          one of the remembered batches (sequence, count, CRC of the body): duplicate
                              else: another producer uses this id, refuse
    higher epoch              begins at 0 again         lower epoch         refuse

Invariants
    A batch sent again is stored once, as long as its producer is among the PRODUCERS_PER_PARTITION_MAX latest.
    A batch is called a duplicate only if sequence, count and checksum agree; the sequence alone is not enough.
    After a refused batch the later batches of the same producer are refused too: they leave a gap, or their
    (id, epoch) is known to be used twice and stores nothing more.

A repeat has the bytes of its first sending.  So a batch that is a part of a remembered one, or spans several, is no
repeat.  Nor is a batch older than all remembered ones: a producer has at most BATCHES_IN_FLIGHT_MAX unanswered batches.

Source: Kafka's idempotent producer (KIP-98), which remembers five batches and looks at their sequences only.
"""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.errors import (
    InvalidRequestError,
    ProducerFencedError,
    SequenceGapError,
    SequenceReusedError,
)
from ...protocol.ids import MAX_I64
from ...protocol.limits import BATCHES_IN_FLIGHT_MAX
from ...protocol.record import Header

REMEMBERED_BATCHES = BATCHES_IN_FLIGHT_MAX
"""A repeat of one of these is recognized, and answered with the offset of the first."""
CRC_UNKNOWN = -1
"""Of a batch whose state was written before checksums were kept: the count alone is compared."""


class StoredBatch(NamedTuple):
    """A batch of a producer, by the sequence of its first message."""

    sequence: int
    message_count: int
    base_offset: int
    body_crc: int = CRC_UNKNOWN
    """Made by the producer; the broker stamps the header only."""

    def is_repeated_by(self, header: Header) -> bool:
        """True if the batch of `header` is this one, sent again."""
        return (
            header.sequence == self.sequence
            and header.count == self.message_count
            and self.body_crc in {header.body_crc, CRC_UNKNOWN}
        )


class ProducerState(NamedTuple):
    """Where one producer is on one partition.  Never changed, only replaced."""

    epoch: int
    next_sequence: int
    latest: tuple[StoredBatch, ...]
    """Oldest first, at most REMEMBERED_BATCHES."""


class Duplicate(NamedTuple):
    """The batch was stored before, at `base_offset`."""

    base_offset: int


def decide_append(
    producer: ProducerState | None, header: Header, *, clashed: bool = False
) -> Duplicate | None:
    """
    None to store the batch, Duplicate if it was stored before.

    Args:
        clashed: the producer's present epoch has met SequenceReusedError: it stores nothing more.

    Raises:
        SequenceGapError: not the next sequence; `expected` says which is.
        SequenceReusedError: another batch has this sequence.
        ProducerFencedError: a higher epoch has been seen.
        InvalidRequestError: the sequence does not fit 63 bits.
    """
    sequence = header.sequence
    if sequence + header.count > MAX_I64:
        raise InvalidRequestError("the sequence is too large", sequence=sequence)
    expected = 0
    same_epoch = False
    if producer is not None:
        if header.producer_epoch < producer.epoch:
            raise ProducerFencedError(epoch=header.producer_epoch, current_epoch=producer.epoch)
        same_epoch = header.producer_epoch == producer.epoch
        if same_epoch:
            expected = producer.next_sequence
    if sequence == expected and not (clashed and same_epoch):
        return None
    if sequence > expected:
        raise SequenceGapError(expected=expected, sequence=sequence, count=header.count)
    if producer is not None and same_epoch:
        for batch in producer.latest:
            if batch.is_repeated_by(header):
                return Duplicate(batch.base_offset)
    raise SequenceReusedError(sequence=sequence, count=header.count, expected=expected)


def after_append(
    producer: ProducerState | None, header: Header, *, base_offset: int
) -> ProducerState:
    """The producer's state once the batch is stored at `base_offset`."""
    stored = StoredBatch(header.sequence, header.count, base_offset, header.body_crc)
    if producer is None or header.producer_epoch != producer.epoch:
        latest: tuple[StoredBatch, ...] = (stored,)
    else:
        latest = (*producer.latest[1 - REMEMBERED_BATCHES :], stored)
    return ProducerState(header.producer_epoch, header.sequence + header.count, latest)

"""Whether a batch is stored, was stored before, or is refused: one producer's sequence on one partition.  Pure.

    sequence == next          store                     sequence + count <= next   duplicate
    sequence >  next          gap: refuse               across `next`              refuse
    higher epoch              begins at 0 again         lower epoch                refuse

Invariants
    A batch sent again is stored once, as long as its producer is among the PRODUCERS_PER_PARTITION_MAX latest.
    After a refused batch the following ones of the same producer are refused too: they leave a gap.

Source: Kafka's idempotent producer (KIP-98), which remembers five batches; ours are several in flight as well.
"""

from __future__ import annotations

from typing import NamedTuple

from ..protocol.errors import InvalidRequestError, ProducerFencedError, SequenceGapError
from ..protocol.ids import MAX_I64
from ..protocol.record import Header

REMEMBERED_BATCHES = 8
"""A retry of one of these gets its offset back; of an older one only that it was stored."""


class StoredBatch(NamedTuple):
    """A batch of a producer, by the sequence of its first message."""

    sequence: int
    message_count: int
    base_offset: int


class ProducerState(NamedTuple):
    """Where one producer is on one partition.  Never changed, only replaced."""

    epoch: int
    next_sequence: int
    latest: tuple[StoredBatch, ...]
    """Oldest first, at most REMEMBERED_BATCHES."""


class Duplicate(NamedTuple):
    """The batch was stored before, at `base_offset`; -1 if that is no longer known."""

    base_offset: int


def decide_append(producer: ProducerState | None, header: Header) -> Duplicate | None:
    """
    None to store the batch, Duplicate if it was stored before.

    Raises:
        SequenceGapError: not the next sequence; `expected` says which is.
        ProducerFencedError: a higher epoch has been seen.
        InvalidRequestError: a sequence beyond all numbers.
    """
    sequence = header.sequence
    end = sequence + header.count
    if end > MAX_I64:
        raise InvalidRequestError("the sequence is too large", sequence=sequence)
    expected = 0
    if producer is not None:
        if header.producer_epoch < producer.epoch:
            raise ProducerFencedError(epoch=header.producer_epoch, current_epoch=producer.epoch)
        if header.producer_epoch == producer.epoch:
            expected = producer.next_sequence
    if sequence == expected:
        return None
    if end <= expected:
        assert producer is not None
        return Duplicate(_offset_of(producer, sequence, end))
    raise SequenceGapError(expected=expected, sequence=sequence, count=header.count)


def _offset_of(producer: ProducerState, sequence: int, end: int) -> int:
    for batch in producer.latest:
        if batch.sequence <= sequence and end <= batch.sequence + batch.message_count:
            return batch.base_offset + sequence - batch.sequence
    return -1


def after_append(
    producer: ProducerState | None, header: Header, *, base_offset: int
) -> ProducerState:
    """The producer's state once the batch is stored at `base_offset`."""
    stored = StoredBatch(header.sequence, header.count, base_offset)
    if producer is None or header.producer_epoch != producer.epoch:
        latest: tuple[StoredBatch, ...] = (stored,)
    else:
        latest = (*producer.latest[1 - REMEMBERED_BATCHES :], stored)
    return ProducerState(header.producer_epoch, header.sequence + header.count, latest)

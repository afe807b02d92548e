"""Decides by a producer's sequence whether a batch is stored, is a duplicate, or is refused. Pure.

    sequence == next      store
    sequence >  next      gap: refuse
    sequence <  next      one of the remembered batches (sequence, count, CRC of the body):
                          duplicate; else another producer uses this id: refuse
    higher epoch          begins at 0 again
    lower epoch           refuse

    no producer (id 0)    store, and remember nothing
    numbered rows         store; if sequence < next: a remembered batch of another digest: refuse,
                          else duplicate
    an idempotency key    its first batch: store; the same epoch and count: duplicate, else refuse;
                          sequence > 0: as above, and an unknown key is a gap: refuse

Invariants
    A repeated batch is stored once, as long as its producer is among the
    PRODUCERS_PER_PARTITION_MAX latest. A batch is a duplicate only if its sequence, count and
    checksum are those of a remembered batch. After a refused batch all later batches of its
    producer are refused: either they leave a gap, or two producers use their (id, epoch), which
    then stores nothing more.

A repeated batch has the same bytes as at the first try. A batch that is a part of a remembered
batch, or spans several, is therefore not a repeat. A batch older than all remembered batches is not
a repeat either, because a producer has at most BATCHES_IN_FLIGHT_MAX unanswered batches.

Numbered rows (FLAG_NUMBERED) are the rows of a task; when the task is repeated, it writes them
again from the first one on. A batch below the next sequence therefore counts as stored, however old
it is, unless the rows differ: a remembered batch that ends where this one ends has a digest of all
rows up to there, in the place of the epoch. If the digests differ, the repeated task is not the
same one, and nothing more is stored under its id, as with two producers of one id.

An idempotency key (`protocol/http/posted.py`) has a producer id of its own, and one batch on a
partition, whose epoch is a digest of its messages. When remembered ids have to be forgotten, keys
are forgotten before producers.

Source: Kafka's idempotent producer (KIP-98), which remembers five batches and compares their
sequences only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from ...protocol.errors import (
    InvalidRequestError,
    ProducerFencedError,
    Reason,
    SequenceGapError,
    SequenceReusedError,
)
from ...protocol.ids import KEYED_IDS, MAX_I64, NO_PRODUCER
from ...protocol.limits import BATCHES_IN_FLIGHT_MAX
from ...protocol.record import FLAG_NUMBERED, Header

REMEMBERED_BATCHES = BATCHES_IN_FLIGHT_MAX
"""The number of a producer's batches that the broker remembers. A repeat of one is answered with
the offset of the first try.
"""
OFFSET_UNKNOWN = -1
"""The offset of a repeated batch of numbered rows that is older than all remembered batches."""


class StoredBatch(msgspec.Struct, frozen=True, gc=False):
    """A stored batch of a producer; `sequence` is the sequence of its first message."""

    sequence: int
    message_count: int
    base_offset: int
    body_crc: int
    """The producer's checksum of the body, which the broker never changes. For numbered rows it is
    their digest.
    """

    def is_repeated_by(self, header: Header) -> bool:
        """Return True if the batch of `header` is a repeat of this batch."""
        return (
            header.sequence == self.sequence
            and header.count == self.message_count
            and self.body_crc == header.body_crc
        )


class ProducerState(msgspec.Struct, frozen=True):
    """A producer's epoch, next sequence and remembered batches on a partition. Immutable."""

    epoch: int
    next_sequence: int
    latest: tuple[StoredBatch, ...]
    """The remembered batches, oldest first, at most REMEMBERED_BATCHES."""


class Duplicate(NamedTuple):
    """The result for a batch that was stored before, at `base_offset`."""

    base_offset: int


def decide_append(
    producer: ProducerState | None, header: Header, *, clashed: bool = False
) -> Duplicate | None:
    """
    Decide whether a batch is stored.

    Args:
        clashed: two clients use the producer's present epoch (SequenceReusedError), so it stores
            nothing more.

    Returns:
        None if the batch is to be stored, Duplicate if it was stored before.

    Raises:
        SequenceGapError: the sequence is above the next one, which is `expected`.
        SequenceReusedError: another batch has this sequence.
        ProducerFencedError: the broker has seen a higher epoch.
        InvalidRequestError: the idempotency key has a batch of other messages.
        InvalidRequestError: the sequence does not fit 63 bits.
    """
    sequence = header.sequence
    if header.producer_id >= KEYED_IDS:
        return _decide_keyed(producer, header)
    if header.producer_id == NO_PRODUCER:
        return None
    if header.flags & FLAG_NUMBERED:
        return _decide_numbered(producer, header, clashed=clashed)
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


def _decide_numbered(
    producer: ProducerState | None, header: Header, *, clashed: bool
) -> Duplicate | None:
    """Decide on a batch of numbered rows; the epoch is their digest and fences nothing."""
    sequence, end = header.sequence, header.sequence + header.count
    if end > MAX_I64:
        raise InvalidRequestError("the sequence is too large", sequence=sequence)
    expected = 0 if producer is None else producer.next_sequence
    if sequence > expected:
        raise SequenceGapError(expected=expected, sequence=sequence, count=header.count)
    if sequence == expected and not clashed:
        return None
    if producer is not None and end <= expected and not clashed:
        for batch in producer.latest:
            if batch.sequence == sequence and (batch.message_count, batch.body_crc) == (
                header.count,
                header.producer_epoch,
            ):
                return Duplicate(batch.base_offset)
        if end <= producer.latest[0].sequence:
            return Duplicate(OFFSET_UNKNOWN)
    raise SequenceReusedError(sequence=sequence, count=header.count, expected=expected)


def _decide_keyed(producer: ProducerState | None, header: Header) -> Duplicate | None:
    """Decide on a batch of an idempotency key. A batch with a sequence other than 0 only asks, and
    is never stored.
    """
    if producer is None:
        if header.sequence:
            raise SequenceGapError(expected=0, sequence=header.sequence, count=header.count)
        return None
    batch = producer.latest[0]
    if producer.epoch == header.producer_epoch and batch.message_count == header.count:
        return Duplicate(batch.base_offset)
    raise InvalidRequestError(
        Reason.IDEMPOTENCY_KEY_REUSED,
        partition_id=header.partition_id,
        base_offset=batch.base_offset,
    )


class Producers(dict[int, ProducerState]):
    """Producer id → state, ordered by append: the producer of the oldest append is first.
    Idempotency keys among them are found without a search.
    """

    __slots__ = ("_keyed",)

    def __init__(self, states: Mapping[int, ProducerState] | None = None) -> None:
        super().__init__(states or {})
        self._keyed = {number: None for number in self if number >= KEYED_IDS}
        """The ids of idempotency keys, in the same order."""

    def __setitem__(self, number: int, state: ProducerState) -> None:
        super().__setitem__(number, state)
        if number >= KEYED_IDS:
            self._keyed[number] = None

    def take(self, number: int) -> ProducerState | None:
        """Remove a producer, and return its state if it was here."""
        if number >= KEYED_IDS:
            self._keyed.pop(number, None)
        return self.pop(number, None)

    def forget(self) -> tuple[int, ProducerState]:
        """Forget the idempotency key of the oldest append or, if there are no keys, the producer of
        the oldest append.
        """
        oldest = next(iter(self._keyed or self))
        self._keyed.pop(oldest, None)
        return oldest, self.pop(oldest)


def after_append(
    producer: ProducerState | None, header: Header, *, base_offset: int
) -> ProducerState:
    """Return the producer's state once the batch is stored at `base_offset`."""
    numbered = bool(header.flags & FLAG_NUMBERED)
    epoch, crc = (
        (0, header.producer_epoch) if numbered else (header.producer_epoch, header.body_crc)
    )
    stored = StoredBatch(header.sequence, header.count, base_offset, crc)
    if producer is None or epoch != producer.epoch:
        latest: tuple[StoredBatch, ...] = (stored,)
    else:
        latest = (*producer.latest[1 - REMEMBERED_BATCHES :], stored)
    return ProducerState(epoch, header.sequence + header.count, latest)

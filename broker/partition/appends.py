"""Decides from the producer's sequence whether a batch is stored, a duplicate, or refused. Pure.

    sequence == next      store
    sequence >  next      gap: refuse
    sequence <  next      equal to a remembered batch (sequence, count, CRC of the body): duplicate;
                          else another producer uses this id: refuse
    higher epoch          the sequence starts at 0 again
    lower epoch           refuse

    no producer (id 0)    store, and remember nothing
    numbered rows         store; if sequence < next: duplicate, unless the digest of a remembered
                          batch differs: refuse
    an idempotency key    the first batch: store; the same epoch and count: duplicate, else refuse;
                          sequence > 0: the same, but an unknown key is refused as a gap

Invariants
    A repeated batch is stored once, as long as its producer is among the latest
    PRODUCERS_PER_PARTITION_MAX. A batch is a duplicate only if its sequence, count and checksum
    equal those of a remembered batch. After a refused batch, all later batches of the producer
    are refused too: either they leave a gap, or two producers use the same (id, epoch), which then
    stores nothing more.

A retry sends the same bytes as the first attempt, so a batch that is part of a remembered batch, or
spans several, is not a repeat. Neither is a batch older than all remembered batches, because a
producer has at most BATCHES_IN_FLIGHT_MAX unanswered batches.

Numbered rows (FLAG_NUMBERED) are the rows of a task, all of which a repeated task writes again. A
batch below the next sequence therefore counts as stored, however old it is, unless the rows differ:
numbered batches have a digest of all rows so far instead of an epoch. If the digests of two batches
with the same end differ, they are not of the same task, and nothing more is stored under this id,
as when two producers share one.

Each idempotency key (`protocol/http/posted.py`) has its own producer id, and one batch per
partition, whose epoch is a digest of the messages. When ids must be evicted, keys are evicted
before producers.

Modelled on Kafka's idempotent producer (KIP-98), which remembers five batches and compares only
their sequences.
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
"""The number of batches that the broker remembers per producer. A remembered batch that is repeated
is answered with its original offset.
"""
OFFSET_UNKNOWN = -1
"""Stands for the offset of a repeated batch of numbered rows that is older than all remembered
batches.
"""


class StoredBatch(msgspec.Struct, frozen=True, gc=False):
    """A stored batch of a producer; `sequence` is that of its first message."""

    sequence: int
    message_count: int
    base_offset: int
    body_crc: int
    """The producer's checksum of the body, or the digest of numbered rows."""

    def is_repeated_by(self, header: Header) -> bool:
        """Return True if a batch with this header is a repeat of this batch."""
        return (
            header.sequence == self.sequence
            and header.count == self.message_count
            and self.body_crc == header.body_crc
        )


class ProducerState(msgspec.Struct, frozen=True):
    """A producer's epoch, next sequence and remembered batches in a partition. Immutable."""

    epoch: int
    next_sequence: int
    latest: tuple[StoredBatch, ...]
    """The remembered batches, oldest first, at most REMEMBERED_BATCHES."""


class Duplicate(NamedTuple):
    """The result for a batch that is already stored, at `base_offset`."""

    base_offset: int


def decide_append(
    producer: ProducerState | None, header: Header, *, is_clashed: bool = False
) -> Duplicate | None:
    """
    Decide whether a batch is stored.

    Args:
        is_clashed: True if two clients have used the producer's current epoch
            (SequenceReusedError), so nothing more is stored in this epoch.

    Returns:
        None if the batch must be stored, Duplicate if it is already stored.

    Raises:
        SequenceGapError: the sequence is above the expected one.
        SequenceReusedError: another batch has this sequence.
        ProducerFencedError: the broker has seen a higher epoch.
        InvalidRequestError: the idempotency key was used for other messages, or the sequence does
            not fit into 63 bits.
    """
    sequence = header.sequence
    if header.producer_id >= KEYED_IDS:
        return _decide_keyed(producer, header)
    if header.producer_id == NO_PRODUCER:
        return None
    if header.flags & FLAG_NUMBERED:
        return _decide_numbered(producer, header, is_clashed=is_clashed)
    if sequence + header.count > MAX_I64:
        raise InvalidRequestError("the sequence is too large", sequence=sequence)
    expected_sequence = 0
    same_epoch = False
    if producer is not None:
        if header.producer_epoch < producer.epoch:
            raise ProducerFencedError(epoch=header.producer_epoch, current_epoch=producer.epoch)
        same_epoch = header.producer_epoch == producer.epoch
        if same_epoch:
            expected_sequence = producer.next_sequence
    if sequence == expected_sequence and not (is_clashed and same_epoch):
        return None
    if sequence > expected_sequence:
        raise SequenceGapError(expected=expected_sequence, sequence=sequence, count=header.count)
    if producer is not None and same_epoch:
        for batch in producer.latest:
            if batch.is_repeated_by(header):
                return Duplicate(batch.base_offset)
    raise SequenceReusedError(sequence=sequence, count=header.count, expected=expected_sequence)


def _decide_numbered(
    producer: ProducerState | None, header: Header, *, is_clashed: bool
) -> Duplicate | None:
    """Return a Duplicate if a batch of numbered rows is already stored, or None if it must be
    stored. Its epoch field contains a digest, so it does not fence the producer.
    """
    sequence, end = header.sequence, header.sequence + header.count
    if end > MAX_I64:
        raise InvalidRequestError("the sequence is too large", sequence=sequence)
    expected_sequence = 0 if producer is None else producer.next_sequence
    if sequence > expected_sequence:
        raise SequenceGapError(expected=expected_sequence, sequence=sequence, count=header.count)
    if sequence == expected_sequence and not is_clashed:
        return None
    if producer is not None and end <= expected_sequence and not is_clashed:
        for batch in producer.latest:
            if batch.sequence == sequence and (batch.message_count, batch.body_crc) == (
                header.count,
                header.producer_epoch,
            ):
                return Duplicate(batch.base_offset)
        if end <= producer.latest[0].sequence:
            return Duplicate(OFFSET_UNKNOWN)
    raise SequenceReusedError(sequence=sequence, count=header.count, expected=expected_sequence)


def _decide_keyed(producer: ProducerState | None, header: Header) -> Duplicate | None:
    """Decide on a batch with an idempotency key. A batch whose sequence is not 0 is only a query,
    and is never stored.
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
    """Maps producer ids to states, ordered by the last append, the oldest first. Tracks idempotency
    keys separately, because they are evicted first.
    """

    __slots__ = ("_keyed_ids",)

    def __init__(self, states: Mapping[int, ProducerState] | None = None) -> None:
        super().__init__(states or {})
        self._keyed_ids = {producer_id: None for producer_id in self if producer_id >= KEYED_IDS}
        """The ids that belong to idempotency keys, in the same order."""

    def __setitem__(self, producer_id: int, state: ProducerState) -> None:
        super().__setitem__(producer_id, state)
        if producer_id >= KEYED_IDS:
            self._keyed_ids[producer_id] = None

    def remove_state(self, producer_id: int) -> ProducerState | None:
        """Remove a producer if it is present. Return its state, or None."""
        if producer_id >= KEYED_IDS:
            self._keyed_ids.pop(producer_id, None)
        return self.pop(producer_id, None)

    def remove_oldest(self) -> tuple[int, ProducerState]:
        """Remove the oldest idempotency key or, if there is none, the oldest producer. Return its
        id and state.
        """
        oldest = next(iter(self._keyed_ids or self))
        self._keyed_ids.pop(oldest, None)
        return oldest, self.pop(oldest)


def after_append(
    producer: ProducerState | None, header: Header, *, base_offset: int
) -> ProducerState:
    """Return the producer's state after a batch was stored at `base_offset`."""
    is_numbered = bool(header.flags & FLAG_NUMBERED)
    epoch, crc = (
        (0, header.producer_epoch) if is_numbered else (header.producer_epoch, header.body_crc)
    )
    stored_batch = StoredBatch(header.sequence, header.count, base_offset, crc)
    if producer is None or epoch != producer.epoch:
        latest: tuple[StoredBatch, ...] = (stored_batch,)
    else:
        latest = (*producer.latest[1 - REMEMBERED_BATCHES :], stored_batch)
    return ProducerState(epoch, header.sequence + header.count, latest)

"""Rows of the outbox, and the batches in which they are sent. Pure.

A batch is recorded in the database before it is sent. Its bytes follow from its record and its
rows, so every process that has the lease sends the same bytes, and the broker recognizes a batch
that it has already stored.

Decides what happens to the batches of a partition after the oldest of them failed.

| the answer to the oldest batch | it may be stored | it is certainly not stored |
| --- | --- | --- |
| the partition is sealed | RETURN: the answer proves that it is not stored | RETURN |
| a message is over the partition's limit | RETURN: the same | RETURN |
| its loss is accepted, or its subject is deleted | GIVE_UP | RETURN |
| a gap, a used sequence, a higher epoch | GIVE_UP: the broker does not know | RETURN |
| anything else, and the partition is no longer in the route | AGAIN | RETURN |
| anything else | AGAIN | AGAIN |

If a batch is not stored, no batch after it can be stored, because the broker refuses gaps.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from ..protocol.batch import encode_batch
from ..protocol.errors import (
    KeylaneError,
    MessageTooLargeError,
    ProducerFencedError,
    SequenceGapError,
    SequenceReusedError,
    StaleRouteError,
)


class OutboxRow(NamedTuple):
    """A message that waits in the table."""

    id: int
    subject: str
    logical: int
    """The logical partition; drawn at random when a message without a key was added."""
    key: bytes
    value: bytes
    properties: bytes
    added_at_ns: int
    """Time of the process that added the row, in nanoseconds since 1970."""

    @property
    def size(self) -> int:
        """Bytes of key, value and properties."""
        return len(self.key) + len(self.value) + len(self.properties)


class SendSession(NamedTuple):
    """The identity under which one holder of the lease sends batches to one partition."""

    producer_id: int
    epoch: int


@dataclass(slots=True, eq=False)
class OutboxBatch:
    """Rows of one partition, which are sent together in the order of their ids."""

    subject: str
    partition_id: int
    session: SendSession
    sequence: int
    rows: list[OutboxRow]
    doubtful: bool = False
    """True if the batch may be stored: a try ended without an answer, or another process recorded
    it.
    """
    _data: bytes = field(default=b"", repr=False)

    @property
    def id(self) -> int:
        """The id of its first row: a row is in one batch at a time."""
        return self.rows[0].id

    def encode(self) -> bytes:
        """Return the bytes of the batch, which are the same at every try."""
        if not self._data:
            self._data = encode_batch(
                partition_id=self.partition_id,
                sent_at_ns=[row.added_at_ns for row in self.rows],
                keys=[row.key for row in self.rows],
                values=[row.value for row in self.rows],
                properties=[row.properties for row in self.rows],
                producer_id=self.session.producer_id,
                producer_epoch=self.session.epoch,
                sequence=self.sequence,
            )
        return self._data


class SendStep(enum.Enum):
    """The next step for the unsettled batches of a partition."""

    AGAIN = "the same bytes are sent again, after a pause"
    RETURN = "no batch is stored: all rows wait again, and are sent by the latest route"
    GIVE_UP = (
        "batches that may be stored fail, with a fate that is unknown; the rows of the others wait"
    )


_OUTCOME_LOST = (SequenceGapError, SequenceReusedError, ProducerFencedError)


def decide_send_step(error: KeylaneError, *, doubtful: bool, left: bool, gone: bool) -> SendStep:
    """
    Return the next step after the oldest batch failed with `error`.

    Args:
        doubtful: the oldest batch may be stored.
        left: the partition is not open in the latest route.
        gone: no broker can be asked about the partition any more: an operator has accepted its
            loss, or its subject is deleted.
    """
    if isinstance(error, StaleRouteError | MessageTooLargeError):
        return SendStep.RETURN
    if gone or isinstance(error, _OUTCOME_LOST):
        return SendStep.GIVE_UP if doubtful else SendStep.RETURN
    return SendStep.RETURN if left and not doubtful else SendStep.AGAIN

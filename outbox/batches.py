"""Rows of the outbox, and the batches in which they are sent. Pure.

A batch is recorded in the database before it is sent. Its bytes are determined by its record and
its rows, so every process that holds the lease sends the same bytes, and the broker recognizes a
batch that it has already stored.

`decide_send_step` decides the next step for a partition's batches after the oldest one has failed:

| the reply to the oldest batch | it may be stored | it is certainly not stored |
| --- | --- | --- |
| the partition is sealed | RETURN: the reply proves that it is not stored | RETURN |
| a message is over the partition's limit | RETURN: so does this | RETURN |
| its loss is accepted, or its subject is deleted | GIVE_UP | RETURN |
| a gap, a used sequence, a higher epoch | GIVE_UP: the broker does not know | RETURN |
| anything else, and the partition is no longer in the route | RETRY | RETURN |
| anything else | RETRY | AGAIN |

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
    """A message in the table of rows."""

    id: int
    subject: str
    logical: int
    """The logical partition, which is random for a message without a key."""
    key: bytes
    value: bytes
    properties: bytes
    added_at_ns: int
    """When the row was added, in nanoseconds since 1970, by the clock of the process that added
    it.
    """

    @property
    def size(self) -> int:
        """The size of key, value and properties together, in bytes."""
        return len(self.key) + len(self.value) + len(self.properties)


class SendSession(NamedTuple):
    """The identity under which a holder of the lease sends batches to a partition."""

    producer_id: int
    epoch: int


@dataclass(slots=True, eq=False)
class OutboxBatch:
    """Rows of one partition that are sent together, in the order of their ids."""

    subject: str
    partition_id: int
    session: SendSession
    sequence: int
    rows: list[OutboxRow]
    doubtful: bool = False
    """True if the batch may be stored: an attempt got no reply, or another process recorded the
    batch.
    """
    _data: bytes = field(default=b"", repr=False)

    @property
    def id(self) -> int:
        """The id of the first row, which is unique because a row is in only one batch at a time."""
        return self.rows[0].id

    def encode(self) -> bytes:
        """Return the bytes of the batch, which are the same for every attempt."""
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

    RETRY = "the same bytes are sent again, after a pause"
    RETURN = "no batch is stored: all rows wait again, and are sent by the latest route"
    GIVE_UP = (
        "batches that may be stored fail with the fate UNKNOWN; the rows of the others wait again"
    )


_OUTCOME_LOST = (SequenceGapError, SequenceReusedError, ProducerFencedError)


def decide_send_step(error: KeylaneError, *, doubtful: bool, closed: bool, gone: bool) -> SendStep:
    """
    Return the next step after the oldest batch failed with `error`.

    Args:
        doubtful: True if the oldest batch may be stored.
        closed: True if the partition is not open in the latest route.
        gone: True if no broker can answer for the partition any more, because an operator has
            accepted its loss or its subject is deleted.
    """
    if isinstance(error, StaleRouteError | MessageTooLargeError):
        return SendStep.RETURN
    if gone or isinstance(error, _OUTCOME_LOST):
        return SendStep.GIVE_UP if doubtful else SendStep.RETURN
    return SendStep.RETURN if closed and not doubtful else SendStep.RETRY

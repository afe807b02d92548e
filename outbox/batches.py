"""Rows of the outbox, and the batches in which they are sent. Pure.

A batch is recorded in the database before it is sent. Its bytes follow from its record and its
rows, so every process that has the lease sends the same bytes, and the broker recognizes a batch
that it has already stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..protocol.batch import encode_batch


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

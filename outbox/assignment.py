"""Decides which waiting rows are recorded in which batches. Pure.

Invariants
    The rows of a key are in one partition at a time: while a partition that is no longer in the
    route has unsettled batches, the rows of its range wait.
    A row is recorded after all rows of its partition that have a lower id and were read with it.
    The rows of a key with a failed row are halted, so that no newer row overtakes the failed one.
    A row over the limit of its subject is refused, and the newer rows of its key are sent. While
    the limit is not confirmed, because the route may be out of date, the row waits, and so do the
    newer rows of its key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ..protocol.batch import BYTES_PER_MESSAGE
from ..protocol.limits import LOGICAL_PARTITIONS
from ..protocol.message import message_too_large
from .batches import OutboxBatch, OutboxRow, SendSession

SubjectKey = tuple[str, bytes]


class Capacity(NamedTuple):
    """How many batches a partition takes now, and how they are numbered."""

    partition_id: int
    session: SendSession
    next_sequence: int
    batches: int
    """Number of batches that may still be recorded."""


CapacityTable = Sequence[Capacity | None]
"""A capacity for each logical partition; None for those whose rows wait."""


class SubjectRange(NamedTuple):
    """Logical partitions `[start, end)` of a subject."""

    subject: str
    start: int
    end: int


class SizeLimit(NamedTuple):
    """The limit of a subject's rows: bytes of key, value and properties."""

    bytes: int
    confirmed: bool
    """True if a metaserver reported this limit after a row over it was read."""


class RecordPlan(NamedTuple):
    """The changes that one transaction records."""

    batches: list[OutboxBatch]
    halted: list[int]
    """Ids of rows that wait behind a failed row of their key."""
    unknown: set[str]
    """Subjects whose route has not been asked for."""
    refused: dict[int, str]
    """Rows that are refused, by id, with the reason."""
    unconfirmed: set[str]
    """Subjects with a row over a limit that is not confirmed."""


def closed_ranges(tables: Mapping[str, CapacityTable]) -> list[SubjectRange]:
    """Return the ranges whose rows need not be read, because they would have to wait."""
    ranges = []
    for subject, table in tables.items():
        start = 0
        for closed, run in groupby(table, key=lambda capacity: capacity is None):
            end = start + sum(1 for _ in run)
            if closed:
                ranges.append(SubjectRange(subject, start, end))
            start = end
    return ranges


def capacity_table(
    partition_ids: Sequence[int],
    capacities: Mapping[int, Capacity],
    barred: Iterable[tuple[int, int]],
) -> list[Capacity | None]:
    """
    Return the capacity of each logical partition of a subject.

    Args:
        partition_ids: the open partition of each logical partition; empty while the route is not
            known.
        capacities: capacities of the partitions that take batches, by partition id.
        barred: the ranges of partitions that are no longer in the route and still have unsettled
            batches.
    """
    if not partition_ids:
        return [None] * LOGICAL_PARTITIONS
    table = [capacities.get(partition_id) for partition_id in partition_ids]
    for start, end in barred:
        table[start:end] = [None] * (end - start)
    return table


def assign(
    rows: Iterable[OutboxRow],
    tables: Mapping[str, CapacityTable],
    halted_keys: Collection[SubjectKey],
    *,
    limits: Mapping[str, SizeLimit],
    batch_bytes: int,
    batch_count: int,
) -> RecordPlan:
    """
    Assign rows to batches, as many as there is capacity for.

    Args:
        rows: waiting rows, in the order of their ids.
        tables: a capacity table for each subject whose route was asked for.
        halted_keys: keys that have a failed row.
        limits: size limits of the subjects whose limit is lower than that of all messages.
    """
    filling: dict[int, _Filling] = {}
    halted: list[int] = []
    unknown: set[str] = set()
    refused: dict[int, str] = {}
    waiting: set[SubjectKey] = set()
    """Keys with a row over a limit that is not confirmed."""
    for row in rows:
        table = tables.get(row.subject)
        if table is None:
            unknown.add(row.subject)
            continue
        if row.key and (row.subject, row.key) in halted_keys:
            halted.append(row.id)
            continue
        capacity = table[row.logical]
        if capacity is None or (row.key and (row.subject, row.key) in waiting):
            continue
        limit = limits.get(row.subject)
        if limit is not None and row.size > limit.bytes:
            if limit.confirmed:
                refused[row.id] = message_too_large(row.size, limit.bytes).message
            else:
                waiting.add((row.subject, row.key))
            continue
        sender = filling.get(capacity.partition_id)
        if sender is None:
            sender = filling[capacity.partition_id] = _Filling(capacity, batch_bytes, batch_count)
        sender.add(row)
    return RecordPlan(
        [batch for sender in filling.values() for batch in sender.batches],
        halted,
        unknown,
        refused,
        {subject for subject, _ in waiting},
    )


class _Filling:
    """The batches that one partition gets in this round."""

    def __init__(self, capacity: Capacity, batch_bytes: int, batch_count: int) -> None:
        self._capacity = capacity
        self._batch_bytes = batch_bytes
        self._batch_count = batch_count
        self._next_sequence = capacity.next_sequence
        self._bytes = 0
        self._rows: list[OutboxRow] = []
        """Rows of the last batch."""
        self.batches: list[OutboxBatch] = []
        self._full = False

    def add(self, row: OutboxRow) -> None:
        size = row.size + BYTES_PER_MESSAGE
        if not self._rows or self._closes_before(size):
            self._begin(row.subject)
        if self._full:
            return  # it waits, and so does every row after it
        self._rows.append(row)
        self._bytes += size
        self._next_sequence += 1

    def _closes_before(self, size: int) -> bool:
        """Return True if a row of this size begins a new batch; the largest row fits into a batch
        even under the smallest limits.
        """
        return (
            self._bytes >= self._batch_bytes
            or len(self._rows) >= self._batch_count
            or size > self._batch_bytes // 2
        )

    def _begin(self, subject: str) -> None:
        if len(self.batches) >= self._capacity.batches:
            self._full = True
            return
        self._rows = []
        self._bytes = 0
        self.batches.append(
            OutboxBatch(
                subject,
                self._capacity.partition_id,
                self._capacity.session,
                self._next_sequence,
                self._rows,
            )
        )

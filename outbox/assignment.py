"""Assigns waiting rows to batches, before the batches are recorded. Pure.

Invariants
    The rows of a key are in one partition at a time: while a partition that is no longer in the
    route has unsettled batches, the rows of its range wait. A row is recorded after all rows of its
    partition that have lower ids and were read together with it. The rows of a key with a failed
    row are halted, so that no newer row overtakes the failed one. A row over its subject's size
    limit is refused, and newer rows of its key are sent. Because the route may be out of date, the
    row and the newer rows of its key wait until the limit is confirmed.
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
    """How many batches a partition can accept now, and how they are numbered."""

    partition_id: int
    session: SendSession
    next_sequence: int
    batches: int
    """The number of further batches that may be recorded."""


CapacityTable = Sequence[Capacity | None]
"""The capacity of each logical partition; None if its rows must wait."""


class SubjectRange(NamedTuple):
    """The logical partitions `[start, end)` of a subject."""

    subject: str
    start: int
    end: int


class SizeLimit(NamedTuple):
    """The size limit of a subject's rows (key, value and properties together), in bytes."""

    bytes: int
    confirmed: bool
    """True if the limit was fetched again after a row that exceeds it was read."""


class RecordPlan(NamedTuple):
    """The changes that one transaction records."""

    batches: list[OutboxBatch]
    halted: list[int]
    """The ids of rows that wait behind a failed row of their key."""
    unknown: set[str]
    """Subjects whose route has not been fetched."""
    refused: dict[int, str]
    """The reasons for refused rows, by row id."""
    unconfirmed: set[str]
    """Subjects with a row over a limit that is not yet confirmed."""


def closed_ranges(tables: Mapping[str, CapacityTable]) -> list[SubjectRange]:
    """Return the ranges whose rows must wait, and therefore need not be read."""
    ranges = []
    for subject, table in tables.items():
        start = 0
        for is_closed, capacities in groupby(table, key=lambda capacity: capacity is None):
            end = start + sum(1 for _ in capacities)
            if is_closed:
                ranges.append(SubjectRange(subject, start, end))
            start = end
    return ranges


def capacity_table(
    partition_ids: Sequence[int],
    capacities: Mapping[int, Capacity],
    blocked_ranges: Iterable[tuple[int, int]],
) -> list[Capacity | None]:
    """
    Return the capacity of each logical partition of a subject.

    Args:
        partition_ids: the open partition of each logical partition; empty while the route is
            unknown.
        capacities: the capacities of the partitions that can accept batches, by partition id.
        blocked_ranges: the ranges of partitions that are no longer open but still have unsettled
            batches.
    """
    if not partition_ids:
        return [None] * LOGICAL_PARTITIONS
    table = [capacities.get(partition_id) for partition_id in partition_ids]
    for start, end in blocked_ranges:
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
    Assign as many rows to batches as the capacities allow.

    Args:
        rows: waiting rows, in the order of their ids.
        tables: the capacity tables of the subjects whose routes are known.
        halted_keys: keys that have a failed row.
        limits: the size limits of subjects whose limit is below the maximum for all messages.
    """
    builders: dict[int, _BatchBuilder] = {}
    halted_ids: list[int] = []
    unknown_subjects: set[str] = set()
    refusals: dict[int, str] = {}
    unconfirmed_keys: set[SubjectKey] = set()
    """Keys with a row over a limit that is not yet confirmed."""
    for row in rows:
        table = tables.get(row.subject)
        if table is None:
            unknown_subjects.add(row.subject)
            continue
        if row.key and (row.subject, row.key) in halted_keys:
            halted_ids.append(row.id)
            continue
        capacity = table[row.logical]
        if capacity is None or (row.key and (row.subject, row.key) in unconfirmed_keys):
            continue
        limit = limits.get(row.subject)
        if limit is not None and row.size > limit.bytes:
            if limit.confirmed:
                refusals[row.id] = message_too_large(row.size, limit.bytes).message
            else:
                unconfirmed_keys.add((row.subject, row.key))
            continue
        builder = builders.get(capacity.partition_id)
        if builder is None:
            builder = builders[capacity.partition_id] = _BatchBuilder(
                capacity, batch_bytes, batch_count
            )
        builder.add(row)
    return RecordPlan(
        [batch for builder in builders.values() for batch in builder.batches],
        halted_ids,
        unknown_subjects,
        refusals,
        {subject for subject, _ in unconfirmed_keys},
    )


class _BatchBuilder:
    """Builds the batches that one partition gets in a round."""

    def __init__(self, capacity: Capacity, batch_bytes: int, batch_count: int) -> None:
        self._capacity = capacity
        self._batch_bytes = batch_bytes
        self._batch_count = batch_count
        self._next_sequence = capacity.next_sequence
        self._bytes = 0
        self._rows: list[OutboxRow] = []
        """The rows of the last batch."""
        self.batches: list[OutboxBatch] = []
        self._full = False

    def add(self, row: OutboxRow) -> None:
        size = row.size + BYTES_PER_MESSAGE
        if not self._rows or self._needs_new_batch(size):
            self._begin_batch(row.subject)
        if self._full:
            return  # this row and all later ones wait
        self._rows.append(row)
        self._bytes += size
        self._next_sequence += 1

    def _needs_new_batch(self, size: int) -> bool:
        """Return True if a row of this size needs a new batch. A batch with a single row may exceed
        the limits.
        """
        return (
            self._bytes >= self._batch_bytes
            or len(self._rows) >= self._batch_count
            or size > self._batch_bytes // 2
        )

    def _begin_batch(self, subject: str) -> None:
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

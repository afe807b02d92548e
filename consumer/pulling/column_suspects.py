"""Splits Arrow data that may have killed an earlier owner's process into parts, which are handed
out one at a time. Pure.

    put ─▶ stored ─▶ next: a part, recorded as begun by its last offset ─▶ acked ─▶ the next part
        ─▶ … ─▶ take_remaining
              ╰─ it kills the process: the next owner hands it out in up to PARTS smaller parts,
                  until a part is a single row

Invariants
    The rows from the cursor to the lowest offset recorded as begun are those that the process had
    in hand when it died. Rows are handed out in offset order, and nothing overtakes a suspect. Only
    a row that was alone in its part is blamed, and has its crashes counted; a larger part never
    counts more than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..delivery.pulled_batch import PulledBatch
from .suspects import CAREFUL_MS

PARTS = 16
"""The number of smaller parts into which a part that killed its process is split. With 100,000
rows, finding the culprit takes at most five crashes.
"""
PART_BYTES_MAX = 2 << 20


@dataclass(frozen=True, slots=True)
class SuspectPart:
    """Rows that are handed out together. `last` is the offset of the last row."""

    batches: list[PulledBatch]
    last: int
    crashes: int
    """How often a process died while this row was handled alone; 0 if there are several rows."""

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(batch.count for batch in self.batches)


class ColumnSuspects:
    """
    Queues the rows of one partition while some may be suspects. Times are in milliseconds on the
    boot clock.

    Args:
        upto: the end offset of the suspects: all rows below it are suspects.
        begun: the (last offset, crashes) of each part that earlier owners started.
    """

    def __init__(self, upto: int, begun: Iterable[tuple[int, int]], *, now_ms: int) -> None:
        self._upto = upto
        self._crashes = dict(begun)
        self.until_ms = now_ms + CAREFUL_MS
        """The boot time, in milliseconds, at which the careful phase ends, except for blamed
        rows.
        """
        self._stored: deque[PulledBatch] = deque()

    def put(self, batch: PulledBatch) -> None:
        """Add a batch that has just been pulled."""
        if batch.count:
            self._stored.append(batch)

    def _next_begun(self, first: int) -> int | None:
        """Return the last offset of the next part, from `first` on, that was started and not
        finished.
        """
        return min((offset for offset in self._crashes if offset >= first), default=None)

    def is_over(self, next_offset: int, now_ms: int) -> bool:
        """Return True if the careful phase is over. `next_offset` is the first offset not pulled
        yet.
        """
        first = self._stored[0].ranges[0][0] if self._stored else next_offset
        limit_reached = first >= self._upto or now_ms >= self.until_ms
        return limit_reached and self._next_begun(first) is None

    def next(self) -> SuspectPart | None:
        """Pop the next part, or return None if it is not pulled yet."""
        if not self._stored:
            return None
        first = self._stored[0].ranges[0][0]
        begun_offset = self._next_begun(first)
        if begun_offset is None:
            return self._pop_rows(None, 0)
        rows = begun_offset + 1 - first
        crashes = self._crashes[begun_offset] if rows == 1 else 0
        return self._pop_rows(first + -(-rows // PARTS), crashes)

    def _pop_rows(self, end: int | None, crashes: int) -> SuspectPart:
        """Pop the rows below `end`, and at most PART_BYTES_MAX of stored batches."""
        batches: list[PulledBatch] = []
        size = 0
        while self._stored and (
            not batches or size + len(self._stored[0].record) <= PART_BYTES_MAX
        ):
            batch = self._stored[0]
            part = batch if end is None else batch.cut(end)
            if part.count:
                batches.append(part)
            size += len(batch.record)
            if part is not batch and batch.count:
                break
            self._stored.popleft()
        return SuspectPart(batches, batches[-1].ranges[-1][1] - 1, crashes)

    def take_remaining(self) -> list[PulledBatch]:
        """Pop all batches."""
        batches = list(self._stored)
        self._stored.clear()
        return batches

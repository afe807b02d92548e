"""Chooses the part that is handed out next from Arrow data that may have ended the process of an
earlier owner. Pure.

    put ─▶ stored ─▶ next: a part, whose last offset is begun durably ─▶ acked ─▶ the next part
        ─▶ … ─▶ rest
                           ╰─ its process ends: the next owner gets 1/PARTS of it at a time, until a
                               row is alone

Invariants
    The rows from the cursor to the lowest offset that was begun are those that the ended process
    had in hand. Rows leave in the order of their offsets, and nothing overtakes a suspect. Only a
    row that was alone in its part is accused: it counts crashes, while a larger part never has more
    than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..delivery.pulled_batch import PulledBatch
from .suspects import CAREFUL_MS

PARTS = 16
"""The number of smaller parts in which an accused part is handed out again: 100,000 rows take five
crashes at most.
"""
PART_BYTES_MAX = 2 << 20


@dataclass(frozen=True, slots=True)
class SuspectPart:
    """Rows that are handed out together; `last` is the offset of the last one."""

    batches: list[PulledBatch]
    last: int
    crashes: int
    """The number of processes that ended while this row alone was begun; 0 if it is not alone, or
    was not begun before.
    """

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return sum(batch.count for batch in self.batches)


class ColumnSuspects:
    """
    The rows of one partition while some of them may be suspects; every time is milliseconds of the
    boot clock.

    Args:
        upto: the end offset of the suspects, which are all rows below it.
        begun: (offset, crashes) of the parts that earlier owners had begun.
    """

    def __init__(self, upto: int, begun: Iterable[tuple[int, int]], *, now_ms: int) -> None:
        self._upto = upto
        self._crashes = dict(begun)
        self.until_ms = now_ms + CAREFUL_MS
        """The boot time, in milliseconds, at which the careful part ends, except for accused
        rows.
        """
        self._stored: deque[PulledBatch] = deque()

    def put(self, batch: PulledBatch) -> None:
        """Add a batch that was just pulled."""
        if batch.count:
            self._stored.append(batch)

    def _accused(self, first: int) -> int | None:
        """Return the last row of the part that was begun and has not ended, from `first` on."""
        return min((offset for offset in self._crashes if offset >= first), default=None)

    def is_over(self, next_offset: int, now_ms: int) -> bool:
        """Return True if no careful part is left; `next_offset` is the first offset that is not
        pulled.
        """
        first = self._stored[0].ranges[0][0] if self._stored else next_offset
        enough = first >= self._upto or now_ms >= self.until_ms
        return enough and self._accused(first) is None

    def next(self) -> SuspectPart | None:
        """Take the next part, or None if it is not pulled yet."""
        if not self._stored:
            return None
        first = self._stored[0].ranges[0][0]
        accused = self._accused(first)
        if accused is None:
            return self._take(None, 0)
        rows = accused + 1 - first
        crashes = self._crashes[accused] if rows == 1 else 0
        return self._take(first + -(-rows // PARTS), crashes)

    def _take(self, end: int | None, crashes: int) -> SuspectPart:
        """Take the rows below `end`; if it is None, as many as an Arrow batch may have."""
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

    def rest(self) -> list[PulledBatch]:
        """Take all batches that are left."""
        batches = list(self._stored)
        self._stored.clear()
        return batches

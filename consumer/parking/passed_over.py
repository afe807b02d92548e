"""Tracks parked messages that hold nothing back and could not be read: the others of their key are
handled first. Pure.

    read ─┬─ answered: handled
          ╰─ failed: passed over ─▶ the later rows ─▶ none left
                ─▶ all passed-over rows are requested again, after a pause

Invariant
    A source that does not answer, or has one message damaged, holds up nothing else of a loose key.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...protocol.errors import CorruptBatchError, CorruptLogError, KeylaneError
from ...protocol.ids import MAX_I64

Row = tuple[int, int, int]
"""A source, and its offsets `[start, end)`."""


class PassedOver:
    """The rows of one key that could not be read since its messages were begun from the first
    on.
    """

    def __init__(self) -> None:
        self._upto: dict[int, int] = {}
        """The offset, by source, below which nothing of it is requested."""
        self.error: KeylaneError | None = None
        """The reason why the last message could not be read; None if all could."""
        self.rows_before = 0
        """The number of rows at the front of which nothing is left: requests begin after them."""

    def __bool__(self) -> bool:
        return bool(self._upto)

    def note(self, source: int, error: KeylaneError) -> None:
        """
        Pass over the messages of a source that could not be read.

        These are all its messages, unless a batch is damaged: later ones may be whole.
        """
        end = error.end_offset if isinstance(error, CorruptLogError | CorruptBatchError) else None
        self._upto[source] = MAX_I64 if end is None else max(end, self._upto.get(source, 0))
        self.error = error

    def rows_left(self, rows: Iterable[Row], count: int) -> list[Row]:
        """Return the first `count` messages that were not passed over, from rows that are sorted by
        source and offset.
        """
        left: list[Row] = []
        for source, start, end in rows:
            low = max(start, self._upto.get(source, 0))
            high = min(end, low + count)
            if low < high:
                left.append((source, low, high))
                count -= high - low
        return left

    def clear(self) -> None:
        """Request everything again."""
        self._upto.clear()
        self.error = None
        self.rows_before = 0

"""Parked messages that hold nothing back, and could not be read: the others of their key are
handled first.  Pure.

    read ─┬─ answered: handled
          ╰─ failed: passed over ─▶ the rows behind ─▶ none left ─▶ all that was passed over is
              asked for again, after a pause

Invariant
    A source that does not answer, or has one message damaged, holds up nothing else of a loose key.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...protocol.errors import CorruptBatchError, CorruptLogError, KeylaneError
from ...protocol.ids import MAX_I64

Row = tuple[int, int, int]
"""Source, and its offsets `[start, end)`."""


class PassedOver:
    """What could not be read of one key since its messages were begun from the first on."""

    def __init__(self) -> None:
        self._upto: dict[int, int] = {}
        """Source → the offset below which nothing of it is asked for."""
        self.error: KeylaneError | None = None
        """Why the last message could not be read; None: all could."""
        self.rows_before = 0
        """Rows at the front of which nothing is left: what is asked for begins behind them."""

    def __bool__(self) -> bool:
        return bool(self._upto)

    def note(self, source: int, error: KeylaneError) -> None:
        """
        Pass over what could not be read of a source.

        That is all of it, but where a batch is damaged: those behind it may be whole.
        """
        end = error.end_offset if isinstance(error, CorruptLogError | CorruptBatchError) else None
        self._upto[source] = MAX_I64 if end is None else max(end, self._upto.get(source, 0))
        self.error = error

    def rows_left(self, rows: Iterable[Row], count: int) -> list[Row]:
        """Of rows that are sorted by source and offset, the first `count` messages that were not
        passed over.
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
        """Ask for everything again."""
        self._upto.clear()
        self.error = None
        self.rows_before = 0

"""Tracks unreadable messages of a loose key, which are skipped until the others are handled. Pure.

    read ─┬─ succeeded: handled
          ╰─ failed: skipped ─▶ later rows ─▶ none left
                ─▶ retry all skipped rows, after a pause

Invariant
    A source that does not reply, or has a damaged message, does not block the other messages of a
    loose key.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...protocol.errors import CorruptBatchError, CorruptLogError, KeylaneError
from ...protocol.ids import MAX_I64

Row = tuple[int, int, int]
"""A source, and the offsets `[start, end)` in it."""


class SkippedMessages:
    """The unreadable rows of one key, since its redrive last started at the first row."""

    def __init__(self) -> None:
        self._skip_below: dict[int, int] = {}
        """The offset below which messages are skipped, by source."""
        self.error: KeylaneError | None = None
        """The reason why the last unreadable message could not be read; None if there is none."""
        self.rows_before = 0
        """The number of leading rows that are handled or skipped; requests start after them."""

    def __bool__(self) -> bool:
        return bool(self._skip_below)

    def add(self, source: int, error: KeylaneError) -> None:
        """Skip unreadable messages of a source: those of a damaged batch if `error` names one,
        otherwise all.
        """
        end = error.end_offset if isinstance(error, CorruptLogError | CorruptBatchError) else None
        self._skip_below[source] = (
            MAX_I64 if end is None else max(end, self._skip_below.get(source, 0))
        )
        self.error = error

    def remaining_rows(self, rows: Iterable[Row], count: int) -> list[Row]:
        """Return the first `count` messages that are not skipped; `rows` are sorted by source and
        offset.
        """
        remaining: list[Row] = []
        for source, start, end in rows:
            low = max(start, self._skip_below.get(source, 0))
            high = min(end, low + count)
            if low < high:
                remaining.append((source, low, high))
                count -= high - low
        return remaining

    def clear(self) -> None:
        """Forget the skipped messages, so that all are requested again."""
        self._skip_below.clear()
        self.error = None
        self.rows_before = 0

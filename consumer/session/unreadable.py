"""Parked messages of a loose key that cannot be read now, which are passed over until the others
are handled. Pure.

    read ─┬─ messages: handled
          ╰─ not read: passed over ─▶ later rows ─▶ none left: all are read again, after a pause

Invariant
    A source that does not answer, or has a damaged message, does not hold up the other messages of
    a key without an order.
"""

from __future__ import annotations

from ...protocol.ids import MAX_I64


class UnreadableRows:
    """What is passed over of one key since its redrive last began with the first row."""

    __slots__ = ("_below", "first_row")

    def __init__(self) -> None:
        self._below: dict[int, int] = {}
        self.first_row = 0
        """How many rows at the front are handled or passed over: lists begin after them."""

    def __bool__(self) -> bool:
        return bool(self._below)

    @property
    def below(self) -> tuple[tuple[int, int], ...]:
        """The offset below which messages are passed over, as (source, offset)."""
        return tuple(self._below.items())

    def add(self, source: int, upto: int | None, first_row: int) -> None:
        """
        Pass over messages of a source.

        Args:
            upto: the offset after what cannot be read; None: nothing of the source can.
        """
        before = self._below.get(source, 0)
        self._below[source] = MAX_I64 if upto is None else max(upto, before)
        self.first_row = first_row

    def clear(self) -> None:
        """Forget what was passed over, so that it is read again."""
        self._below.clear()
        self.first_row = 0

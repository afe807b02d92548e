"""Values that operators have put in the places of parked messages: a register for each message.
Pure.
"""

from __future__ import annotations

from .events import Value

Slot = tuple[int, int]
"""Partition and offset."""


class Edits:
    """What each edited message may be handled with, in the order of time."""

    def __init__(self) -> None:
        self._settled: dict[tuple[str, Slot], Value] = {}
        """The value of the last edit that was told as done, or that a handler has shown since."""
        self._open: dict[tuple[str, Slot], list[Value]] = {}
        """Values asked for since, or never told as done."""

    def edited(self, group: str, partition_id: int, offset: int, value: Value, done: bool) -> None:
        """See `events.Edited`."""
        place = group, (partition_id, offset)
        if done:
            self._settle(place, value)
        else:
            self._open.setdefault(place, []).append(value)

    def reset(self, group: str) -> None:
        """A reset begins: it forgets what is parked, and its edits with it."""
        for place in [place for place in self._settled if place[0] == group]:
            self._open.setdefault(place, []).append(self._settled.pop(place))

    def _settle(self, place: tuple[str, Slot], value: Value) -> None:
        """From now on the message has this value, or that of an edit whose outcome is not known."""
        self._settled[place] = value
        self._open[place].remove(value)

    def problem(self, group: str, slot: Slot, value: Value, stored: Value | None) -> str:
        """
        Why a message may not be handled with this value, "" if it may.

        Args:
            stored: what the log has there; None: nothing.
        """
        place = group, slot
        wanted = self._settled.get(place, stored)
        if stored is not None and value == wanted:
            return ""
        if value in self._open.get(place, ()):
            self._settle(place, value)
            return ""
        if place not in self._settled:
            return "where it is not"
        return f"where an operator has put {wanted!r}"

"""The values that operators have stored for parked messages: a register for each message. Pure."""

from __future__ import annotations

from .events import Value

Slot = tuple[int, int]
"""Partition and offset."""


class Edits:
    """The values with which each edited message may be handled, in the order of time."""

    def __init__(self) -> None:
        self._settled: dict[tuple[str, Slot], Value] = {}
        """Value of the last edit that was confirmed, or that a handler has shown since."""
        self._open: dict[tuple[str, Slot], list[Value]] = {}
        """Values of later edits, and of edits that were never confirmed."""

    def edited(self, group: str, partition_id: int, offset: int, value: Value, done: bool) -> None:
        """See `events.Edited`."""
        place = group, (partition_id, offset)
        if done:
            self._settle(place, value)
        else:
            self._open.setdefault(place, []).append(value)

    def reset(self, group: str) -> None:
        """Note that a reset begins, which forgets what is parked, and its edits with it."""
        for place in [place for place in self._settled if place[0] == group]:
            self._open.setdefault(place, []).append(self._settled.pop(place))

    def _settle(self, place: tuple[str, Slot], value: Value) -> None:
        """Note that the message has this value from now on, or that of an unconfirmed edit."""
        self._settled[place] = value
        self._open[place].remove(value)

    def problem(self, group: str, slot: Slot, value: Value, stored: Value | None) -> str:
        """
        Return why a message may not be handled with this value, "" if it may.

        Args:
            stored: value in the log at this place; None: there is none.
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

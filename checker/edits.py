"""Checks the values with which parked messages are handled after an operator has edited them. Each
message is a register, as in a linearizability check. Pure.
"""

from __future__ import annotations

from .events import Value

Slot = tuple[int, int]
"""A partition id and an offset."""


class Edits:
    """Tracks the values with which each edited message may currently be handled."""

    def __init__(self) -> None:
        self._confirmed_values: dict[tuple[str, Slot], Value] = {}
        """The value of the last edit that was confirmed, or that a handler has received since."""
        self._pending_values: dict[tuple[str, Slot], list[Value]] = {}
        """The values of later edits, and of edits that were never confirmed."""

    def on_edited(
        self, group: str, partition_id: int, offset: int, value: Value, done: bool
    ) -> None:
        """See `events.Edited`."""
        message = group, (partition_id, offset)
        if done:
            self._confirm(message, value)
        else:
            self._pending_values.setdefault(message, []).append(value)

    def on_reset(self, group: str) -> None:
        """Make the edits of a group uncertain, because a reset begins, which discards its parked
        messages along with their edits.
        """
        for message in [each for each in self._confirmed_values if each[0] == group]:
            self._pending_values.setdefault(message, []).append(self._confirmed_values.pop(message))

    def _confirm(self, message: tuple[str, Slot], value: Value) -> None:
        """Mark the value as current. Only edits that are still pending may replace it."""
        self._confirmed_values[message] = value
        self._pending_values[message].remove(value)

    def find_problem(self, group: str, slot: Slot, value: Value, stored: Value | None) -> str:
        """
        Return the reason why a message must not be handled with this value; "" if it may.

        Args:
            stored: the value that the log has in this slot, or None if the slot is empty.
        """
        message = group, slot
        expected_value = self._confirmed_values.get(message, stored)
        if stored is not None and value == expected_value:
            return ""
        if value in self._pending_values.get(message, ()):
            self._confirm(message, value)
            return ""
        if message not in self._confirmed_values:
            return "where the log has another value"
        return f"where an operator has stored {expected_value!r}"

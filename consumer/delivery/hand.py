"""The hand of a program while it is the only thing in hand: one message, or several that were taken
together. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...protocol.message import Message


class Hand:
    """
    The messages that one program took while it had nothing else in hand: no lane and no delivery
    has noted them.

    Most messages are acked before the next ones are taken, and cost no more than this.

    Args:
        note: notes the messages in their lanes.
    """

    __slots__ = ("_note", "message", "messages", "runs")

    def __init__(self, note: Callable[[list[Message]], None]) -> None:
        self._note = note
        self.message: Message | None = None
        """The only message, which an iteration gave."""
        self.messages: list[Message] | None = None
        """The messages that were taken together."""
        self.runs: list[tuple[Any, list[Message]]] = []
        """The same messages by delivery, each by offset."""

    def spread(self) -> None:
        """Note the messages in their lanes and at their deliveries, before anything else is done
        with any of them.
        """
        if self.message is not None:
            message = self.message
            self.message = None
            self._note([message])
            message.delivery.taken(message)  # type: ignore[union-attr]
        if self.messages is not None:
            messages = self.messages
            self.messages = None
            runs = self.runs
            self.runs = []
            self._note(messages)
            for delivery, run in runs:
                delivery.taken_all(run)

    def let_go(self) -> None:
        """
        Forget the messages and the lanes: the consumer is closed.

        A delivery refers to its hand and a message to its delivery, and the garbage collector does
        not track messages.
        """
        self.message = None
        self.messages = None
        self.runs = []
        self._note = _note_nothing


def _note_nothing(messages: list[Message]) -> None:
    """Note nothing, for a hand whose consumer is closed."""

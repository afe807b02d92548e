"""What a program has in hand while nothing else is: a message, or several that were taken together.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...protocol.message import Message


class Hand:
    """
    What one program took while it had nothing else in hand: no lane and no delivery has noted it.

    Most messages are acked before the next ones are taken, and cost no more than this.

    Args:
        note: notes the messages in their lanes.
    """

    __slots__ = ("_note", "message", "messages", "runs")

    def __init__(self, note: Callable[[list[Message]], None]) -> None:
        self._note = note
        self.message: Message | None = None
        """The only one, which an iteration gave."""
        self.messages: list[Message] | None = None
        """Those that were taken together."""
        self.runs: list[tuple[Any, list[Message]]] = []
        """The same by delivery, each by offset."""

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
        not look into messages.
        """
        self.message = None
        self.messages = None
        self.runs = []
        self._note = _note_nothing


def _note_nothing(messages: list[Message]) -> None:
    """Of a hand whose consumer is closed."""

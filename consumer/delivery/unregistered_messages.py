"""The fast path for messages that a program takes while it has no other message in hand. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...protocol.message import Message


class UnregisteredMessages:
    """
    Messages that a program took while it had no others in hand. They are registered neither in
    lanes nor in deliveries.

    Most messages are acked before the next ones are taken, so they never need to be registered.

    Args:
        register: registers messages in the lanes of their keys.
    """

    __slots__ = ("_register_in_lanes", "message", "messages", "runs")

    def __init__(self, register: Callable[[list[Message]], None]) -> None:
        self._register_in_lanes = register
        self.message: Message | None = None
        """The message, if the program iterates over messages."""
        self.messages: list[Message] | None = None
        """The messages, if the program took several at once."""
        self.runs: list[tuple[Any, list[Message]]] = []
        """The same messages grouped by delivery, each group in offset order."""

    def register(self) -> None:
        """Register the messages in their lanes and deliveries. Called before one of them is acked
        separately or nacked.
        """
        if self.message is not None:
            message = self.message
            self.message = None
            self._register_in_lanes([message])
            message.delivery.register_delivered(message)  # type: ignore[union-attr]
        if self.messages is not None:
            messages = self.messages
            self.messages = None
            runs = self.runs
            self.runs = []
            self._register_in_lanes(messages)
            for delivery, run in runs:
                delivery.register_all_delivered(run)

    def clear(self) -> None:
        """
        Drop the messages and the callback when the consumer closes.

        This breaks a reference cycle: a message refers to its delivery and the delivery to this
        object, and messages are not tracked by the garbage collector.
        """
        self.message = None
        self.messages = None
        self.runs = []
        self._register_in_lanes = _ignore


def _ignore(messages: list[Message]) -> None:
    """Replaces the callback after the consumer is closed."""

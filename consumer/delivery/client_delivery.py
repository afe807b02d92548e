"""Some of the messages of a pull client, which are handled and end in a way of their own: stated
once what such a delivery is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...protocol.message import Message
from ...protocol.parked import Failure
from .user_acks import UserAcks


class DeliveringClient(Protocol):
    """What a delivery needs of its pull client."""

    deadline_ns: int
    group: str
    queue: int
    logic_start: int
    partition_id: int
    exclusive: bool
    codec: Any

    @property
    def cursor(self) -> int:
        """The group's cursor."""
        ...

    @property
    def note_failed(self) -> Callable[[Message, Failure], None]:
        """Has the broker keep how often a message has failed, and show why."""
        ...

    @property
    def note_hangs(self) -> Callable[[Message, Failure, int], None]:
        """Has the broker show that a message has been with its handler, or the program, for a
        number of milliseconds.
        """
        ...

    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        ...

    def forget(self, count: int) -> None:
        """Note that `count` of the messages handed out will not be handled here."""
        ...

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Set a message aside, with those of its key that wait behind it."""
        ...

    def bury(self, message: Message, failure: Failure) -> None:
        """Set a message aside alone."""
        ...

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside alone until its next try."""
        ...


class ClientDelivery(UserAcks):
    """
    A delivery of a pull client beside the client itself: a hand-out, a window of redriven messages,
    suspects.

    What never changes of the client is copied; what happens to a message is told to the client,
    unless the delivery does something else.
    """

    __slots__ = ("client", "codec", "exclusive", "group", "leased_id", "logic_start", "queue")

    client: DeliveringClient

    def __init__(self, client: DeliveringClient) -> None:
        super().__init__()
        self.client = client
        self.codec = client.codec
        self.exclusive = client.exclusive
        self.group = client.group
        self.leased_id = client.partition_id
        self.logic_start = client.logic_start
        self.queue = client.queue

    @property
    def deadline_ns(self) -> int:
        """No handler starts after it."""
        return self.client.deadline_ns

    @property
    def cursor(self) -> int:
        """The offset below which the broker has an ack of every message."""
        return self.client.cursor

    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        self.client.done(offset)

    def forget(self, count: int) -> None:
        """Note that `count` of the messages will not be handled here."""
        self.client.forget(count)

    def note_failed(self, message: Message, failure: Failure) -> None:
        """Have the broker keep how often a message has failed, and show why."""
        self.client.note_failed(message, failure)

    def note_hangs(self, message: Message, why: Failure, running_ms: int) -> None:
        """Have the broker show that a message has been with its handler, or the program, for so
        long.
        """
        self.client.note_hangs(message, why, running_ms)

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Set a message aside that failed too often, with those of its key that wait behind it."""
        self.client.park(message, failure, waiting)

    def bury(self, message: Message, failure: Failure) -> None:
        """Set a message aside alone: later ones of its key go on."""
        self.client.bury(message, failure)

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside alone until its next try: later ones of its key go on."""
        self.client.retry(message, failure, pause_ms)

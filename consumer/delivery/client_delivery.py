"""A part of a pull client's messages that is handled and ends in its own way; this module states
once what such a delivery is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...protocol.message import Message
from ...protocol.parked import Failure
from .user_acks import UserAcks


class DeliveringClient(Protocol):
    """A pull client, as seen by a delivery."""

    deadline_ns: int
    group: str
    queue: int
    logic_start: int
    partition_id: int
    exclusive: bool
    codec: Any

    @property
    def cursor(self) -> int:
        """Return the group's cursor."""
        ...

    @property
    def note_failed(self) -> Callable[[Message, Failure], None]:
        """Return a callable that has the broker record how often a message has failed, and show
        why.
        """
        ...

    @property
    def note_hangs(self) -> Callable[[Message, Failure, int], None]:
        """Return a callable that has the broker show for how many milliseconds a message has been
        with its handler or the program.
        """
        ...

    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        ...

    def forget(self, count: int) -> None:
        """Note that `count` of the messages handed out will not be handled here."""
        ...

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Set a message aside, with those of its key that wait after it."""
        ...

    def bury(self, message: Message, failure: Failure) -> None:
        """Set a message aside alone."""
        ...

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside alone until its next try."""
        ...


class ClientDelivery(UserAcks):
    """
    A delivery of a pull client other than the client itself: a hand-out, a window of redriven
    messages, or suspects.

    Constant attributes of the client are copied; the outcome of a message is reported to the
    client, unless the delivery does something else.
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
        """Return the time after which no handler starts."""
        return self.client.deadline_ns

    @property
    def cursor(self) -> int:
        """Return the offset below which the broker has an ack of every message."""
        return self.client.cursor

    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        self.client.done(offset)

    def forget(self, count: int) -> None:
        """Note that `count` of the messages will not be handled here."""
        self.client.forget(count)

    def note_failed(self, message: Message, failure: Failure) -> None:
        """Have the broker record how often a message has failed, and show why."""
        self.client.note_failed(message, failure)

    def note_hangs(self, message: Message, why: Failure, running_ms: int) -> None:
        """Have the broker show for how long a message has been with its handler or the program."""
        self.client.note_hangs(message, why, running_ms)

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Set a message aside that failed too often, with those of its key that wait after it."""
        self.client.park(message, failure, waiting)

    def bury(self, message: Message, failure: Failure) -> None:
        """Set a message aside alone, so that later ones of its key continue."""
        self.client.bury(message, failure)

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside alone until its next try, so that later ones of its key continue."""
        self.client.retry(message, failure, pause_ms)

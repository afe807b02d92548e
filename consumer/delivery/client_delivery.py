"""The base class of deliveries that handle part of a pull client's messages in a special way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...protocol.message import Message
from ...protocol.parked import Failure
from .user_acks import UserAcks


class DeliveryClient(Protocol):
    """The part of a pull client that its deliveries use."""

    deadline_ns: int
    group: str
    queue: int
    logic_start: int
    partition_id: int
    exclusive: bool
    cluster_id: str
    codec: Any

    @property
    def cursor(self) -> int:
        """The group's cursor."""
        ...

    @property
    def report_failure(self) -> Callable[[Message, Failure], None]:
        """The callback that records a failed attempt and its error at the broker."""
        ...

    @property
    def report_hang(self) -> Callable[[Message, Failure, int], None]:
        """The callback that reports to the broker how many milliseconds a message has been in its
        handler or with the program.
        """
        ...

    def mark_handled(self, offset: int) -> None:
        """Mark the message at `offset` as handled."""
        ...

    def discard_in_flight(self, count: int) -> None:
        """Stop counting `count` messages that were handed out but will not be handled by this
        consumer.
        """
        ...

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Park a message together with the later messages of its key in `waiting`."""
        ...

    def dead_letter(self, message: Message, failure: Failure) -> None:
        """Make a message a dead letter; later messages of its key continue."""
        ...

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside and retry it after `pause_ms`; later messages of its key continue."""
        ...


class ClientDelivery(UserAcks):
    """
    A delivery other than the pull client itself: a batch from a shared group, a window of redriven
    messages, or a set of suspects.

    It copies the client's constant attributes. It forwards the outcome of each message to the
    client, unless a subclass overrides that.
    """

    __slots__ = (
        "client",
        "cluster_id",
        "codec",
        "exclusive",
        "group",
        "leased_id",
        "logic_start",
        "queue",
    )

    client: DeliveryClient

    def __init__(self, client: DeliveryClient) -> None:
        super().__init__()
        self.client = client
        self.codec = client.codec
        self.exclusive = client.exclusive
        self.cluster_id = client.cluster_id
        self.group = client.group
        self.leased_id = client.partition_id
        self.logic_start = client.logic_start
        self.queue = client.queue

    @property
    def deadline_ns(self) -> int:
        """The boot time after which no handler may start."""
        return self.client.deadline_ns

    @property
    def cursor(self) -> int:
        """The offset below which the broker has acks for all messages."""
        return self.client.cursor

    def mark_handled(self, offset: int) -> None:
        """Mark the message at `offset` as handled."""
        self.client.mark_handled(offset)

    def discard_in_flight(self, count: int) -> None:
        """Stop counting `count` messages that will not be handled by this consumer."""
        self.client.discard_in_flight(count)

    def report_failure(self, message: Message, failure: Failure) -> None:
        """Record a failed attempt of a message, and its error, at the broker."""
        self.client.report_failure(message, failure)

    def report_hang(self, message: Message, failure: Failure, running_ms: int) -> None:
        """Report to the broker how long a message has been in its handler or with the program."""
        self.client.report_hang(message, failure, running_ms)

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Park a message that failed too often, together with the later messages of its key in
        `waiting`.
        """
        self.client.park(message, failure, waiting)

    def dead_letter(self, message: Message, failure: Failure) -> None:
        """Make a message a dead letter, so that later messages of its key continue."""
        self.client.dead_letter(message, failure)

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside and retry it after `pause_ms`, so that later messages of its key
        continue.
        """
        self.client.retry(message, failure, pause_ms)

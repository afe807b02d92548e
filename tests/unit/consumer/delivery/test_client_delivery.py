"""A delivery of a pull client: what it reads from the client and what it forwards."""

from __future__ import annotations

from typing import Any

from keylane.consumer.delivery.client_delivery import ClientDelivery
from keylane.protocol.message import Message
from keylane.protocol.parked import Failure

FAILURE = Failure("ValueError", "no", "c", 5, 3)


class NotingClient:
    """A pull client that records calls."""

    deadline_ns = 70
    group, queue, logic_start, partition_id, exclusive, codec = "g", 2, 100, 7, True, None
    cursor, cluster_id = 4, "5ea"

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def mark_handled(self, offset: int) -> None:
        self.told.append(("done", offset))

    def discard_in_flight(self, count: int) -> None:
        self.told.append(("forget", count))

    def report_failure(self, message: Message, failure: Failure) -> None:
        self.told.append(("failed", message.offset, failure))

    def report_hang(self, message: Message, why: Failure, running_ms: int) -> None:
        self.told.append(("hangs", message.offset, why, running_ms))

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        self.told.append(("park", message.offset, failure, waiting))

    def dead_letter(self, message: Message, failure: Failure) -> None:
        self.told.append(("dead_letter", message.offset, failure))

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        self.told.append(("retry", message.offset, failure, pause_ms))


def test_delivery_says_what_its_client_says():
    """The deadline and the cursor have their current values."""
    client = NotingClient()
    delivery = ClientDelivery(client)
    message = Message("s", b"k", b"", 5, 7, 0, delivery=delivery)
    assert (message.group, message.queue, message.logic_offset) == ("g", 2, 105)
    assert (delivery.leased_id, delivery.exclusive, delivery.codec) == (7, True, None)
    assert delivery.cluster_id == "5ea"
    assert (delivery.deadline_ns, delivery.cursor) == (70, 4)
    client.deadline_ns, client.cursor = 0, 9
    assert (delivery.deadline_ns, delivery.cursor) == (0, 9)


def test_delivery_tells_its_client_what_becomes_of_messages():
    client = NotingClient()
    delivery = ClientDelivery(client)
    message = Message("s", b"k", b"", 5, 7, 0, delivery=delivery)
    delivery.mark_handled(5)
    delivery.discard_in_flight(2)
    delivery.report_failure(message, FAILURE)
    delivery.report_hang(message, FAILURE, 9)
    delivery.park(message, FAILURE, [])
    delivery.dead_letter(message, FAILURE)
    delivery.retry(message, FAILURE, 30)
    assert client.told == [
        ("done", 5),
        ("forget", 2),
        ("failed", 5, FAILURE),
        ("hangs", 5, FAILURE, 9),
        ("park", 5, FAILURE, []),
        ("dead_letter", 5, FAILURE),
        ("retry", 5, FAILURE, 30),
    ]

"""Log lines name the subject and the group, and a key by its digest only."""

from __future__ import annotations

from keylane.consumer.log_names import consumer_name, message_name, partition_name
from keylane.protocol.message import Delivery, Message
from keylane.protocol.text import key_digest


def test_name_of_a_consumer_says_whether_it_has_a_group():
    assert consumer_name("orders", "billing") == "consumer of orders in group billing"
    assert consumer_name("orders", "") == "broadcast consumer of orders"


def test_name_of_a_partition_has_the_group_last():
    assert partition_name("orders", 3, "billing") == "orders partition 3 in group billing"
    assert partition_name("orders", 3, "") == "orders partition 3"


def test_name_of_a_message_has_its_group_and_the_digest_of_its_key():
    delivery = Delivery("orders", 0, 0, None, "billing")
    message = Message("orders", b"secret", b"", 17, 3, 0, delivery=delivery)
    digest = key_digest(b"secret")
    assert message_name(message) == f"orders partition 3 offset 17 in group billing ({digest})"
    read = Message("orders", b"", b"", 17, 3, 0)
    assert message_name(read) == "orders partition 3 offset 17 (no key)"

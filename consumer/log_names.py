"""Formats the names of consumers, partitions and messages for log lines. They are unique in a
program with several consumers. Pure.
"""

from __future__ import annotations

from typing import Any

from ..protocol.message import Message
from ..protocol.text import key_digest


def consumer_name(subject: str, group: str) -> str:
    """Return the name of a consumer, such as "consumer of orders in group billing", or "broadcast
    consumer of orders" without a group.
    """
    return f"{'' if group else 'broadcast '}consumer of {subject}{_in_group(group)}"


def partition_name(subject: str, partition_id: int, group: str) -> str:
    """Return the name of a partition, such as "orders partition 3 in group billing", or "orders
    partition 3" without a group.
    """
    return f"{subject} partition {partition_id}{_in_group(group)}"


def message_name(message: Message[Any]) -> str:
    """Return the name of a message, such as "orders partition 3 offset 17 in group billing (key
    digest 0a1b…)". Keys are never logged.
    """
    location = f"{message.subject} partition {message.partition_id} offset {message.offset}"
    group = _in_group(message.group)
    return f"{location}{group} ({key_digest(message.key)})"


def _in_group(group: str) -> str:
    return f" in group {group}" if group else ""

"""The view of scheduled messages over all brokers. Pure."""

from __future__ import annotations

from msgspec import Struct

from ..protocol.scheduled.receipt import ScheduledView


class ScheduledMessages(Struct, frozen=True, kw_only=True):
    """Messages that brokers keep for a later delivery."""

    count: int
    """Number of waiting messages at the brokers that answered."""
    messages: list[ScheduledView]
    """The messages that are delivered next, in order of delivery time."""
    problems: dict[str, str]
    """Broker group or address → reason why it was not asked or did not answer."""


def is_scheduled_id(text: str) -> bool:
    """True for 32 hexadecimal digits."""
    try:
        return len(text) == 32 and len(bytes.fromhex(text)) == 16
    except ValueError:
        return False

"""Receipts and views of scheduled messages. Pure."""

from __future__ import annotations

import enum

import msgspec


class ScheduledReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of a scheduled message, which a broker keeps durably until its delivery. Pass it
    to `cancel`.
    """

    scheduled_id: str
    subject: str
    broker_group: str
    """Broker group that keeps the message until its delivery."""
    deliver_at_ms: int
    """Time of delivery in milliseconds since 1970."""
    durable: str
    """How durable the message is; "fsync": on the broker's disk."""
    duplicate: bool = False
    """True if an earlier request with the same idempotency key has already stored the message."""


class CancelOutcome(enum.StrEnum):
    """
    The outcome of a cancellation.

    CANCELED: the message was waiting, and will never be delivered; a repeat has the same outcome.
    DELIVERED: it is stored in its subject, or on its way there.
    DROPPED: it was not delivered at its time, and never will be, because its subject was deleted,
        or accepts no message of its size.
    """

    CANCELED = "canceled"
    DELIVERED = "delivered"
    DROPPED = "dropped"


class ScheduledList(msgspec.Struct, frozen=True, kw_only=True):
    """The receipts of the scheduled messages of a request, in the same order."""

    receipts: list[ScheduledReceipt]


class CanceledScheduled(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a cancellation."""

    outcome: CancelOutcome


class ScheduledView(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduled message that a broker keeps until its delivery."""

    scheduled_id: str
    subject: str
    broker_group: str
    deliver_at_ms: int
    """Time of delivery in milliseconds since 1970."""
    size_bytes: int
    """Approximate bytes in the broker's journal."""
    due: bool
    """True if its time has passed: it is being delivered, or cannot be stored now."""
    drop: str = ""
    """Reason why it will be dropped at its time, according to the metaserver; empty if it will be
    delivered, or if no metaserver responds.
    """


class ScheduledPage(msgspec.Struct, frozen=True, kw_only=True):
    """The next scheduled messages of a broker, ordered by delivery time."""

    broker_group: str
    count: int
    """Total number of scheduled messages of the requested subject at the broker."""
    messages: list[ScheduledView]

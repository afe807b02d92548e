"""Receipts and views of scheduled messages. Pure."""

from __future__ import annotations

import enum

import msgspec


class ScheduledReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt for a scheduled message, which a broker keeps durably until it is delivered. It
    can be passed to `cancel`.
    """

    scheduled_id: str
    subject: str
    broker_group: str
    """The broker group that keeps the message until it is delivered."""
    deliver_at_ms: int
    """The time of delivery, in milliseconds since 1970."""
    durable: str
    """How durable the message is. "fsync" means that it is on the broker's disk."""
    duplicate: bool = False
    """True if an earlier request with the same idempotency key has already stored the message."""


class CancelOutcome(enum.StrEnum):
    """
    The outcome of a cancellation.

    CANCELED: the message was waiting, and will never be delivered. Repeating the call has the same
    outcome. DELIVERED: it is stored in its subject, or is about to be. DROPPED: it was not
    delivered at its time and never will be, because its subject was deleted or does not accept
    messages of its size.
    """

    CANCELED = "canceled"
    DELIVERED = "delivered"
    DROPPED = "dropped"


class ScheduledList(msgspec.Struct, frozen=True, kw_only=True):
    """The receipts for the scheduled messages of a request, in the same order."""

    receipts: list[ScheduledReceipt]


class CanceledScheduled(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a cancellation."""

    outcome: CancelOutcome


class ScheduledView(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduled message that a broker keeps until it is delivered."""

    scheduled_id: str
    subject: str
    broker_group: str
    deliver_at_ms: int
    """The time of delivery, in milliseconds since 1970."""
    size_bytes: int
    """The approximate size in the broker's log, in bytes."""
    due: bool
    """True if its time has passed: it is being delivered, or cannot be stored at present."""
    drop: str = ""
    """The reason why it will be dropped at its time, according to the metaserver; "" if it will be
    delivered or no metaserver responds.
    """


class ScheduledPage(msgspec.Struct, frozen=True, kw_only=True):
    """The next scheduled messages of a broker, ordered by delivery time."""

    broker_group: str
    count: int
    """The total number of scheduled messages for the requested subject at the broker."""
    messages: list[ScheduledView]

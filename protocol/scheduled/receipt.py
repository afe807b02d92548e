"""What a sender is told of a message that is delivered later.  Pure."""

from __future__ import annotations

import enum

import msgspec


class ScheduledReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduled message: durable at a broker, which stores it in its subject at its time.
    `cancel` takes it.
    """

    scheduled_id: str
    subject: str
    broker_group: str
    """The broker group that keeps the message until its time."""
    deliver_at_ms: int
    """Milliseconds since 1970."""
    durable: str
    """"fsync": on the broker's disk."""
    duplicate: bool = False
    """The broker had the message, of an earlier request with the same idempotency key."""


class CancelOutcome(enum.StrEnum):
    """
    What a cancel met.

    CANCELED: the message was waiting, and is never delivered; so it is again after a repeated
    cancel. DELIVERED: it is stored in its subject, or on its way there. DROPPED: its time had come,
    and it is never delivered: its subject was deleted, or takes no message of its size.
    """

    CANCELED = "canceled"
    DELIVERED = "delivered"
    DROPPED = "dropped"


class ScheduledList(msgspec.Struct, frozen=True, kw_only=True):
    """Every message of a request is kept until its time; receipts in the order of the messages."""

    receipts: list[ScheduledReceipt]


class CanceledScheduled(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a cancel."""

    outcome: CancelOutcome


class ScheduledView(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a broker keeps until its time."""

    scheduled_id: str
    subject: str
    broker_group: str
    deliver_at_ms: int
    """Milliseconds since 1970."""
    size_bytes: int
    """In the broker's journal, about."""
    due: bool
    """Its time has come: it is on its way, or cannot be stored now."""
    drop: str = ""
    """Why it will be dropped at its time, as the metaserver says now; empty if it will be stored,
    or if none answers.
    """


class ScheduledPage(msgspec.Struct, frozen=True, kw_only=True):
    """The next messages that a broker delivers, by their times."""

    broker_group: str
    count: int
    """All messages that the broker keeps, of the subject that was asked for."""
    messages: list[ScheduledView]

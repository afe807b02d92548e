"""The receipt of a message that is delivered later, and views of such messages. Pure."""

from __future__ import annotations

import enum

import msgspec


class ScheduledReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of a scheduled message, which a broker keeps durably and stores in its subject at
    its time. `cancel` takes it.
    """

    scheduled_id: str
    subject: str
    broker_group: str
    """Broker group that keeps the message until its time."""
    deliver_at_ms: int
    """Time of delivery in milliseconds since 1970."""
    durable: str
    """How durable the message is; "fsync": on the broker's disk."""
    duplicate: bool = False
    """True if an earlier request with the same idempotency key has already stored the message."""


class CancelOutcome(enum.StrEnum):
    """
    The outcome of a cancel.

    CANCELED: the message was waiting, and will never be delivered; a repeated cancel has the same
        outcome.
    DELIVERED: it is stored in its subject, or on its way there.
    DROPPED: its time has passed, and it will never be delivered, because its subject was deleted,
        or takes no message of its size.
    """

    CANCELED = "canceled"
    DELIVERED = "delivered"
    DROPPED = "dropped"


class ScheduledList(msgspec.Struct, frozen=True, kw_only=True):
    """The receipts of a request whose messages are all kept until their time, in the same order."""

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
    """Time of delivery in milliseconds since 1970."""
    size_bytes: int
    """Approximate bytes in the broker's journal."""
    due: bool
    """True if its time has passed: it is on its way, or cannot be stored now."""
    drop: str = ""
    """Reason why it will be dropped at its time, by the metaserver's present answer; empty if it
    will be stored, or if no metaserver answers.
    """


class ScheduledPage(msgspec.Struct, frozen=True, kw_only=True):
    """The next messages that a broker delivers, ordered by time."""

    broker_group: str
    count: int
    """Number of all messages of the wanted subject that the broker keeps."""
    messages: list[ScheduledView]

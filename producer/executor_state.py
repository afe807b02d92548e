"""The state of an executor: what it knows about its broker and its partition, and the events that
change this. Pure.

    broker   ANSWERS ──FAILED──▶ FAILS ──ROUTE_NEEDED──▶ REFUSES
             ANSWERED leads back to ANSWERS

    listing  OPEN ──CLOSED_IN_ROUTE──▶ CLOSED ──NOT_IN_ROUTE──▶ UNLISTED
             UNLISTED becomes CLOSED when the partition is listed again

    storing  TAKES ──SEALED──▶ ENDED
             TAKES ──LOSS_ACCEPTED──▶ LOST ──SEALED──▶ ENDED

An event changes only the parts of the state whose diagrams show it.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class MessageGroup(NamedTuple):
    """The key of an executor."""

    client_type: str
    subject: str
    partition_name: str
    broker_group: str


class SendResult(enum.Enum):
    """The result of the last attempt to send."""

    ANSWERS = "the broker stores batches"
    FAILS = "the last try failed"
    REFUSES = "the broker refused and requires a newer route: messages are held until the next try"


class RouteListing(enum.Enum):
    """How the latest route lists the partition."""

    OPEN = "open"
    CLOSED = "not open: newer messages of its range wait until its own messages are settled"
    UNLISTED = "not listed: no broker serves it any longer"


class StorageState(enum.Enum):
    """Whether the partition still stores messages."""

    TAKES = "it stores batches, as far as is known"
    LOST = "an operator has accepted its loss; its messages have not left yet"
    ENDED = "it stores nothing more, and all messages have left"


class ExecutorEvent(enum.Enum):
    """The outcome of an attempt, or news about the partition from a route or the history."""

    ANSWERED = "a batch was stored, or a channel opened while there was nothing to send"
    FAILED = "a try failed"
    ROUTE_NEEDED = "the failed request requires a newer route"
    OPEN_IN_ROUTE = "a route lists the partition as open"
    CLOSED_IN_ROUTE = "a route lists the partition as not open"
    NOT_IN_ROUTE = "a route does not list the partition"
    LOSS_ACCEPTED = "the history says that an operator has accepted the loss of the partition"
    SEALED = "the broker refused because the partition is sealed, or messages left a lost partition"


_E = ExecutorEvent
_SEND_RESULTS = {
    (SendResult.ANSWERS, _E.FAILED): SendResult.FAILS,
    (SendResult.FAILS, _E.ANSWERED): SendResult.ANSWERS,
    (SendResult.FAILS, _E.ROUTE_NEEDED): SendResult.REFUSES,
    (SendResult.REFUSES, _E.ANSWERED): SendResult.ANSWERS,
    (SendResult.REFUSES, _E.FAILED): SendResult.FAILS,
}
_LISTING = {
    (RouteListing.OPEN, _E.CLOSED_IN_ROUTE): RouteListing.CLOSED,
    (RouteListing.OPEN, _E.NOT_IN_ROUTE): RouteListing.UNLISTED,
    (RouteListing.CLOSED, _E.NOT_IN_ROUTE): RouteListing.UNLISTED,
    (RouteListing.UNLISTED, _E.CLOSED_IN_ROUTE): RouteListing.CLOSED,
    (RouteListing.UNLISTED, _E.OPEN_IN_ROUTE): RouteListing.CLOSED,
}
_STORING = {
    (StorageState.TAKES, _E.SEALED): StorageState.ENDED,
    (StorageState.TAKES, _E.LOSS_ACCEPTED): StorageState.LOST,
    (StorageState.LOST, _E.SEALED): StorageState.ENDED,
}


class ExecutorState(NamedTuple):
    """The state of an executor, in three independent parts."""

    broker: SendResult
    listing: RouteListing = RouteListing.OPEN
    storing: StorageState = StorageState.TAKES

    def apply(self, event: ExecutorEvent) -> ExecutorState:
        """Return the state after `event`; if it equals `STEADY`, return that very object."""
        state = ExecutorState(
            _SEND_RESULTS.get((self.broker, event), self.broker),
            _LISTING.get((self.listing, event), self.listing),
            _STORING.get((self.storing, event), self.storing),
        )
        return STEADY if state == STEADY else state

    @property
    def available(self) -> bool:
        """True unless the last attempt failed. While it is False, messages without a key go to
        other partitions.
        """
        return self.broker is SendResult.ANSWERS

    @property
    def refuses(self) -> bool:
        """True while messages for this partition are held until a newer route arrives."""
        return self.broker is SendResult.REFUSES

    @property
    def in_use(self) -> bool:
        """True until the partition stores nothing more and all its messages have left."""
        return self.storing is not StorageState.ENDED

    @property
    def lost(self) -> bool:
        """True from the time when the loss of the partition is accepted until its messages have
        left.
        """
        return self.storing is StorageState.LOST

    @property
    def closed(self) -> bool:
        """True once the route no longer lists the partition as open."""
        return self.listing is not RouteListing.OPEN

    @property
    def unlisted(self) -> bool:
        """True while the route does not list the partition."""
        return self.listing is RouteListing.UNLISTED

    @property
    def can_take_over(self) -> bool:
        """True while the executor may take over messages of other partitions."""
        return self.available and self.in_use and not self.closed


STEADY = ExecutorState(SendResult.ANSWERS)
"""The state of an executor whose broker replies and whose partition is open. The code that runs for
each batch compares with it by `is`.
"""

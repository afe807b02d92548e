"""What an executor knows of its broker and of its partition, and what changes that.  Pure.

    broker       ANSWERS ──FAILED──▶ FAILS ──ROUTE_NEEDED──▶ REFUSES        ANSWERED leads back to ANSWERS
    listing      OPEN ──CLOSED_IN_ROUTE──▶ LEFT ──NOT_IN_ROUTE──▶ GONE      a GONE one that is listed again is LEFT
    storing      TAKES ──SEALED──▶ ENDED                                    TAKES ──LOSS_ACCEPTED──▶ LOST ──SEALED──▶ ENDED

An event that is not drawn at a part of the state leaves that part as it is.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Reach(enum.Enum):
    """What the last try to send met."""

    ANSWERS = "the broker stores batches"
    FAILS = "it does not, since the last try"
    REFUSES = "it does not until there is a newer route: messages wait in the hold"


class Listing(enum.Enum):
    """The partition in the latest route."""

    OPEN = "open"
    LEFT = "listed and not open: what was sent is answered before newer messages of its range go"
    GONE = "not listed: no broker answers for it any more"


class Storing(enum.Enum):
    """Whether the partition can store anything more."""

    TAKES = "yes, as far as is known"
    LOST = "no: an operator has accepted its loss"
    ENDED = "no, and all messages have left it"


class ExecutorEvent(enum.Enum):
    """What an executor meets, or is told by the routes and the history that its sender follows."""

    ANSWERED = "a batch was stored, or a channel opened while there was nothing to send"
    FAILED = "a try failed"
    ROUTE_NEEDED = "what failed asks for a newer route"
    OPEN_IN_ROUTE = "a route lists the partition as open"
    CLOSED_IN_ROUTE = "a route lists the partition, and not as open"
    NOT_IN_ROUTE = "a route does not list the partition"
    LOSS_ACCEPTED = "the history says that an operator has accepted the loss of the partition"
    SEALED = "the broker stores nothing more there, or what may be stored in a lost partition is given up"


_E = ExecutorEvent
_REACH = {
    (Reach.ANSWERS, _E.FAILED): Reach.FAILS,
    (Reach.FAILS, _E.ANSWERED): Reach.ANSWERS,
    (Reach.FAILS, _E.ROUTE_NEEDED): Reach.REFUSES,
    (Reach.REFUSES, _E.ANSWERED): Reach.ANSWERS,
    (Reach.REFUSES, _E.FAILED): Reach.FAILS,
}
_LISTING = {
    (Listing.OPEN, _E.CLOSED_IN_ROUTE): Listing.LEFT,
    (Listing.OPEN, _E.NOT_IN_ROUTE): Listing.GONE,
    (Listing.LEFT, _E.NOT_IN_ROUTE): Listing.GONE,
    (Listing.GONE, _E.CLOSED_IN_ROUTE): Listing.LEFT,
    (Listing.GONE, _E.OPEN_IN_ROUTE): Listing.LEFT,
}
_STORING = {
    (Storing.TAKES, _E.SEALED): Storing.ENDED,
    (Storing.TAKES, _E.LOSS_ACCEPTED): Storing.LOST,
    (Storing.LOST, _E.SEALED): Storing.ENDED,
}


class ExecutorState(NamedTuple):
    """The state of one executor."""

    broker: Reach
    listing: Listing = Listing.OPEN
    storing: Storing = Storing.TAKES

    def after(self, event: ExecutorEvent) -> ExecutorState:
        """The state that follows `event`."""
        return ExecutorState(
            _REACH.get((self.broker, event), self.broker),
            _LISTING.get((self.listing, event), self.listing),
            _STORING.get((self.storing, event), self.storing),
        )

    @property
    def available(self) -> bool:
        """False from a failure until the broker answers again: messages without a key go elsewhere meanwhile."""
        return self.broker is Reach.ANSWERS

    @property
    def refuses(self) -> bool:
        """True while messages of its range wait for a newer route."""
        return self.broker is Reach.REFUSES

    @property
    def in_use(self) -> bool:
        """True until nothing more can be stored there and all messages have left."""
        return self.storing is not Storing.ENDED

    @property
    def lost(self) -> bool:
        """True while messages are in a partition whose loss is accepted."""
        return self.storing is Storing.LOST

    @property
    def left(self) -> bool:
        """True once the route has no such open partition."""
        return self.listing is not Listing.OPEN

    @property
    def gone(self) -> bool:
        """True while the route does not list the partition."""
        return self.listing is Listing.GONE

    @property
    def spare(self) -> bool:
        """True while the executor may take messages of other partitions."""
        return self.available and self.in_use and not self.left

"""The interface of a consumer to the shells of its partitions."""

from __future__ import annotations

from typing import Any, Protocol

from ..protocol.codecs.codec import Codec
from ..protocol.operations import SubjectHistory
from .delivery.filter import MessageFilter
from .delivery.suspect_lock import SuspectLock
from .prefetch_budget import PrefetchBudget


class ShellOwner(Protocol):
    """Is notified when its partitions change, and shares between them what a consumer has once."""

    alone: SuspectLock
    """Runs messages that may kill the process one at a time."""
    budget: PrefetchBudget
    """The prefetch budget of its partitions."""
    codec: Codec[Any] | None
    message_filter: MessageFilter | None
    """Selects the messages that it wants; None: all."""
    by_hand: bool
    """True if the program takes and acks messages itself; False with handlers."""

    @property
    def allows_redrives(self) -> bool:
        """True if parked messages can be redriven here."""
        ...

    def start_hand_over(self, client: Any) -> None:
        """Start handing over the partition of a shell."""
        ...

    async def history(self) -> SubjectHistory:
        """Return the subject's partitions, past and present."""
        ...

    def report_drained(self) -> None:
        """Send the next heartbeat now, because a partition is drained."""
        ...

    def find_broker(self) -> None:
        """Look now where the broker of a broadcast consumer's partition is: a read has failed."""
        ...

    def fail(self, error: BaseException) -> None:
        """Close the consumer because of a permanent error."""
        ...

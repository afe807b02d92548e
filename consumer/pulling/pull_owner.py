"""The interface of a consumer to its pull clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...protocol.codecs.codec import Codec
from ...protocol.message import Message
from ...protocol.operations import SubjectHistory
from ..delivery.filter import MessageFilter
from ..delivery.suspect_lock import SuspectLock
from ..prefetch_budget import PrefetchBudget


class PullOwner(Protocol):
    """Receives pulled messages, and is notified when their partitions change."""

    alone: SuspectLock
    """Runs messages that may kill the process one at a time."""
    budget: PrefetchBudget
    """The prefetch budget of its partitions."""
    codec: Codec[Any] | None
    keeps_batches: bool
    """True if it accepts batches that are not decoded."""
    message_filter: MessageFilter | None
    """Selects the messages that it wants; None: all."""

    async def takes_messages(self) -> bool:
        """Wait until it is known what the program takes. Return True for messages, False for Arrow
        batches.
        """
        ...

    @property
    def allows_redrives(self) -> bool:
        """True if parked messages can be redriven here."""
        ...

    @property
    def dead_letters_when_full(self) -> bool:
        """True if messages become dead letters when the group cannot park any more keys."""
        ...

    def hand_out_batch(self, batch: Any) -> None:
        """Accept a batch that is not decoded: a PulledBatch if `keeps_batches` is True, otherwise a
        CutBatch.
        """
        ...

    def hand_out(self, messages: list[Message]) -> None:
        """Accept messages of one partition, sorted by offset, none of which is acked."""
        ...

    @property
    def spare_capacity(self) -> int:
        """In a shared group, the number of free workers; if negative, the number of messages that
        wait for one.
        """
        ...

    def messages_in_use(self, client: Any) -> list[Message]:
        """Return the client's messages that are in a handler or in the body of the program's
        loop.
        """
        ...

    def count_unacked_delivery(self, message: Message) -> None:
        """Count a failed attempt for a shared group's message that the program did not ack in
        time.
        """
        ...

    def start_hand_over(self, client: Any) -> None:
        """Start handing over the client's partition."""
        ...

    @property
    def by_hand(self) -> bool:
        """True if the program takes and acks messages itself; False with handlers."""
        ...

    def nack(self, message: Message, after_s: float) -> list[Message]:
        """Redeliver a nacked message. Return it together with later messages of its key that are
        redelivered too.
        """
        ...

    @property
    def ready_redelivery(self) -> Message | None:
        """A message that the program may take now after a nack: the nacked one, or one that waited
        behind it; None if there is none.
        """
        ...

    def release_acked_keys(self, messages: Sequence[Message]) -> None:
        """Release the keys of messages that were acked after a nack, so that later messages can
        follow.
        """
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

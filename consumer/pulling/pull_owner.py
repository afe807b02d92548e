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
    """Receives pulled messages, and is notified of changes of their partitions."""

    alone: SuspectLock
    """Lets messages that may kill the process run alone."""
    budget: PrefetchBudget
    """The prefetch budget of its partitions."""
    codec: Codec[Any] | None
    keeps_batches: bool
    """True if it accepts batches that are not decoded."""
    message_filter: MessageFilter | None
    """Selects the messages that it wants; None: all."""

    async def takes_messages(self) -> bool:
        """Wait until it is known how the program takes messages. Return False if it takes Arrow
        batches.
        """
        ...

    @property
    def allows_redrives(self) -> bool:
        """True if parked messages can be redriven here."""
        ...

    @property
    def dead_letters_when_full(self) -> bool:
        """True if keys become dead letters when the group can park no more."""
        ...

    def hand_out_batch(self, batch: Any) -> None:
        """Accept a batch that is not decoded: a PulledBatch if it `keeps_batches`, else a
        CutBatch.
        """
        ...

    def hand_out(self, messages: list[Message]) -> None:
        """Accept messages of one partition, sorted by offset; none of them is acked."""
        ...

    @property
    def spare_capacity(self) -> int:
        """In a shared group, the number of free workers; negative if that many messages wait for
        one.
        """
        ...

    def messages_in_use(self, client: Any) -> list[Message]:
        """Return the client's messages that handlers or the body of the program's loop have."""
        ...

    def count_unacked_delivery(self, message: Message) -> None:
        """Count a failed try of a shared group's message that the program has not acked in time."""
        ...

    def start_hand_over(self, client: Any) -> None:
        """Start to hand over the client's partition."""
        ...

    @property
    def by_hand(self) -> bool:
        """True if the program takes and acks messages itself; False with handlers."""
        ...

    def nack(self, message: Message, after_s: float) -> list[Message]:
        """Redeliver a nacked message. Return it, and later ones of its key that are redelivered
        with it.
        """
        ...

    @property
    def ready_redelivery(self) -> Message | None:
        """A message that the program may take now after a nack: the nacked one, or one that waited
        behind it; None if there is none.
        """
        ...

    def release_acked_keys(self, messages: Sequence[Message]) -> None:
        """Release the keys of messages that were acked after a nack, so that later ones follow."""
        ...

    async def history(self) -> SubjectHistory:
        """Return the subject's partitions, past and present."""
        ...

    def report_drained(self) -> None:
        """Send the next heartbeat now, because a partition is drained."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the consumer with a permanent error."""
        ...

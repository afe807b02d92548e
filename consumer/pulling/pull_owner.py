"""The consumer as seen by a pull client: it takes pulled messages, and is notified of changes of
the partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...protocol.codecs.codec import Codec
from ...protocol.message import Message
from ...protocol.operations import SubjectHistory
from ..delivery.alone_turn import AloneTurn
from ..delivery.filter import MessageFilter
from ..pull_room import PrefetchBudget


class PullOwner(Protocol):
    """The consumer as seen by a pull client."""

    alone: AloneTurn
    """The turn of messages that may end the process."""
    budget: PrefetchBudget
    """The room for bytes that its partitions have pulled and not opened."""
    codec: Codec[Any] | None
    keeps_batches: bool
    """True if it takes batches that are not opened."""
    wanted: MessageFilter | None
    """The filter of the messages that it wants; None: all."""

    async def takes_messages(self) -> bool:
        """Wait until it is known how the program takes messages, and return False if it takes Arrow
        data.
        """
        ...

    @property
    def redrives(self) -> bool:
        """Return whether it takes parked messages that are handled again."""
        ...

    @property
    def buries_when_full(self) -> bool:
        """Return whether keys become dead letters where the group can park no more."""
        ...

    def hand_out_batch(self, batch: Any) -> None:
        """Take a batch that is not opened: a PulledBatch if it `keeps_batches`, otherwise a
        CutBatch.
        """
        ...

    def hand_out(self, messages: list[Message]) -> None:
        """Take messages of one partition, by offset, without those that are already acked."""
        ...

    @property
    def spare(self) -> int:
        """Return, for a shared group, the number of further messages for which a worker is free; if
        it is negative, that many wait for a worker.
        """
        ...

    def held(self, client: Any) -> list[Message]:
        """Return the client's messages that are with handlers, or with the body of the program's
        loop.
        """
        ...

    def passed_over(self, message: Message) -> None:
        """Note that the program has not acked a message of a shared group, which is handed out
        again.
        """
        ...

    def start_hand_over(self, client: Any) -> None:
        """Hand the client's partition over; the client pulls nothing more."""
        ...

    @property
    def by_hand(self) -> bool:
        """Return whether the program itself takes and acks messages; False if handlers are given
        them.
        """
        ...

    def nack(self, message: Message, after_s: float) -> list[Message]:
        """Hand a message out again that the user gave back, and return it and those that are given
        back with it.
        """
        ...

    @property
    def lying(self) -> Message | None:
        """Return a message that was given back, or waits after such a message, and that the program
        may take now; None if there is none.
        """
        ...

    def acked_again(self, messages: Sequence[Message]) -> None:
        """Note the acks of messages in hand: later ones of their keys may be handed out."""
        ...

    async def history(self) -> SubjectHistory:
        """Return every partition that the subject ever had."""
        ...

    def report_drained(self) -> None:
        """Report to the metaserver soon that a partition is drained."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the consumer with an error that no retry can help."""
        ...

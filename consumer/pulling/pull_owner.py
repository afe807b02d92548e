"""What a pull client needs of its consumer: it takes what was pulled, and is told of changes of the
partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...protocol.codecs.codec import Codec
from ...protocol.message import Message
from ...protocol.operations import SubjectHistory
from ..delivery.alone_turn import AloneTurn
from ..delivery.filter import MessageFilter
from ..pull_room import PullRoom


class PullOwner(Protocol):
    """What a pull client needs of its consumer."""

    alone: AloneTurn
    """The turn of messages that may end the process."""
    room: PullRoom
    """For what its partitions have pulled and not opened."""
    codec: Codec[Any] | None
    keeps_batches: bool
    """It takes batches that are not opened."""
    wanted: MessageFilter | None
    """Which messages it wants; None: all."""

    async def takes_messages(self) -> bool:
        """Wait until it is known how the program takes what is pulled; False: as Arrow data."""
        ...

    @property
    def redrives(self) -> bool:
        """Whether it takes parked messages that are handled again."""
        ...

    @property
    def buries_when_full(self) -> bool:
        """Whether keys become dead letters where the group can park no more."""
        ...

    def hand_out_batch(self, batch: Any) -> None:
        """Take a batch that is not opened: a PulledBatch if it `keeps_batches`, a CutBatch if
        not.
        """
        ...

    def hand_out(self, messages: list[Message]) -> None:
        """Take messages of one partition, by offset, without those acked already."""
        ...

    @property
    def spare(self) -> int:
        """Of a shared group: for how many further messages a worker is free; below 0: so many wait
        for one.
        """
        ...

    def held(self, client: Any) -> list[Message]:
        """The client's messages that are with handlers, or with the body of the program's loop."""
        ...

    def passed_over(self, message: Message) -> None:
        """Take note that the program has not acked a message of a shared group, which is handed out
        again.
        """
        ...

    def end(self, client: Any) -> None:
        """Hand the client's partition over; the client pulls nothing more."""
        ...

    @property
    def by_hand(self) -> bool:
        """Whether the program takes messages, and acks them, itself; False: handlers are given
        them.
        """
        ...

    def nack(self, message: Message, after_s: float) -> list[Message]:
        """Hand a message out again, which the user gave back; returns it and those that are given
        back with it.
        """
        ...

    @property
    def lying(self) -> Message | None:
        """A message that was given back, or waits behind one, and that the program may take now;
        None if there is none.
        """
        ...

    def acked_again(self, messages: Sequence[Message]) -> None:
        """Take note of the acks of messages in hand: later ones of their keys may be handed out."""
        ...

    async def history(self) -> SubjectHistory:
        """Every partition that the subject ever had."""
        ...

    def report_drained(self) -> None:
        """Tell the metaserver soon that a partition is drained."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the consumer with an error that no retry can help."""
        ...

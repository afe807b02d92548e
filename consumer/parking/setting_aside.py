"""Which messages of a partition are set aside, and what its broker is told of those that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...protocol.message import Message
from ...protocol.parked import Failure
from ..delivery.pulled_batch import PulledBatch
from .key_parking import KeyParking


class SettingAside:
    """The part of a pull client that parks messages, and tells of tries."""

    owner: Any
    """A PullOwner."""
    parking: KeyParking
    forget: Callable[[int], None]
    _acks: Any
    """The sender of acks."""
    _decode: Callable[..., list[Message[Any]]]
    _handled: Any
    """What is handled and not acked."""
    _tries: Any
    """Failed tries that the broker keeps."""

    def divert(self, messages: list[Message]) -> list[Message]:
        """Park those of messages that are counted as handed out whose keys are parked; returns the others."""
        if not self.parking.keys:
            return messages
        left = self._divert(messages)
        self.forget(len(messages) - len(left))
        return left

    def leave_out_parked(self, batch: PulledBatch) -> None:
        """Park the rows of a batch, which are counted as handed out, whose keys are parked."""
        if self.parking.keys:
            whole = self._decode(
                batch.record, 0, batch.header, self
            )  # their tries are counted once it is opened
            batch.keep(self.divert(batch.wanted(whole)))

    def _divert(self, messages: list[Message]) -> list[Message]:
        """Park the messages whose keys are parked, and pass over those of them that are not wanted; returns the others."""
        wanted, keys = self.owner.wanted, self.parking.keys
        if wanted is not None:
            unwanted = {
                message.offset
                for message in messages
                if message.key in keys and wanted.rejects(message)
            }
            for offset in sorted(unwanted):
                self._handled.done(offset)
            if unwanted:
                self._acks.send_soon()
            messages = [message for message in messages if message.offset not in unwanted]
        return self.parking.divert(messages)

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Set a message aside that failed too often, with those of its key that wait behind it."""
        offsets = [message.offset, *(behind.offset for behind in waiting)]
        self._tries.ended([(message.offset, message.offset + 1)])
        self.parking.park(message.key, offsets, failure)
        self.forget(len(offsets))

    def bury(self, message: Message, failure: Failure) -> None:
        """Set a message aside alone: later ones of its key go on."""
        self._tries.ended([(message.offset, message.offset + 1)])
        self.parking.park(None, [message.offset], failure)
        self.forget(1)

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside alone until its next try, in `pause_ms`: later ones of its key go on."""
        self._tries.ended([(message.offset, message.offset + 1)])
        self.parking.retry(message.offset, failure, pause_ms)
        self.forget(1)

    def blocks(self, message: Message, failure: Failure) -> None:
        """Have the broker show why a message holds others up, with the next ack."""
        self._tries.blocks(message, failure)

    def redriven_failed(self, source: int, message: Message, failure: Failure) -> None:
        """Have the broker show that a message fails again which partition `source` stores, and which was parked."""
        self._tries.redriven_failed(source, message, failure)
        self._acks.send_soon()

    def redriven_hangs(self, source: int, message: Message, why: Failure, running_ms: int) -> None:
        """As `redriven_failed`, of a message whose try does not end."""
        if self._tries.redriven_hangs(source, message, why, running_ms):
            self._acks.send_soon()

    def redriven_ended(self, source: int, offset: int) -> None:
        """Note that this message is handled, or no longer here."""
        self._tries.redriven_ended(source, offset)

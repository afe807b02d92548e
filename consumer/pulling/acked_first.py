"""Pull clients that ack messages durably before their handlers start, so that each message is
handled at most once.

    pulled ─▶ a worker takes it ─▶ ack_first ─▶ durable: its handler starts ─▶ done: uncounted
                                       ╰─ handed over, or lease ended: its handler does not start

A hand-over still waits for running handlers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ...protocol.message import Message
from ...protocol.text import counted
from .pull_client import PullClient
from .shared_client import SharedClient

log = logging.getLogger("keylane.consumer")
PAUSE_S = 0.05
"""The interval between attempts while the broker cannot accept more ranges above the cursor, in
seconds.
"""


class AckFirstClient(PullClient):
    """Pulls one partition, and acks messages before their handlers start."""

    def _begin(self) -> None:
        self._started: set[int] = set()
        """The offsets whose handlers may be running and have not ended."""
        super()._begin()

    async def ack_first(self, messages: Sequence[Message]) -> bool:
        """
        Ack messages, and wait until the acks are durable.

        Returns:
            True if their handler may start; False if the lease has ended, or the handler was
            started before.
        """
        offsets = [message.offset for message in messages]
        if not self._started.isdisjoint(offsets):
            return False
        for offset in offsets:
            self._handled.mark_handled(offset)
        self._acks.send_soon()
        while not await self.wait_for_ack_reply(max(offsets)):
            if self.lapsed:
                return False
            await asyncio.sleep(PAUSE_S)
            self._acks.send_soon()
        self._started.update(offsets)
        if self.lapsed:
            log.warning(
                "%s: the lease ended while %s acked; no handler gets these messages, as with any "
                "at-most-once loss",
                self.log_name,
                counted(len(offsets), "message was", "messages were"),
            )
            return False
        return True

    def mark_handled(self, offset: int) -> None:
        """Record that the handler of the message at `offset` has ended; it is already acked."""
        self._started.discard(offset)
        self.discard_in_flight(1)

    def mark_all_handled(self, messages: list[Message]) -> None:
        """Record that the handler of these messages has ended; they are already acked."""
        self._started.difference_update(message.offset for message in messages)
        self.discard_in_flight(len(messages))


class AckFirstSharedClient(AckFirstClient, SharedClient):
    """An `AckFirstClient` for a shared group."""

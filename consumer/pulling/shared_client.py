"""One partition of a shared group: messages that nobody else has in flight, each for a limited time.

    ACQUIRE ─▶ PULL what is free ⇄ hand out, until the hand-out's deadline ─▶ ACK       stop: flush acks ─▶ RELEASE the rest

Invariants
    No handler starts after the deadline of what was handed out: by then somebody else may have it.
    While handlers take long, empty acks tell the broker that the session lives; one that is cut off from its broker for
    the ttl may handle what somebody else has by then too.
    What is given back, forgotten or lost on the way is handed out again by the broker; nothing is handled never.
"""

from __future__ import annotations

import logging

from ...protocol.batch import batch_starts
from ...protocol.errors import OffsetOutOfRangeError
from ...protocol.frames import AcquireShared, Handed, PullShared
from ...protocol.message import Message
from ...protocol.offsets import Range
from ...protocol.record import Header
from .pull_client import PullClient

log = logging.getLogger("keylane.consumer")


class Handing:
    """What one pull brought, ours until `deadline_ns` on the boot clock."""

    __slots__ = ("_taken", "_until_ns", "holder", "logic_start", "queue")

    def __init__(self, holder: SharedClient, until_ns: int) -> None:
        self.holder = holder
        self.queue = holder.queue
        self.logic_start = holder.logic_start
        self._until_ns = until_ns
        self._taken: set[int] = set()

    @property
    def deadline_ns(self) -> int:
        """No handler starts after it; 0 once the client hands over."""
        return min(self._until_ns, self.holder.deadline_ns)

    def done(self, offset: int) -> None:
        """The message at `offset` is handled."""
        self.holder.done(offset)

    def forget(self, count: int) -> None:
        """So many of the messages are no longer waiting or running."""
        self.holder.forget(count)

    def taken(self, message: Message) -> None:
        """Iteration gave the message to the user, who is going to ack it."""
        self._taken.add(message.offset)

    async def ack(self, message: Message) -> None:
        """The user's ack; once more is harmless.  Raises LeaseLostError."""
        self.holder.check_ours(message)
        if message.offset in self._taken:
            self._taken.remove(message.offset)
            self.done(message.offset)


class SharedClient(PullClient):
    """Pulls one partition together with the other sessions of a shared group."""

    once = False
    leaves_room = True
    heeds_crowds = False  # then the broker hands out only what lets the cursor rise, and somebody has to take it

    @property
    def _exhausted(self) -> bool:
        # What others have in flight may come back: only the acks of everything are an end.
        return self.drained

    def _acquire_request(self) -> AcquireShared:
        return AcquireShared(*self._who, self._settings.ttl_ms)

    def _pass_over(self, error: OffsetOutOfRangeError) -> None:
        # What was to be handed out is gone; the broker hands out what is left.
        log.warning("partition %d: %s", self.partition_id, error.message)

    async def _pull_once(self) -> None:
        settings = self._settings
        await self._wait_for_room(settings.in_flight_messages)
        sent_ns = self._clock.boot_ns()
        if sent_ns >= self.deadline_ns:
            return
        self.waiting_for = "messages"
        hold_ms = settings.in_flight_ms
        wait_ms = min(settings.pull_wait_ms, settings.ttl_ms // 3, hold_ms // 3)
        answer, payload = await self._broker.call(
            PullShared(
                *self._who,
                self._room.left(settings.in_flight_messages),
                settings.pull_bytes,
                wait_ms,
                hold_ms,
            ),
            wait_ms=wait_ms,
        )
        assert isinstance(answer, Handed)
        handing = Handing(self, sent_ns + (hold_ms - hold_ms // 10) * 1_000_000)
        for start, header in batch_starts(payload):
            self._hand_out_of(payload, start, header, answer.ranges, handing)
        self._cursor = max(self._cursor, answer.cursor)
        if answer.sealed:
            self._ends_at(answer.next_offset)

    def _hand_out_of(
        self,
        payload: memoryview,
        start: int,
        header: Header,
        ranges: tuple[Range, ...],
        handing: Handing,
    ) -> None:
        """Cut a batch into messages and hand out those in `ranges`."""
        base = header.base_offset
        wanted = [
            (max(low, base) - base, min(high, header.next_offset) - base)
            for low, high in ranges
            if low < header.next_offset and base < high
        ]
        if not wanted:
            return
        messages = self._cut(payload, start, header, handing)
        ours = [one for low, high in wanted for one in messages[low:high]]
        self._room.count += len(ours)
        self._hand_out(ours)

"""Consumes a partition of a shared group: messages that no other consumer has in flight, each for a limited time.

    ACQUIRE ─▶ PULL free messages ⇄ hand out, until the hand-out's deadline ─▶ ACK       stop: flush acks ─▶ RELEASE the rest

Invariants
    No handler starts after the deadline of its hand-out: from then on another consumer may have the message.
    While handlers take long, empty acks tell the broker that the session lives.  A consumer cut off from its broker for
    the ttl may handle messages that another consumer has by then too.
    A message that was in flight at three processes that ended, the last time alone, is set aside.
    Tries that failed at any session count: the broker tells them with the message.
    Messages that are released, forgotten or lost on the way are handed out again by the broker; none is left out.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from ...protocol.batch import batch_starts
from ...protocol.errors import OffsetOutOfRangeError
from ...protocol.frames import AcquireShared, Handed, PullShared
from ...protocol.message import Message
from ...protocol.offsets import Range
from ...protocol.parked import crash_of
from ...protocol.record import Header
from ...protocol.text import counted
from ..delivery.client_delivery import ClientDelivery
from ..log_names import message_name
from ..settings import FailurePolicy
from .pull_client import PullClient

log = logging.getLogger("keylane.consumer")


ALONE_FROM = 2
"""Processes that ended with a message in flight, after which brokers have it handled alone."""
CRASHES_MAX = 3
"""The same, after which it is set aside: one of them, the last, had it alone."""


class _Known(NamedTuple):
    """What the broker says of messages that it hands out, by offset: as of `Handed`."""

    crashes: dict[int, int]
    tries: dict[int, int]


class HandOut(ClientDelivery):
    """The messages of a pull, which this consumer may handle until `deadline_ns` on the boot clock."""

    __slots__ = ("_until_ns",)

    client: SharedClient

    def __init__(self, client: SharedClient, until_ns: int) -> None:
        super().__init__(client)
        self._until_ns = until_ns

    @property
    def deadline_ns(self) -> int:
        """No handler starts after it; 0 once the client hands over."""
        return min(self._until_ns, self.client.deadline_ns)


class SharedClient(PullClient):
    """Pulls a partition together with the other sessions of a shared group."""

    token_is_single_use = False
    exclusive = False
    exempts_retries = True
    respects_range_limit = False
    """Pulls continue at the broker's range limit: it then hands out only messages that fill gaps."""

    @property
    def _exhausted(self) -> bool:
        # Messages that other consumers have in flight may come back: only acks to the end are an end.
        return self.drained

    def _acquire_request(self) -> AcquireShared:
        return AcquireShared(*self._who, self._settings.ttl_ms)

    def _skip_removed(self, error: OffsetOutOfRangeError) -> None:
        # Retention removed messages before they were handed out; the broker hands out what it still stores.
        log.warning("%s: %s", self.log_name, error.message)

    async def _pull_once(self) -> None:
        settings = self._settings
        await self._wait_while_held()
        await self._wait_for_capacity(settings.in_flight_messages)
        sent_ns = self._clock.boot_ns()
        if sent_ns >= self.deadline_ns:
            return
        self.waiting_for = "messages"
        in_flight_ms = settings.in_flight_ms
        wait_ms = min(settings.pull_wait_ms, settings.ttl_ms // 3, in_flight_ms // 3)
        answer, payload = await self.broker.call(
            PullShared(
                *self._who,
                self._in_flight.capacity(settings.in_flight_messages),
                settings.pull_bytes,
                wait_ms,
                in_flight_ms,
            ),
            wait_ms=wait_ms,
        )
        assert isinstance(answer, Handed)
        hand_out = HandOut(self, sent_ns + (in_flight_ms - in_flight_ms // 10) * 1_000_000)
        known = _Known(dict(answer.crashes), dict(answer.tries))
        for start, header in batch_starts(payload):
            self._hand_out_of(payload, start, header, answer.ranges, hand_out, known)
        self._progress.end_offset = answer.next_offset
        self._acked_to(max(self._offsets.cursor, answer.cursor))
        if answer.sealed:
            self._sealed_at(answer.next_offset)

    def _hand_out_of(
        self,
        payload: memoryview,
        start: int,
        header: Header,
        ranges: tuple[Range, ...],
        hand_out: HandOut,
        known: _Known,
    ) -> None:
        """Decode a batch and hand out the messages in `ranges`."""
        base = header.base_offset
        wanted = [
            (max(low, base) - base, min(high, header.next_offset) - base)
            for low, high in ranges
            if low < header.next_offset and base < high
        ]
        if not wanted:
            return
        self._progress.pulled(header)
        messages = self._decode(payload, start, header, hand_out)
        ours = [message for low, high in wanted for message in messages[low:high]]
        self._tries.count_on(ours)
        if known.tries:  # also those that failed at another session since this one acquired
            for message in ours:
                message.attempt = max(message.attempt, 1 + known.tries.get(message.offset, 0))
        self._in_flight.count += len(ours)
        if known.crashes:
            ours = [message for message in ours if not self._set_aside(message, known.crashes)]
        self.owner.hand_out(ours)

    def _set_aside(self, message: Message, crashes: dict[int, int]) -> bool:
        """Count the processes that ended while a message was with them; True if it is not handed out for that."""
        ended = crashes.get(message.offset, 0)
        message.attempt += ended
        settings = self._settings
        too_often = ended >= CRASHES_MAX or (
            ended >= ALONE_FROM and message.attempt > settings.last_try
        )
        if ended < ALONE_FROM:
            return False
        sets_aside = too_often and settings.failure_policy is not FailurePolicy.BLOCK
        log.warning(
            "%s: the processes of its consumers ended while they had it, %s; %s",
            message_name(message), counted(ended, "time"),
            "it is set aside" if sets_aside else "it is handled alone",
        )  # fmt: skip
        failure = crash_of(
            counted(ended, "time"), at_ms=self._clock.wall_ms(), attempts=message.attempt - 1
        )
        if sets_aside:
            self.bury(message, failure)
        else:
            self._tries.blocks(message, failure)
            self._acks.send_soon()
        return sets_aside

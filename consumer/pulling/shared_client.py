"""Consumes a partition of a shared group: the broker hands out each message to one consumer, for a
limited time.

    ACQUIRE ─▶ PULL free messages ⇄ hand out, until the hand-out's deadline ─▶ ACK
                                         ╰─ its handler still runs ─▶ an ACK renews it, as part of
                                             a new hand-out
    stop: flush acks ─▶ RELEASE the others

Invariants
    No handler starts after its hand-out's deadline, because another consumer may soon get the
    message. While a handler or the body of the program's loop has a message, the message is renewed
    at the broker, and is not handed out here again. A consumer that is cut off from its broker for
    the ttl may handle messages that another consumer also has. A message that the program's loop
    has moved past without an ack is not renewed, and its redelivery counts as a failed attempt. A
    pull requests one message per free worker, plus as many as are handled in a second; other
    consumers get the rest. A message that was in flight in three processes that died, the last time
    alone, is set aside. Failed attempts in all sessions count: the broker reports them with the
    message. Messages that are released, dropped or lost in transit are handed out again by the
    broker.
"""

from __future__ import annotations

import asyncio
import logging
from operator import attrgetter
from typing import NamedTuple

from ...protocol.batch import batch_starts
from ...protocol.errors import OffsetOutOfRangeError
from ...protocol.frames import AcquireShared, Handed, PullShared
from ...protocol.message import Message
from ...protocol.offsets import Range
from ...protocol.parked import crash_failure
from ...protocol.record import Header
from ...protocol.text import counted
from ..delivery.client_delivery import ClientDelivery
from ..log_names import message_name
from ..settings import FailurePolicy
from .pull_client import PullClient

log = logging.getLogger("keylane.consumer")


SECOND_NS = 1_000_000_000
RENEWALS_PER_FLIGHT = 6
"""How often messages in handlers are renewed within `in_flight_ms`; handlers start within its first
two thirds.
"""
ALONE_FROM = 2
"""After this many processes have died with a message in flight, brokers hand it out alone."""
CRASHES_MAX = 3
"""After this many processes have died with a message in flight, and the last one had it alone, it
is set aside.
"""


class _HandedCounts(NamedTuple):
    """The crashes and failed attempts of messages that the broker hands out, by offset; see
    `Handed`.
    """

    crashes: dict[int, int]
    tries: dict[int, int]


class SharedDelivery(ClientDelivery):
    """
    The delivery of the messages from one pull or renewal, whose handlers may start until
    `deadline_ns` on the boot clock.

    Args:
        sent_ns: the time of the request, on the boot clock.
    """

    __slots__ = ("_expired", "_with_program", "_sent_ns", "_start_until_ns")

    client: SharedClient

    def __init__(self, client: SharedClient, sent_ns: int) -> None:
        super().__init__(client)
        self._sent_ns = sent_ns
        self._start_until_ns = sent_ns + client.in_flight_ns * 2 // 3
        self._with_program: dict[int, Message] = {}
        """The messages that the program has, by offset."""
        self._expired: set[int] = set()
        """The offsets whose time in flight ended before the program acked them."""

    @property
    def deadline_ns(self) -> int:
        """The time after which no handler starts, early enough to renew running ones; 0 once the
        client is handing over.
        """
        return min(self._start_until_ns, self.client.deadline_ns)

    def move(self, messages: list[Message]) -> None:
        """Move messages from their hand-outs to this one, which extends their time in flight."""
        for message in messages:
            previous: SharedDelivery = message.delivery  # type: ignore[assignment]
            message.delivery = self
            if message.offset in previous._delivered_offsets:
                previous._delivered_offsets.discard(message.offset)
                super().register_delivered(message)
                self._track([message])

    # ── messages of a program without a handler
    # ──────────────────────────────────────────────────────
    def register_delivered(self, message: Message) -> None:
        """Record that the iteration delivered a message to the user, who is expected to ack it."""
        super().register_delivered(message)
        self.client.delivered_count += 1
        self._track([message])

    def register_all_delivered(self, messages: list[Message]) -> None:
        """Record that the iteration delivered several messages to the user."""
        super().register_all_delivered(messages)
        self.client.delivered_count += len(messages)
        self._track(messages)

    def _track(self, messages: list[Message]) -> None:
        if not self._with_program:
            until_ns = self._sent_ns + self.client.in_flight_ns * 9 // 10
            delay_s = max(0, until_ns - self.client.boot_ns()) / 1e9
            asyncio.get_running_loop().call_later(delay_s, self._expire)
        self._with_program.update((message.offset, message) for message in messages)

    def _expire(self) -> None:
        """Count a failed attempt for each message that the program has moved past without an ack;
        they are handed out again.
        """
        messages = self._with_program
        self._with_program = {}
        client = self.client
        if client.boot_ns() >= client.deadline_ns:  # handed over, including unacked messages
            return
        messages_in_use = set(map(id, client.owner.messages_in_use(client)))
        for offset, message in messages.items():
            if (
                offset in self._delivered_offsets
                and message.delivery is self
                and id(message) not in messages_in_use
            ):
                self._delivered_offsets.discard(offset)
                self._expired.add(offset)
                client.owner.count_unacked_delivery(message)

    async def _accept_ack(self, message: Message) -> None:
        """Accept an ack, even a late one; see `UserAcks`."""
        if message.offset in self._expired:
            self.client.check_can_ack(message.offset)
            self._ack_late([message])
            return
        await super()._accept_ack(message)

    def accept_acks(self, messages: list[Message]) -> bool:
        """Accept acks for messages that were not nacked, even late ones."""
        late = self._ack_late([message for message in messages if message.offset in self._expired])
        return super().accept_acks(messages) or late

    def _ack_late(self, messages: list[Message]) -> bool:
        for message in messages:
            self._expired.discard(message.offset)
            self.client.ack_late(message.offset)
        return bool(messages)

    async def _accept_nack(self, message: Message, after_s: float) -> None:
        """Accept a nack; see `UserAcks`. A message whose time in flight is over is handed out again
        anyway.
        """
        if message.offset not in self._expired:
            await super()._accept_nack(message, after_s)


class SharedClient(PullClient):
    """Pulls a partition concurrently with other sessions of a shared group."""

    token_is_single_use = False
    exclusive = False
    exempts_retries = True
    respects_range_limit = False
    """False: pulls continue at the broker's range limit, where the broker hands out only messages
    that fill gaps.
    """

    def _begin(self) -> None:
        self._handed_out_count = 0
        """The number of messages handed out so far."""
        self.delivered_count = 0
        """The number of messages that were delivered to a program without a handler."""
        self._last_pull = (self._clock.boot_ns(), 0)
        """The boot time of the last pull, in nanoseconds, and the value of `_finished_count` at
        that time.
        """
        self._renewed_ns = 0
        super()._begin()

    @property
    def renewal_ms(self) -> float:  # type: ignore[override]
        """The interval between requests that renew messages in handlers, in milliseconds."""
        return self._settings.in_flight_ms / RENEWALS_PER_FLIGHT

    @property
    def in_flight_ns(self) -> int:
        """How long a message stays in flight without a renewal, in nanoseconds."""
        return self._settings.in_flight_ms * 1_000_000

    @property
    def _exhausted(self) -> bool:
        # Messages in flight at other consumers may come back, so pull until all are acked.
        return self.drained

    def _acquire_request(self) -> AcquireShared:
        return AcquireShared(*self._lease, self._settings.ttl_ms)

    def _skip_removed(self, error: OffsetOutOfRangeError) -> None:
        # Retention removed messages before they were handed out; the broker continues with those
        # that it still stores.
        log.warning("%s: %s", self.log_name, error.message)

    async def _pull_once(self) -> None:
        settings = self._settings
        await self._wait_while_held()
        count_max = await self._wait_for_pull_size()
        sent_ns = self._clock.boot_ns()
        if sent_ns >= self.deadline_ns:
            return
        self.waiting_for = "messages"
        in_flight_ms = settings.in_flight_ms
        wait_ms = min(settings.pull_wait_ms, settings.ttl_ms // 3, in_flight_ms // 3)
        answer, payload = await self.broker.call(
            PullShared(
                *self._lease,
                count_max,
                settings.pull_bytes,
                wait_ms,
                in_flight_ms,
            ),
            wait_ms=wait_ms,
        )
        assert isinstance(answer, Handed)
        hand_out = SharedDelivery(self, sent_ns)
        counts = _HandedCounts(dict(answer.crashes), dict(answer.tries))
        for start, header in batch_starts(payload):
            self._hand_out_ranges(payload, start, header, answer.ranges, hand_out, counts)
        self._progress.end_offset = answer.next_offset
        self._advance_cursor(max(self._offsets.cursor, answer.cursor))
        if answer.sealed:
            self._set_end(answer.next_offset)

    async def _wait_for_pull_size(self) -> int:
        """Wait until this consumer can use more messages, and return how many to pull."""
        while not (size := self._pull_size()):
            self.waiting_for = "handlers"
            await self._in_flight.wait_for_change()
        now_ns = self._clock.boot_ns()
        self._last_pull = (now_ns, self._finished_count)
        return size

    @property
    def _finished_count(self) -> int:
        """The number of messages that handlers have finished or that were delivered to a program
        without a handler.
        """
        return max(self._handed_out_count - self._in_flight.count, self.delivered_count)

    def _pull_size(self) -> int:
        """
        Return the number of messages to pull now, or 0 if none.

        That is one per free worker, plus as many as were handled, or taken by a loop, in the last
        second. Any further messages would wait here while another consumer may be free.
        """
        in_flight = self._in_flight
        limit = in_flight.capacity(self._settings.in_flight_messages)
        if in_flight.blocked or limit <= 0:
            return 0
        pulled_ns, finished_before = self._last_pull
        since_ns = max(self._clock.boot_ns() - pulled_ns, SECOND_NS)
        ahead = max(0, self._finished_count - finished_before) * SECOND_NS // since_ns
        spare_capacity = self.owner.spare_capacity
        size = min(limit, spare_capacity + ahead)
        return size if spare_capacity > 0 or 0 < ahead // 2 <= size else 0

    def wake(self) -> None:
        """Wake a pull that is waiting for a free worker."""
        self._in_flight.wake()

    # ── messages that handlers have
    # ────────────────────────────────────────────────────────────────────────
    def messages_to_renew(self) -> list[Message]:
        """Return the messages that the next ack request renews, sorted by offset, or none if it is
        too early.
        """
        now_ns = self._clock.boot_ns()
        if now_ns - self._renewed_ns < self.in_flight_ns // RENEWALS_PER_FLIGHT // 2:
            return []
        self._renewed_ns = now_ns
        messages = (
            message
            for message in self.owner.messages_in_use(self)
            if type(message.delivery) is SharedDelivery
        )
        return sorted(messages, key=attrgetter("offset"))

    def extend_in_flight(self, messages: list[Message], sent_ns: int) -> None:
        """Restart the time in flight of messages at `sent_ns`."""
        SharedDelivery(self, sent_ns).move(messages)

    def ack_late(self, offset: int) -> None:
        """Ack a message that no longer counts as in flight in this client."""
        self._handled.mark_handled(offset)
        self._acks.send_soon()

    def _hand_out_ranges(
        self,
        payload: memoryview,
        start: int,
        header: Header,
        ranges: tuple[Range, ...],
        hand_out: SharedDelivery,
        counts: _HandedCounts,
    ) -> None:
        """Decode a batch and hand out the messages in `ranges`."""
        base = header.base_offset
        slices = [
            (max(low, base) - base, min(high, header.next_offset) - base)
            for low, high in ranges
            if low < header.next_offset and base < high
        ]
        if not slices:
            return
        self._progress.record_pull(header)
        messages = self._decode(payload, start, header, hand_out)
        to_handle = [message for low, high in slices for message in messages[low:high]]
        if messages_in_use := {message.offset for message in self.owner.messages_in_use(self)}:
            # The broker has restarted, or its time in flight has ended; its handler still runs
            # here, and will ack it.
            to_handle = [message for message in to_handle if message.offset not in messages_in_use]
        self._tries.add_earlier_tries(to_handle)
        if counts.tries:  # also counts attempts in other sessions since the acquisition
            for message in to_handle:
                message.attempt = max(message.attempt, 1 + counts.tries.get(message.offset, 0))
        self._in_flight.count += len(to_handle)
        self._handed_out_count += len(to_handle)
        if counts.crashes:
            to_handle = [
                message for message in to_handle if not self._set_aside(message, counts.crashes)
            ]
        self.owner.hand_out(to_handle)

    def _set_aside(self, message: Message, crashes: dict[int, int]) -> bool:
        """Add crashes to a message's attempts. Return True if the message was set aside because of
        them.
        """
        crash_count = crashes.get(message.offset, 0)
        message.attempt += crash_count
        settings = self._settings
        too_often = crash_count >= CRASHES_MAX or (
            crash_count >= ALONE_FROM and message.attempt > settings.last_try
        )
        if crash_count < ALONE_FROM:
            return False
        sets_aside = too_often and settings.failure_policy is not FailurePolicy.BLOCK
        log.warning(
            "%s: its consumers' processes ended while they had it, %s; %s",
            message_name(message),
            counted(crash_count, "time"),
            "it is set aside" if sets_aside else "it is handled alone",
        )
        failure = crash_failure(
            counted(crash_count, "time"), at_ms=self._clock.wall_ms(), attempts=message.attempt - 1
        )
        if sets_aside:
            self.dead_letter(message, failure)
        else:
            self._tries.record_blocking(message, failure)
            self._acks.send_soon()
        return sets_aside

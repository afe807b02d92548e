"""Consumes a partition of a shared group: messages that no other consumer has in flight, each for a
limited time.

    ACQUIRE ─▶ PULL free messages ⇄ hand out, until the hand-out's deadline ─▶ ACK
                                         ╰─ held: its handler runs ─▶ renewed by an ACK, as a
                                             hand-out of its own
    stop: flush acks ─▶ RELEASE the rest

Invariants
    No handler starts after the deadline of its hand-out, because another consumer may have the
    message soon after. A message with a handler, or with the body of the program's loop, is renewed
    at the broker until that ends, and is never handed out here a second time meanwhile. A consumer
    that is cut off from its broker for the ttl may handle messages that another consumer also has
    by then. A message that the program's loop has passed over without an ack is not renewed, and
    its redelivery counts as a failed try. As many messages are pulled as workers are free for, plus
    as many as are handled in a second; the others are left to consumers that are free. A message
    that was in flight at three processes that ended, the last time alone, is set aside. Failed
    tries at any session count: the broker reports them with the message. Messages that are
    released, forgotten or lost on the way are handed out again by the broker; none is left out.
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
from ...protocol.parked import crash_of
from ...protocol.record import Header
from ...protocol.text import counted
from ..delivery.client_delivery import ClientDelivery
from ..log_names import message_name
from ..settings import FailurePolicy
from .pull_client import PullClient

log = logging.getLogger("keylane.consumer")


SECOND_NS = 1_000_000_000
HELD_PARTS = 6
"""The divisor for the time in flight after which messages with handlers are renewed; their handlers
start within the first two thirds.
"""
ALONE_FROM = 2
"""The number of processes that ended with a message in flight, after which brokers have it handled
alone.
"""
CRASHES_MAX = 3
"""The number of such processes after which a message is set aside; the last of them had it
alone.
"""


class _Known(NamedTuple):
    """The broker's report on messages that it hands out, by offset; see `Handed`."""

    crashes: dict[int, int]
    tries: dict[int, int]


class HandOut(ClientDelivery):
    """
    The messages of a pull, or of a renewal, whose handlers may start until `deadline_ns` on the
    boot clock.

    Args:
        sent_ns: the time of the request, on the boot clock.
    """

    __slots__ = ("_lapsed", "_out", "_sent_ns", "_start_until_ns")

    client: SharedClient

    def __init__(self, client: SharedClient, sent_ns: int) -> None:
        super().__init__(client)
        self._sent_ns = sent_ns
        self._start_until_ns = sent_ns + client.in_flight_ns * 2 // 3
        self._out: dict[int, Message] = {}
        """The messages that the program was given, by offset."""
        self._lapsed: set[int] = set()
        """The offsets that the program has passed over for longer than they are in flight."""

    @property
    def deadline_ns(self) -> int:
        """Return the time after which no handler starts, so that messages in work are renewed in
        time; 0 once the client hands over.
        """
        return min(self._start_until_ns, self.client.deadline_ns)

    def move(self, messages: list[Message]) -> None:
        """Take messages over from their hand-outs, so that they are in flight for longer."""
        for message in messages:
            before: HandOut = message.delivery  # type: ignore[assignment]
            message.delivery = self
            if message.offset in before._taken:
                before._taken.discard(message.offset)
                super().taken(message)
                self._note_out([message])

    # ── what a program without a handler has ──────────────────────────────────────────────────────
    def taken(self, message: Message) -> None:
        """Note that the iteration gave a message to the user, who will ack it."""
        super().taken(message)
        self.client.taken_count += 1
        self._note_out([message])

    def taken_all(self, messages: list[Message]) -> None:
        """Note that the iteration gave several messages to the user."""
        super().taken_all(messages)
        self.client.taken_count += len(messages)
        self._note_out(messages)

    def _note_out(self, messages: list[Message]) -> None:
        if not self._out:
            until_ns = self._sent_ns + self.client.in_flight_ns * 9 // 10
            left_s = max(0, until_ns - self.client.boot_ns()) / 1e9
            asyncio.get_running_loop().call_later(left_s, self._lapse)
        self._out.update((message.offset, message) for message in messages)

    def _lapse(self) -> None:
        """Count the messages that the program has passed over without an ack as failed: they are
        handed out again.
        """
        out = self._out
        self._out = {}
        client = self.client
        if client.boot_ns() >= client.deadline_ns:  # handed over, and with it all that is not acked
            return
        held = set(map(id, client.owner.held(client)))
        for offset, message in out.items():
            if offset in self._taken and message.delivery is self and id(message) not in held:
                self._taken.discard(offset)
                self._lapsed.add(offset)
                client.owner.passed_over(message)

    async def _take_ack(self, message: Message) -> None:
        """Take an ack, even a late one; see `UserAcks`."""
        if message.offset in self._lapsed:
            self.client.check_takes_acks(message.offset)
            self._ack_late([message])
            return
        await super()._take_ack(message)

    def take_acks(self, messages: list[Message]) -> bool:
        """Take acks of messages that were not given back, even late ones."""
        late = self._ack_late([each for each in messages if each.offset in self._lapsed])
        return super().take_acks(messages) or late

    def _ack_late(self, messages: list[Message]) -> bool:
        for message in messages:
            self._lapsed.discard(message.offset)
            self.client.done_elsewhere(message.offset)
        return bool(messages)

    async def _take_back(self, message: Message, after_s: float) -> None:
        """Take a message back; see `UserAcks`. A message that the user had for too long is already
        handed out again.
        """
        if message.offset not in self._lapsed:
            await super()._take_back(message, after_s)


class SharedClient(PullClient):
    """Pulls a partition together with the other sessions of a shared group."""

    token_is_single_use = False
    exclusive = False
    exempts_retries = True
    respects_range_limit = False
    """False, because pulls continue at the broker's range limit: it then hands out only messages
    that fill gaps.
    """

    def _begin(self) -> None:
        self._handed_count = 0
        """The number of messages ever handed out here."""
        self.taken_count = 0
        """The number of those messages that a program without a handler was given."""
        self._counted = (self._clock.boot_ns(), 0)
        """The boot time of the last pull, and the number of messages that workers or the program
        had finished by then.
        """
        self._held_told_ns = 0
        super()._begin()

    @property
    def renewal_ms(self) -> float:  # type: ignore[override]
        """Return the milliseconds between two requests that renew messages with handlers."""
        return self._settings.in_flight_ms / HELD_PARTS

    @property
    def in_flight_ns(self) -> int:
        """Return the time, in nanoseconds, for which a message is in flight without a renewal."""
        return self._settings.in_flight_ms * 1_000_000

    @property
    def _exhausted(self) -> bool:
        # Messages that other consumers have in flight may return, so only acks to the end make an
        # end.
        return self.drained

    def _acquire_request(self) -> AcquireShared:
        return AcquireShared(*self._who, self._settings.ttl_ms)

    def _skip_removed(self, error: OffsetOutOfRangeError) -> None:
        # Retention removed messages before they were handed out; the broker hands out the messages
        # that it still stores.
        log.warning("%s: %s", self.log_name, error.message)

    async def _pull_once(self) -> None:
        settings = self._settings
        await self._wait_while_held()
        count_max = await self._room_for()
        sent_ns = self._clock.boot_ns()
        if sent_ns >= self.deadline_ns:
            return
        self.waiting_for = "messages"
        in_flight_ms = settings.in_flight_ms
        wait_ms = min(settings.pull_wait_ms, settings.ttl_ms // 3, in_flight_ms // 3)
        answer, payload = await self.broker.call(
            PullShared(
                *self._who,
                count_max,
                settings.pull_bytes,
                wait_ms,
                in_flight_ms,
            ),
            wait_ms=wait_ms,
        )
        assert isinstance(answer, Handed)
        hand_out = HandOut(self, sent_ns)
        known = _Known(dict(answer.crashes), dict(answer.tries))
        for start, header in batch_starts(payload):
            self._hand_out_of(payload, start, header, answer.ranges, hand_out, known)
        self._progress.end_offset = answer.next_offset
        self._acked_to(max(self._offsets.cursor, answer.cursor))
        if answer.sealed:
            self._sealed_at(answer.next_offset)

    async def _room_for(self) -> int:
        """Wait until further messages are useful here, and return how many to pull."""
        while not (room := self._room_now()):
            self.waiting_for = "handlers"
            await self._in_flight.changed()
        now_ns = self._clock.boot_ns()
        self._counted = (now_ns, self._passed_count)
        return room

    @property
    def _passed_count(self) -> int:
        """Return the number of messages that handlers have finished, or that a program without a
        handler was given; it may ack them later.
        """
        return max(self._handed_count - self._in_flight.count, self.taken_count)

    def _room_now(self) -> int:
        """
        Return the number of messages to pull now; 0 if none.

        A free worker gets a message at once. While all are busy, only as many messages wait here as
        were handled, or taken by a loop, in the last second, because another consumer may be free.
        """
        in_flight = self._in_flight
        limit = in_flight.capacity(self._settings.in_flight_messages)
        if in_flight.blocked or limit <= 0:
            return 0
        pulled_ns, passed_before = self._counted
        since_ns = max(self._clock.boot_ns() - pulled_ns, SECOND_NS)
        ahead = max(0, self._passed_count - passed_before) * SECOND_NS // since_ns
        spare = self.owner.spare
        room = min(limit, spare + ahead)
        return room if spare > 0 or 0 < ahead // 2 <= room else 0

    def wake(self) -> None:
        """Let the pull that waits for room check again: a worker is free."""
        self._in_flight.wake()

    # ── what handlers have ────────────────────────────────────────────────────────────────────────
    def held(self) -> list[Message]:
        """Return the messages with handlers that the next request renews, by offset; none if it is
        too early.
        """
        now_ns = self._clock.boot_ns()
        if now_ns - self._held_told_ns < self.in_flight_ns // HELD_PARTS // 2:
            return []
        self._held_told_ns = now_ns
        held = (each for each in self.owner.held(self) if type(each.delivery) is HandOut)
        return sorted(held, key=attrgetter("offset"))

    def renewed(self, messages: list[Message], sent_ns: int) -> None:
        """Note that messages are in flight again since `sent_ns`."""
        HandOut(self, sent_ns).move(messages)

    def done_elsewhere(self, offset: int) -> None:
        """Ack a message that is no longer counted here."""
        self._handled.done(offset)
        self._acks.send_soon()

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
        if held := {message.offset for message in self.owner.held(self)}:
            # The broker has restarted, or freed it: its handler runs here, and its ack ends it.
            ours = [message for message in ours if message.offset not in held]
        self._tries.count_on(ours)
        if known.tries:  # including those that failed at another session since this one acquired
            for message in ours:
                message.attempt = max(message.attempt, 1 + known.tries.get(message.offset, 0))
        self._in_flight.count += len(ours)
        self._handed_count += len(ours)
        if known.crashes:
            ours = [message for message in ours if not self._set_aside(message, known.crashes)]
        self.owner.hand_out(ours)

    def _set_aside(self, message: Message, crashes: dict[int, int]) -> bool:
        """Count the processes that ended while they had a message, and return True if it is
        therefore not handed out.
        """
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
            message_name(message),
            counted(ended, "time"),
            "it is set aside" if sets_aside else "it is handled alone",
        )
        failure = crash_of(
            counted(ended, "time"), at_ms=self._clock.wall_ms(), attempts=message.attempt - 1
        )
        if sets_aside:
            self.bury(message, failure)
        else:
            self._tries.blocks(message, failure)
            self._acks.send_soon()
        return sets_aside

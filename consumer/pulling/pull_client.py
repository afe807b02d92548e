"""One partition under one grant: fence, pull, hand out, ack, release.

    ACQUIRE ─▶ PULL ⇄ hand out ─▶ handled ─▶ ack queue ─▶ ACK       stop: finish handlers ─▶ flush acks ─▶ RELEASE

Invariants
    The fence is raised before the cursor is read; nothing is pulled without it.
    After `deadline_ns` no handler starts and no request renews the pull lock.
    A restarted broker is met again with the same token; what was pulled before is not pulled twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from ...protocol.batch import batch_starts, columns
from ...protocol.clock import Clock
from ...protocol.control import Grant
from ...protocol.errors import (
    FencedError,
    KeylaneError,
    LeaseLostError,
    OffsetOutOfRangeError,
    OverloadedError,
)
from ...protocol.frames import Ack, Acked, Acquire, Acquired, AcquireShared, Batches, Pull, Release
from ...protocol.message import Delivery, Message
from ...protocol.record import Header
from ...protocol.text import counted
from ...rpc.client import BrokerClient
from ..settings import ConsumerSettings
from .acks import AckQueue
from .cutting import cut_messages
from .reading import Reading
from .room import Room

log = logging.getLogger("keylane.consumer")


class PullClient:
    """
    Pulls one partition for one consumer session.

    `check()` raises where the consumer is not open; `hand_out(messages)` gets messages in the order of their offsets, without those acked already;
    `on_lost(client)` hears that nothing more comes under this token; `on_drained()` that the partition is sealed and acked
    to its end; `on_fatal(error)` of what no retry mends.
    """

    once = True
    """Under one token it is made only once, so that nothing is handled again."""
    heeds_crowds = True
    """While the broker takes no more ranges above the cursor, only what was pulled already can make room."""
    leaves_room = False
    """Messages that wait for another try leave their room to others, up to `buffer_messages` of them."""

    def __init__(
        self,
        *,
        subject: str,
        group: str,
        session: str,
        grant: Grant,
        broker_at: Callable[[str], BrokerClient],
        deadline_ms: int,
        settings: ConsumerSettings,
        clock: Clock,
        rng: random.Random,
        check: Callable[[], None],
        hand_out: Callable[[list[Message]], None],
        on_lost: Callable[[PullClient], None],
        on_drained: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.partition_id = int(grant.partition.partition_id)
        self.token = grant.token
        self.queue = int(grant.partition.queue)
        self.logic_start = grant.partition.logic_start
        self.holder = self  # what a delivery is asked for: whose messages end together
        self.fenced = False
        self.fence = 0
        """The higher token that the broker has seen, once it has fenced this one."""
        self.deadline_ns = deadline_ms * 1_000_000
        """End of the lease on this machine's boot clock, as read before every handler; 0 once handing over."""
        self.waiting_for = "the fence"
        """What it waits for, for people."""
        self._subject = subject
        self._group = group
        self.session = session
        self._who = (self.partition_id, group, session, self.token)
        assert grant.partition.address is not None
        self._broker_at = broker_at
        self._broker = broker_at(grant.partition.address)
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._check = check
        self._hand_out = hand_out
        self._on_lost = on_lost
        self._on_drained = on_drained
        self._on_fatal = on_fatal
        self._acks = AckQueue()
        self._reading = Reading()
        self._taken: set[int] = set()
        """Offsets that iteration gave to the user, who has not acked them yet."""
        self._sealed_end: int | None = None
        self._cursor = 0
        self._drained_told = False
        self._closed = False
        self._lease_until_ms = deadline_ms
        self._room = Room(aside_max=settings.buffer_messages if self.leaves_room else 0)
        self._ack_is_due = False
        self._ack_due = asyncio.Event()
        self._pulling = asyncio.create_task(self._run(self._pull), name=f"pull {self.partition_id}")
        self._acking = asyncio.create_task(self._run(self._ack), name=f"ack {self.partition_id}")

    # ── the lease ────────────────────────────────────────────────────────────────────────────────────
    def renew(self, deadline_ms: int, address: str | None) -> None:
        """
        The lease now ends at `deadline_ms`, and the broker is at `address`; None if nobody knows now.

        A lapsed lease is not renewed: messages may have been left out.  While handing over, still no handler starts.
        """
        if self.lapsed:
            return
        if address is not None and address != self._broker.address:
            self._broker = self._broker_at(address)
        if self.deadline_ns:
            self.deadline_ns = deadline_ms * 1_000_000
        self._lease_until_ms = deadline_ms

    @property
    def lapsed(self) -> bool:
        """True when this client lost its right for good: fenced, or past its deadline."""
        return self.fenced or self._clock.boot_ms() >= self._lease_until_ms

    @property
    def left_ms(self) -> int:
        """What is left of the lease."""
        return 0 if self.fenced else max(0, self._lease_until_ms - self._clock.boot_ms())

    @property
    def renewed_ms(self) -> int:
        """When the heartbeat was sent that renewed the lease last, on the boot clock."""
        return self._lease_until_ms - self._settings.ttl_ms + self._settings.margin_ms

    def stop_starting(self) -> None:
        """From now on no handler starts and nothing more is pulled."""
        self.deadline_ns = 0
        self._pulling.cancel()

    @property
    def drained(self) -> bool:
        """True when the partition is sealed and its group has acked it to the end."""
        return self._sealed_end is not None and self._cursor >= self._sealed_end

    # ── what handlers did ────────────────────────────────────────────────────────────────────────────
    def done(self, offset: int) -> None:
        """The message at `offset` is handled."""
        self._acks.done(offset)
        if not self._ack_is_due:
            self._ack_is_due = True
            self._ack_due.set()
        room = self._room
        room.count -= 1
        if room.count <= room.wake_at:
            room.wake()

    def forget(self, count: int) -> None:
        """So many of the messages handed out are no longer waiting or running."""
        self._room.leave(count)

    def set_aside(self, count: int) -> None:
        """So many more of the messages handed out wait for another try; fewer if negative."""
        self._room.set_aside(count)

    def taken(self, message: Message) -> None:
        """Iteration gave the message to the user, who is going to ack it."""
        self._taken.add(message.offset)

    def check_ours(self, message: Message) -> None:
        """Raises LeaseLostError if acks are taken no more, ForkedError or OtherLoopError if not here."""
        self._check()
        if self._closed or self.lapsed:
            raise LeaseLostError(partition_id=self.partition_id, offset=message.offset)

    async def ack(self, message: Message) -> None:
        """The user's ack; once more, or of what a handler was given and returns from, is harmless."""
        self.check_ours(message)
        if message.offset in self._taken:
            self._taken.remove(message.offset)
            self.done(message.offset)

    @property
    def missed(self) -> int:
        """Messages that were removed before they were pulled."""
        return self._reading.missed

    @property
    def outstanding(self) -> int:
        """Messages handed out and neither done nor forgotten."""
        return self._room.count

    async def settled(self) -> None:
        """Wait until everything handed out is done or forgotten."""
        await self._room.empty()

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────
    async def _run(self, body: Callable[[], Awaitable[None]]) -> None:
        try:
            await body()
        except FencedError as error:
            log.info("partition %d: %s", self.partition_id, error.message)
            self._lose(error)
        except OffsetOutOfRangeError as error:
            # The broker has less than was read from it: only the next token's owner may begin anew.
            log.error("partition %d is handed over: %s", self.partition_id, error.message)
            self._on_lost(self)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self._on_fatal(error)
            raise

    def _lose(self, error: FencedError) -> None:
        if not self.fenced:
            self.fenced = True
            self.fence = error.current_token or 0
            self.deadline_ns = 0
            self._on_lost(self)

    async def _pull(self) -> None:
        attempt = 0
        acquired = False
        while self._clock.boot_ns() < self.deadline_ns:
            try:
                if not acquired:
                    await self._acquire()
                    acquired = True
                if self._exhausted:
                    self.waiting_for = "acks to the end" if not self.drained else ""
                    return  # nothing will ever come; the acks keep the pull lock
                await self._pull_once()
                attempt = 0
            except FencedError:
                raise
            except OffsetOutOfRangeError as error:
                self._pass_over(error)
            except KeylaneError as error:
                acquired = False
                attempt += 1
                self.waiting_for = error.message
                log.info("partition %d: %s", self.partition_id, error.message)
                await asyncio.sleep(self._settings.backoff.wait_ms(attempt, self._rng) / 1000)

    @property
    def _exhausted(self) -> bool:
        """The partition is sealed, and all of it is pulled."""
        return self._sealed_end is not None and self._reading.next_offset >= self._sealed_end

    def _acquire_request(self) -> Acquire | AcquireShared:
        return Acquire(*self._who, self._settings.ttl_ms)

    async def _acquire(self) -> None:
        answer, _ = await self._broker.call(self._acquire_request())
        assert isinstance(answer, Acquired)
        if not self._reading.begun:
            self._reading.begin(answer.cursor, answer.ranges)
            self._cursor = answer.cursor
        if answer.sealed:
            self._ends_at(answer.next_offset)

    def _ends_at(self, end_offset: int) -> None:
        self._sealed_end = end_offset
        self._tell_drained()

    def _tell_drained(self) -> None:
        """Say once, as soon as it is so, that the group is through with this partition."""
        if self.drained and not self._drained_told:
            self._drained_told = True
            self._on_drained()

    async def _wait_for_room(self, limit: int) -> None:
        """Until fewer than `limit` messages are with handlers, and the broker takes acks of more."""
        if not self._room.below(limit):
            self.waiting_for = "handlers"
            await self._room.get_below(limit)

    async def _pull_once(self) -> None:
        await self._wait_for_room(self._settings.buffer_messages)
        if self._clock.boot_ns() >= self.deadline_ns:
            return
        self.waiting_for = "messages"
        wait_ms = min(self._settings.pull_wait_ms, self._settings.ttl_ms // 3)
        answer, payload = await self._broker.call(
            Pull(*self._who, self._reading.next_offset, self._settings.pull_bytes, wait_ms),
            wait_ms=wait_ms,
        )
        assert isinstance(answer, Batches)
        if answer.sealed:
            self._ends_at(answer.next_offset)
        for start, header in batch_starts(payload):
            self._open_batch(payload, start, header)
            if header.length < len(payload):
                await asyncio.sleep(0)

    def _open_batch(self, payload: memoryview, start: int, header: Header) -> None:
        """Cut a batch into messages and hand out those that are neither read nor acked."""
        if header.next_offset <= self._reading.next_offset:
            return
        messages = self._reading.unread(self._cut(payload, start, header, self), header)
        self._room.count += len(messages)
        self._hand_out(messages)

    def _pass_over(self, error: OffsetOutOfRangeError) -> None:
        """Go on at what is left if retention by time was faster than the handlers; else raises `error`."""
        first_offset = error.first_offset or 0
        if self._reading.next_offset >= first_offset:
            raise error
        missed = self._reading.pass_over(first_offset)
        log.warning(
            "partition %d: %s removed before group %s got them; it goes on at offset %d",
            self.partition_id, counted(missed, "message was", "messages were"), self._group, first_offset,
        )  # fmt: skip

    def _cut(
        self, payload: memoryview, start: int, header: Header, delivery: Delivery
    ) -> list[Message]:
        who = (self._subject, self.partition_id, self.token)
        return cut_messages(columns(payload, header, start), header, *who, delivery)

    async def _ack(self) -> None:
        attempt = 0
        idle_s = self._settings.ttl_ms / 3000
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    await self._ack_due.wait()
                await asyncio.sleep(self._settings.ack_linger_ms / 1000)
            except TimeoutError:
                if not self._reading.begun or self.lapsed:
                    continue
            try:
                await self._send_acks()
                attempt = 0
            except FencedError:
                raise
            except KeylaneError as error:
                attempt += 1
                log.info("acks of partition %d: %s", self.partition_id, error.message)
                await asyncio.sleep(self._settings.backoff.wait_ms(attempt, self._rng) / 1000)

    async def _send_acks(self) -> bool:
        """
        One request with what is handled, or an empty one that only renews the pull lock.

        Returns:
            False if the broker keeps no more ranges above the cursor: what is left waits for older messages.
        """
        self._ack_is_due = False
        self._ack_due.clear()
        try:
            answer, _ = await self._broker.call(Ack(*self._who, self._acks.take()))
        except OverloadedError as error:
            return self._refused(error)
        except BaseException:
            self._ack_due.set()
            raise
        assert isinstance(answer, Acked)
        self._acks.confirmed()
        if not self._acks.crowded:
            self._room.reopen()
        self._cursor = answer.cursor
        self._tell_drained()
        if self._acks:
            self._ack_due.set()
        return True

    def _refused(self, error: OverloadedError) -> bool:
        if not self._acks.crowded:
            log.warning(
                "partition %d: acks wait for older ones: %s", self.partition_id, error.message
            )
        if self.heeds_crowds:
            self._room.shut()
        fewer = self._acks.refused()
        if fewer:
            self._ack_due.set()
        return fewer

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────
    async def hand_over(self, *, flush_ms: int) -> None:
        """After the handlers ended: flush acks and give the pull lock back, within `flush_ms`."""
        await self.close()
        if self.fenced:
            return
        try:
            async with asyncio.timeout(flush_ms / 1000):
                while self._acks and await self._send_acks():
                    pass
                if self._reading.begun:
                    await self._broker.call(Release(*self._who))
        except (TimeoutError, KeylaneError) as error:
            # The next owner's higher token takes the partition all the same; what was not acked comes again.
            log.info("hand-over of partition %d: %s", self.partition_id, error or "too slow")

    async def close(self) -> None:
        """Stop the tasks; later acks are refused."""
        self._closed = True
        self.stop_starting()
        self._acking.cancel()
        await asyncio.gather(self._pulling, self._acking, return_exceptions=True)

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

from ..protocol.batch import batch_starts, columns
from ..protocol.clock import Clock
from ..protocol.control import Grant
from ..protocol.errors import (
    FencedError,
    KeylaneError,
    LeaseLostError,
    OffsetOutOfRangeError,
    Retry,
)
from ..protocol.frames import Ack, Acked, Acquire, Acquired, AcquireShared, Batches, Pull, Release
from ..protocol.message import Delivery, Message
from ..protocol.offsets import AckedOffsets
from ..protocol.record import Header
from ..rpc.client import BrokerClient
from .acks import AckQueue
from .cutting import cut_messages
from .settings import ConsumerSettings

log = logging.getLogger("keylane.consumer")
ROOM_SHARE = 2
"""Pulling goes on when less than 1/ROOM_SHARE of the buffer is in use."""


class PullClient:
    """
    Pulls one partition for one consumer session.

    `hand_out(messages)` gets messages in the order of their offsets, without those acked already;
    `on_lost(client)` hears that the broker fenced this token; `on_drained()` that the partition is sealed and acked
    to its end; `on_fatal(error)` of what no retry mends.
    """

    once = True
    """Under one token it is made only once, so that nothing is handled again."""

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
        dice: random.Random,
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
        self.stopping = False
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
        assert grant.partition.address is not None
        self._broker_at = broker_at
        self._broker = broker_at(grant.partition.address)
        self._settings = settings
        self._clock = clock
        self._dice = dice
        self._hand_out = hand_out
        self._on_lost = on_lost
        self._on_drained = on_drained
        self._on_fatal = on_fatal
        self._acks = AckQueue()
        self._acked = AckedOffsets()
        self._taken: set[int] = set()
        """Offsets that iteration gave to the user, who has not acked them yet."""
        self._next_offset = -1
        self._sealed_end: int | None = None
        self._cursor = 0
        self._drained_told = False
        self._closed = False
        self._lease_until_ms = deadline_ms
        self._buffered = 0
        self._low_water = settings.buffer_messages // ROOM_SHARE
        self._starved = False
        """True while pulling waits for room."""
        self._room = asyncio.Event()
        self._ack_is_due = False
        self._ack_due = asyncio.Event()
        self._settled = asyncio.Event()
        self._pulling = asyncio.create_task(self._run(self._pull), name=f"pull {self.partition_id}")
        self._acking = asyncio.create_task(self._run(self._ack), name=f"ack {self.partition_id}")

    # ── the lease ────────────────────────────────────────────────────────────────────────────────────
    def renew(self, deadline_ms: int, address: str | None) -> None:
        """
        The lease now ends at `deadline_ms`, and the broker is at `address`; None if nobody knows now.

        A lapsed lease is not renewed: messages may have been left out.
        """
        if self.lapsed:
            return
        if address is not None and address != self._broker.address:
            self._broker = self._broker_at(address)
        self.deadline_ns = deadline_ms * 1_000_000
        self._lease_until_ms = deadline_ms

    @property
    def lapsed(self) -> bool:
        """True when this client lost its right for good: fenced, or past its deadline."""
        return self.fenced or self._clock.boot_ms() >= self._lease_until_ms

    @property
    def left_ms(self) -> int:
        """What is left of the lease."""
        return max(0, self._lease_until_ms - self._clock.boot_ms())

    def stop_starting(self) -> None:
        """From now on no handler starts and nothing more is pulled."""
        self.stopping = True
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
        self._buffered -= 1
        if self._buffered <= self._low_water:
            self._below_low_water()

    def forget(self, count: int) -> None:
        """So many of the messages handed out are no longer waiting or running."""
        self._buffered -= count
        if self._buffered <= self._low_water:
            self._below_low_water()

    def _below_low_water(self) -> None:
        if self._starved:
            self._starved = False
            self._room.set()
        if self.stopping:
            self._settled.set()

    def taken(self, message: Message) -> None:
        """Iteration gave the message to the user, who is going to ack it."""
        self._taken.add(message.offset)

    def check_ours(self, message: Message) -> None:
        """Raises LeaseLostError if acks are taken no more."""
        if self._closed or self.lapsed:
            raise LeaseLostError(partition_id=self.partition_id, offset=message.offset)

    async def ack(self, message: Message) -> None:
        """The user's ack; once more, or of what a handler was given and returns from, is harmless."""
        self.check_ours(message)
        if message.offset in self._taken:
            self._taken.remove(message.offset)
            self.done(message.offset)

    @property
    def outstanding(self) -> int:
        """Messages handed out and neither done nor forgotten."""
        return self._buffered

    async def settled(self) -> None:
        """Wait until everything handed out is done or forgotten."""
        while self._buffered:
            self._settled.clear()
            await self._settled.wait()

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────
    async def _run(self, body: Callable[[], Awaitable[None]]) -> None:
        try:
            await body()
        except FencedError as error:
            log.info("partition %d: %s", self.partition_id, error.message)
            self._lose(error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._on_fatal(error)
            raise

    def _lose(self, error: FencedError) -> None:
        if not self.fenced:
            self.fenced = True
            self.fence = int(error.details.get("current_token") or 0)
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
            except KeylaneError as error:
                if error.retry is Retry.NEVER and isinstance(error, OffsetOutOfRangeError):
                    raise
                acquired = False
                attempt += 1
                self.waiting_for = error.message
                log.info("partition %d: %s", self.partition_id, error.message)
                await asyncio.sleep(self._settings.backoff.wait_ms(attempt, self._dice) / 1000)

    @property
    def _exhausted(self) -> bool:
        """The partition is sealed, and all of it is pulled."""
        return self._sealed_end is not None and self._next_offset >= self._sealed_end

    def _acquire_request(self) -> Acquire | AcquireShared:
        ttl_ms = self._settings.ttl_ms
        return Acquire(0, self.partition_id, self._group, self.session, self.token, ttl_ms)

    async def _acquire(self) -> None:
        answer, _ = await self._broker.call(self._acquire_request())
        assert isinstance(answer, Acquired)
        if self._next_offset < 0:
            self._acked = AckedOffsets(answer.cursor, list(answer.ranges))
            self._next_offset = self._cursor = answer.cursor
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
        """Until fewer than `limit` messages are with handlers."""
        if self._buffered >= limit:
            self._starved = True
            self._room.clear()
            self.waiting_for = "handlers"
            await self._room.wait()

    async def _pull_once(self) -> None:
        await self._wait_for_room(self._settings.buffer_messages)
        if self._clock.boot_ns() >= self.deadline_ns:
            return
        self.waiting_for = "messages"
        wait_ms = min(self._settings.pull_wait_ms, self._settings.ttl_ms // 3)
        answer, payload = await self._broker.call(
            Pull(
                0,
                self.partition_id,
                self._group,
                self.session,
                self.token,
                self._next_offset,
                self._settings.pull_bytes,
                wait_ms,
            ),
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
        """Cut a batch into messages and hand out those at or above the next offset that are not acked."""
        if header.next_offset <= self._next_offset:
            return
        messages = self._cut(payload, start, header, self)
        if header.base_offset < self._next_offset:
            del messages[: self._next_offset - header.base_offset]
        if self._acked.ranges or self._acked.cursor > self._next_offset:
            messages = [one for one in messages if one.offset not in self._acked]
        self._next_offset = header.next_offset
        self._buffered += len(messages)
        self._hand_out(messages)

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
                if self._next_offset < 0 or self.lapsed:
                    continue
            try:
                await self._send_acks()
                attempt = 0
            except FencedError:
                raise
            except KeylaneError as error:
                attempt += 1
                log.info("acks of partition %d: %s", self.partition_id, error.message)
                await asyncio.sleep(self._settings.backoff.wait_ms(attempt, self._dice) / 1000)

    async def _send_acks(self) -> None:
        """One request with what is handled, or an empty one that only renews the pull lock."""
        self._ack_is_due = False
        self._ack_due.clear()
        try:
            answer, _ = await self._broker.call(
                Ack(
                    0,
                    self.partition_id,
                    self._group,
                    self.session,
                    self.token,
                    self._acks.take(),
                )
            )
        except BaseException:
            self._ack_due.set()
            raise
        assert isinstance(answer, Acked)
        self._acks.confirmed()
        self._cursor = answer.cursor
        self._tell_drained()
        if self._acks:
            self._ack_due.set()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────
    async def hand_over(self, *, flush_ms: int) -> None:
        """After the handlers ended: flush acks and give the pull lock back, within `flush_ms`."""
        await self.close()
        if self.fenced:
            return
        try:
            async with asyncio.timeout(flush_ms / 1000):
                while self._acks:
                    await self._send_acks()
                if self._next_offset >= 0:
                    await self._broker.call(
                        Release(0, self.partition_id, self._group, self.session, self.token)
                    )
        except (TimeoutError, KeylaneError) as error:
            # The next owner's higher token takes the partition all the same; what was not acked comes again.
            log.info("hand-over of partition %d: %s", self.partition_id, error or "too slow")

    async def close(self) -> None:
        """Stop the tasks; later acks are refused."""
        self._closed = True
        self.stop_starting()
        self._acking.cancel()
        await asyncio.gather(self._pulling, self._acking, return_exceptions=True)

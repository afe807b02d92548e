"""Consumes a partition under a grant: fence, pull, hand out, ack, release.

    ACQUIRE ─▶ PULL ⇄ hand out ─▶ handled ─▶ ack queue ─▶ ACK       stop: finish handlers ─▶ flush acks ─▶ RELEASE

`lifetime.py` has the states.

Invariants
    The fence is raised before the cursor is read; nothing is pulled without it.
    After `deadline_ns` no handler starts and no request renews the pull lock.
    After a restart of the broker the fence is raised again under the same token; no message is pulled twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ...protocol.batch import batch_starts, columns
from ...protocol.clock import Clock
from ...protocol.codecs.codec import Codec
from ...protocol.control import Grant
from ...protocol.errors import (
    FencedError,
    InvalidRequestError,
    KeylaneError,
    LeaseLostError,
    OffsetOutOfRangeError,
    OverloadedError,
)
from ...protocol.frames import Ack, Acked, Acquire, Acquired, AcquireShared, Batches, Pull, Release
from ...protocol.message import Delivery, Message
from ...protocol.record import Header
from ...protocol.text import counted
from ...rpc.connections import Connections
from ..settings import AckMode, ConsumerSettings
from .acks import AckQueue
from .decode import decode_messages
from .fetch_offsets import FetchOffsets
from .lifetime import Lifetime, PullEvent, PullState
from .messages_in_flight import MessagesInFlight

log = logging.getLogger("keylane.consumer")


class PullOwner(Protocol):
    """What a pull client needs of its consumer."""

    codec: Codec[Any] | None

    def hand_out(self, messages: list[Message]) -> None:
        """Take messages of one partition, by offset, without those acked already."""
        ...

    def end(self, client: PullClient) -> None:
        """Hand the client's partition over; the client pulls nothing more."""
        ...

    def nack(self, message: Message, after_s: float) -> None:
        """Hand a message out again, which the user gave back."""
        ...

    def acked_again(self, message: Message) -> None:
        """Take note of the ack of a message that was handed out behind one that the user gave back, or was that one."""
        ...

    def report_drained(self) -> None:
        """Tell the metaserver soon that a partition is drained."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the consumer with an error that no retry can help."""
        ...


class PullClient:
    """
    Pulls one partition for one consumer session.

    Args:
        grant: the partition, with the address of its broker, and the fencing token.
        connections: give the client of a broker, and know where the consumer is open.
        deadline_ms: end of the lease on the boot clock.
        owner: gets the messages, and is told of changes of the partition.
    """

    token_is_single_use = True
    """Only one pull client is made for a token, so that no message is handled twice under it."""
    respects_range_limit = True
    """Stop pulling while the broker takes no more ranges above the cursor: only messages pulled already fill its gaps."""
    exclusive = True
    """As a delivery of messages: no other session has a message under their token."""
    exempts_retries = False
    """Messages waiting for their next try do not count against the limit, up to `buffer_messages` of them."""

    def __init__(
        self,
        *,
        subject: str,
        group: str,
        session: str,
        grant: Grant,
        connections: Connections,
        deadline_ms: int,
        settings: ConsumerSettings,
        clock: Clock,
        rng: random.Random,
        owner: PullOwner,
    ) -> None:
        self.partition_id = int(grant.partition.partition_id)
        self.token = grant.token
        self.queue = int(grant.partition.queue)
        self.logic_start = grant.partition.logic_start
        self.group = group
        self.session = session
        self.codec = owner.codec
        self.client = self
        """As a delivery of messages: the pull client whose messages end together."""
        self.life = Lifetime(deadline_ms)
        self.deadline_ns = self.life.deadline_ns
        """`life.deadline_ns`, kept here because it is read before every handler."""
        self.waiting_for = "the fence"
        """For people: what pulling waits for."""
        self._subject = subject
        self._group = group
        self._who = (self.partition_id, group, session, self.token)
        assert grant.partition.address is not None
        self._connections = connections
        self._broker = connections.broker_at(grant.partition.address)
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._owner = owner
        self._acks = AckQueue()
        self._offsets = FetchOffsets()
        self.acks_each = settings.ack is AckMode.EACH
        """The next message of a key waits for the ack of the one before."""
        self._taken: set[int] = set()
        """Offsets that iteration gave to the user and the user has not acked."""
        self._given_back: set[int] = set()
        """Offsets that the user gave back, and was not given again."""
        self.in_lanes: set[int] = set()
        """Those of them whose ack lets the next message of a key be handed out."""
        self._in_flight = MessagesInFlight(
            retrying_max=settings.buffer_messages if self.exempts_retries else 0
        )
        self._ack_is_due = False
        """True while `_ack_due` is set; cheaper to read for every handled message."""
        self._ack_due = asyncio.Event()
        self._ack_waiters: list[asyncio.Future[bool]] = []
        """Of `acked`: done with the request that has all that was handled before the call."""
        self._pulling = asyncio.create_task(self._run(self._pull), name=f"pull {self.partition_id}")
        self._acking = asyncio.create_task(self._run(self._ack), name=f"ack {self.partition_id}")

    # ── the lease ────────────────────────────────────────────────────────────────────────────────────
    def renew(self, deadline_ms: int, address: str | None) -> None:
        """
        Let the lease end at `deadline_ms`, and follow the broker to `address`; None: not known now.

        A lapsed lease is not renewed, because messages may have been skipped.  No handler starts during a hand-over.
        """
        if not self.life.renew(deadline_ms, self._clock.boot_ms()):
            return
        if address is not None and address != self._broker.address:
            self._broker = self._connections.broker_at(address)
        self.deadline_ns = self.life.deadline_ns

    @property
    def fenced(self) -> bool:
        """True once the broker has seen a higher token."""
        return self.life.fenced

    @property
    def lapsed(self) -> bool:
        """True once the right to the partition is lost for good: fenced, or past the end of the lease."""
        return self.life.lapsed(self._clock.boot_ms())

    @property
    def left_ms(self) -> int:
        """Milliseconds until the lease ends."""
        return self.life.left_ms(self._clock.boot_ms())

    @property
    def renewed_ms(self) -> int:
        """The boot time at which the last heartbeat that renewed the lease was sent."""
        return self.life.lease_until_ms - self._settings.ttl_ms + self._settings.margin_ms

    def stop(self) -> None:
        """Start no handler and pull nothing from now on."""
        self._on(PullEvent.STOPPED)
        self._pulling.cancel()

    def _on(self, event: PullEvent) -> None:
        self.life.on(event)
        self.deadline_ns = self.life.deadline_ns

    @property
    def cursor(self) -> int:
        """The offset below which the broker has an ack of every message."""
        return self._offsets.cursor

    @property
    def drained(self) -> bool:
        """True when the partition is sealed, and its group has acked it to the end."""
        return self._offsets.drained

    # ── what handlers did ────────────────────────────────────────────────────────────────────────────
    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        self._acks.done(offset)
        if not self._ack_is_due:
            self._ack_is_due = True
            self._ack_due.set()
        in_flight = self._in_flight
        in_flight.count -= 1
        if in_flight.count <= in_flight.wake_at:
            in_flight.wake()

    def forget(self, count: int) -> None:
        """Note that `count` of the messages handed out will not be handled here."""
        self._in_flight.remove(count)

    def add_retrying(self, count: int) -> None:
        """Note that `count` more of the messages handed out wait for their next try; fewer, if it is negative."""
        self._in_flight.add_retrying(count)

    def taken(self, message: Message) -> None:
        """Note that the iteration gave the message to the user, who will ack it."""
        self._taken.add(message.offset)
        if self._given_back:
            self.given_again(message)

    def given_again(self, message: Message) -> None:
        """Note that the user has a message again that was given back."""
        self._given_back.discard(message.offset)

    def check_takes_ack(self, message: Message) -> None:
        """
        Check that the user may ack.

        Raises:
            LeaseLostError: the partition was handed over, or its lease has ended.
            ForkedError, OtherLoopError: the consumer is open in another process or event loop.
        """
        self._connections.home.check_thread()
        if not self.life.takes_acks(self._clock.boot_ms()):
            raise LeaseLostError(partition_id=self.partition_id, offset=message.offset)

    async def ack(self, message: Message) -> None:
        """Take the user's ack; no effect for a second ack, or for a message that a handler was given."""
        self.check_takes_ack(message)
        if message.offset in self._taken:
            self._taken.remove(message.offset)
            self.done(message.offset)
            if self.in_lanes:
                self.left_hand(message)
            if self.acks_each and not await self.acked():
                self.check_takes_ack(message)
        elif self._given_back:
            self.check_not_given_back(message)

    def check_not_given_back(self, message: Message) -> None:
        """Raises InvalidRequestError: the user gave the message back, and it comes again."""
        if message.offset in self._given_back:
            raise InvalidRequestError(
                f"message {message.offset} of partition {self.partition_id} was given back; ack it when it comes again"
            )

    async def acked(self) -> bool:
        """
        Wait until the acks of all that was handled before are durable.

        Returns:
            False if they are not: the broker takes no more ranges now, or the partition was handed over.
        """
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._ack_waiters.append(waiter)
        return await waiter

    async def nack(self, message: Message, after_s: float) -> None:
        """Take a message back from the user.  Raises InvalidRequestError, LeaseLostError, ConfigError."""
        self.take_back(message, self._taken, after_s)

    def take_back(self, message: Message, taken: set[int], after_s: float) -> None:
        """Hand a message out again that is among those `taken`."""
        self.check_takes_ack(message)
        if message.offset not in taken:
            raise InvalidRequestError(
                f"message {message.offset} of partition {self.partition_id} is acked or given back already, or a "
                "handler has it: that raises keylane.Retry"
            )
        self._owner.nack(message, after_s)
        taken.remove(message.offset)
        self._given_back.add(message.offset)
        self.in_lanes.discard(message.offset)

    def left_hand(self, message: Message) -> None:
        """Let the next message of a lane be handed out, if the acked one was of a lane."""
        if message.offset in self.in_lanes:
            self.in_lanes.remove(message.offset)
            self._owner.acked_again(message)

    @property
    def missed(self) -> int:
        """Messages that retention removed before they were pulled."""
        return self._offsets.missed

    @property
    def outstanding(self) -> int:
        """Messages handed out and not yet handled or forgotten."""
        return self._in_flight.count

    async def wait_handled(self) -> None:
        """Wait until every message handed out is handled or forgotten."""
        await self._in_flight.wait_until_empty()

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────
    async def _run(self, body: Callable[[], Awaitable[None]]) -> None:
        try:
            await body()
        except FencedError as error:
            log.info("partition %d: %s", self.partition_id, error.message)
            self._fence(error)
        except OffsetOutOfRangeError as error:
            # The broker stores less than was pulled from it.  Only an owner with the next token may begin again.
            log.error("partition %d is handed over: %s", self.partition_id, error.message)
            self._owner.end(self)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self._owner.fail(error)
            raise

    def _fence(self, error: FencedError) -> None:
        first = self.life.on_fence(error.current_token or 0)
        self.deadline_ns = self.life.deadline_ns
        if first:
            self._owner.end(self)

    async def _pull(self) -> None:
        pauses = self._settings.backoff.pauses(self._rng)
        while self._clock.boot_ns() < self.deadline_ns:
            try:
                if self.life.state is PullState.ACQUIRING:
                    await self._acquire()
                    self._on(PullEvent.ACQUIRED)
                if self._exhausted:
                    self.waiting_for = "acks to the end" if not self.drained else ""
                    self._on(PullEvent.EXHAUSTED)
                    return
                await self._pull_once()
                pauses.reset()
            except FencedError:
                raise
            except OffsetOutOfRangeError as error:
                self._skip_removed(error)
            except KeylaneError as error:
                self._on(PullEvent.FAILED)
                self.waiting_for = error.message
                log.info("partition %d: %s", self.partition_id, error.message)
                await asyncio.sleep(pauses.next_ms() / 1000)

    @property
    def _exhausted(self) -> bool:
        """True when no further message will be pulled."""
        return self._offsets.exhausted

    def _acquire_request(self) -> Acquire | AcquireShared:
        return Acquire(*self._who, self._settings.ttl_ms)

    async def _acquire(self) -> None:
        answer, _ = await self._broker.call(self._acquire_request())
        assert isinstance(answer, Acquired)
        if not self._offsets.begun:
            self._offsets.begin(answer.cursor, answer.ranges)
        if answer.sealed:
            self._sealed_at(answer.next_offset)

    def _sealed_at(self, end_offset: int) -> None:
        """Note that the partition ends at `end_offset`."""
        drained = self.drained
        self._offsets.end_offset = end_offset
        self._report_drained(before=drained)

    def _acked_to(self, cursor: int) -> None:
        """Note that the broker has acks of all messages below `cursor`."""
        drained = self.drained
        self._offsets.cursor = cursor
        self._report_drained(before=drained)

    def _report_drained(self, *, before: bool) -> None:
        """Report that the partition is drained, if it was not `before`."""
        if self.drained and not before:
            self._owner.report_drained()

    async def _wait_for_capacity(self, limit: int) -> None:
        """Wait until fewer than `limit` messages are with handlers, and the broker takes acks of more."""
        if not self._in_flight.has_capacity(limit):
            self.waiting_for = "handlers"
            await self._in_flight.wait_for_capacity(limit)

    async def _pull_once(self) -> None:
        await self._wait_for_capacity(self._settings.buffer_messages)
        if self._clock.boot_ns() >= self.deadline_ns:
            return
        self.waiting_for = "messages"
        wait_ms = min(self._settings.pull_wait_ms, self._settings.ttl_ms // 3)
        answer, payload = await self._broker.call(
            Pull(*self._who, self._offsets.next_offset, self._settings.pull_bytes, wait_ms),
            wait_ms=wait_ms,
        )
        assert isinstance(answer, Batches)
        if answer.sealed:
            self._sealed_at(answer.next_offset)
        for start, header in batch_starts(payload):
            self._open_batch(payload, start, header)
            if header.length < len(payload):
                await asyncio.sleep(0)

    def _open_batch(self, payload: memoryview, start: int, header: Header) -> None:
        """Decode a batch and hand out the messages that were neither pulled before nor acked."""
        if header.next_offset <= self._offsets.next_offset:
            return
        messages = self._offsets.unseen(self._decode(payload, start, header, self), header)
        self._in_flight.count += len(messages)
        self._owner.hand_out(messages)

    def _skip_removed(self, error: OffsetOutOfRangeError) -> None:
        """
        Skip messages that retention removed before they were pulled.

        Raises:
            OffsetOutOfRangeError: `error`, if no message was removed: the broker stores less than was pulled.
        """
        first_offset = error.first_offset or 0
        if self._offsets.next_offset >= first_offset:
            raise error
        missed = self._offsets.skip_removed(first_offset)
        log.warning(
            "partition %d: %s removed before group %s got them; it continues at offset %d",
            self.partition_id, counted(missed, "message was", "messages were"), self._group, first_offset,
        )  # fmt: skip

    def _decode(
        self, payload: memoryview, start: int, header: Header, delivery: Delivery
    ) -> list[Message]:
        who = (self._subject, self.partition_id, self.token)
        return decode_messages(columns(payload, header, start), header, *who, delivery)

    async def _ack(self) -> None:
        pauses = self._settings.backoff.pauses(self._rng)
        idle_s = self._settings.ttl_ms / 3000
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    await self._ack_due.wait()
                await asyncio.sleep(0 if self.acks_each else self._settings.ack_linger_ms / 1000)
            except TimeoutError:
                if not self._offsets.begun or self.lapsed:
                    continue
            try:
                await self._send_acks()
                pauses.reset()
            except FencedError:
                raise
            except KeylaneError as error:
                log.info("acks of partition %d: %s", self.partition_id, error.message)
                await asyncio.sleep(pauses.next_ms() / 1000)

    async def _send_acks(self) -> bool:
        """
        Send one request with the handled offsets, or an empty one that only renews the pull lock.

        Returns:
            False if the broker keeps no more ranges above the cursor; the other acks wait for those of older messages.
        """
        self._ack_is_due = False
        self._ack_due.clear()
        ranges = self._acks.take()
        left_over = self._acks.left_over
        waiters, self._ack_waiters = self._ack_waiters, []
        try:
            answer, _ = await self._broker.call(Ack(*self._who, ranges))
        except OverloadedError as error:
            _release(waiters, durable=False)  # else no worker would be left for the older messages
            return self._refused(error)
        except BaseException:
            self._ack_due.set()
            self._ack_waiters = waiters + self._ack_waiters
            raise
        assert isinstance(answer, Acked)
        self._acks.confirmed()
        if not self._acks.at_range_limit:
            self._in_flight.unblock()
        self._acked_to(answer.cursor)
        if self._acks:
            self._ack_due.set()
        if left_over:
            self._ack_waiters = waiters + self._ack_waiters
        else:
            _release(waiters, durable=True)
        return True

    def _refused(self, error: OverloadedError) -> bool:
        if not self._acks.at_range_limit:
            log.warning(
                "partition %d: acks wait for older ones: %s", self.partition_id, error.message
            )
        if self.respects_range_limit:
            self._in_flight.block()
        fewer = self._acks.refused()
        if fewer:
            self._ack_due.set()
        return fewer

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────
    async def hand_over(self, *, flush_ms: int) -> None:
        """Once stopped, and once its handlers have ended: send the last acks and release the pull lock, within `flush_ms`."""
        self._on(PullEvent.CLOSED)
        self._acking.cancel()
        await asyncio.gather(self._pulling, self._acking, return_exceptions=True)
        try:
            if self.fenced:
                return
            async with asyncio.timeout(flush_ms / 1000):
                while self._acks and await self._send_acks():
                    pass
                if self._offsets.begun:
                    await self._broker.call(Release(*self._who))
        except (TimeoutError, KeylaneError) as error:
            # The next owner's higher token takes the partition all the same; messages without an ack are redelivered.
            log.info("hand-over of partition %d: %s", self.partition_id, error or "too slow")
        finally:
            _release(self._ack_waiters, durable=not self._acks)


def client_of(message: Message) -> PullClient:
    """The pull client that handed `message` out."""
    client: PullClient = message.delivery.client  # type: ignore[union-attr]
    return client


def _release(waiters: list[asyncio.Future[bool]], *, durable: bool) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(durable)

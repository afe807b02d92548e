"""Consumes a partition under a grant: fence, pull, hand out, ack, release.

    ACQUIRE ─▶ PULL ⇄ hand out ─▶ handled ─▶ ack queue ─▶ ACK
    stop: finish handlers ─▶ flush acks ─▶ RELEASE

`lifetime.py` has the states.

Invariants
    The fence is raised before the cursor is read; nothing is pulled without it.
    After `deadline_ns` no handler starts and no request renews the pull lock.
    After a restart of the broker the fence is raised again under the same token; no message is
    pulled twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from threading import get_ident

from ...protocol.batch import batch_starts, column_views
from ...protocol.clock import Clock, deadline_seconds
from ...protocol.control import Grant
from ...protocol.errors import FencedError, KeylaneError, LeaseLostError, OffsetOutOfRangeError
from ...protocol.frames import (
    Acked,
    Acquire,
    Acquired,
    AcquireShared,
    Answer,
    Batches,
    Pull,
    Release,
)
from ...protocol.limits import PULL_ANSWERS_MAX
from ...protocol.log_filter import LogFilter
from ...protocol.message import Delivery, Message
from ...protocol.parked import Failure
from ...protocol.record import Header
from ...protocol.text import counted
from ...rpc.connections import Connections
from ...rpc.home import Home
from ...rpc.race import start_task
from ..delivery.decode import decode_messages
from ..delivery.pulled_batch import CutBatch, PulledBatch
from ..delivery.user_acks import UserAcks
from ..log_names import partition_name
from ..parking.context import ParkContext
from ..parking.key_parking import KeyParking
from ..pull_room import BudgetShare
from ..settings import ConsumerSettings
from ..unreached import NO_CONNECTION
from .ack_sender import AckSender
from .acks import ranges_of
from .careful import CarefulHandOut
from .fetch_offsets import FetchOffsets
from .lifetime import ANSWERED, Lifetime, PullEvent, PullState
from .messages_in_flight import MessagesInFlight
from .progress import Position, PullProgress
from .pull_chain import PullChain
from .pull_gate import PAUSED, PullGate
from .pull_owner import PullOwner

log = logging.getLogger("keylane.consumer")
WARN_AFTER = 8
"""The number of consecutive failures of pulls, after about 5 s of pauses, from which on they are
logged as warnings.
"""
AT_ONCE_BYTES = 64 << 10
"""The pulled bytes that are handed out as they arrive; beyond it, the event loop turns between
batches.
"""


class PullClient(UserAcks):
    """
    Pulls one partition for one consumer session.

    Args:
        grant: the partition, with the address of its broker, and the fencing token.
        connections: the connections, which give the client of a broker, and know where the consumer
            is open.
        deadline_ms: end of the lease on the boot clock.
        owner: gets the messages, and is notified of changes of the partition.
    """

    runs = True
    token_is_single_use = True
    """True if only one pull client is made for a token, so that no message is handled twice under
    it.
    """
    respects_range_limit = True
    """True if pulling stops while the broker takes no more ranges above the cursor, because only
    messages that are already pulled fill its gaps.
    """
    exclusive = True
    """True for a delivery whose messages no other session has under their token."""
    renewal_ms = math.inf
    exempts_retries = False
    """True if messages waiting for their next try do not count against the limit, up to
    `buffer_messages` of them.
    """
    no_connection_since_ms: int | None = None
    """The boot time, in milliseconds, since which no call of the partition has reached its broker;
    None if the last one did.
    """

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
        self.leased_id = self.partition_id
        self.token = grant.token
        self.queue = int(grant.partition.queue)
        self.broker_group = str(grant.partition.broker_group)
        self.logic_start = grant.partition.logic_start
        self.group = group
        self.session = session
        self.codec = owner.codec
        self.client = self
        """The pull client whose messages end together, for a delivery of messages."""
        self.life = Lifetime(deadline_ms)
        self._note_deadlines()
        self.waiting_for = "the fence"
        """A description, for people, of what pulling waits for."""
        self._subject = subject
        self._who = (self.partition_id, group, session, self.token)
        assert grant.partition.address is not None
        self._connections = connections
        self.broker = connections.broker_at(grant.partition.address)
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self.wall_ms = clock.wall_ms
        self.boot_ns = clock.boot_ns
        self.owner = owner
        super().__init__()
        context = ParkContext(
            self,
            owner,
            grant,
            self._who,
            subject=subject,
            connections=connections,
            settings=settings,
            rng=rng,
        )
        self.parking = KeyParking(context)
        self._begin()

    def _begin(self) -> None:
        settings = self._settings
        self._offsets = FetchOffsets()
        self._stored_upto = 0
        """The offset after the last message that the broker is known to have."""
        self._told_drained = False
        self._progress = PullProgress()
        self.gate = PullGate()
        self._in_flight = MessagesInFlight(
            retrying_max=settings.buffer_messages if self.exempts_retries else 0
        )
        self._chain = PullChain(self, timeout_ms=settings.call_timeout_ms)
        self._budget_share: BudgetShare = self.owner.budget.new_share()
        self._pauses = settings.backoff.pauses(self._rng)
        self._troubles = LogFilter()
        """The log filter for pulls that fail."""
        sender = self._new_sender()
        self.acks = self._acks = sender
        self._handled = sender.handled
        self._tries = sender.tries
        self.acks_each = sender.each
        """True if the next message of a key waits for the ack of the previous one."""
        self.note_failed = sender.failed
        """A callable that has the broker record how often a message has failed, and show why."""
        self.note_hangs = sender.hangs
        self._careful: CarefulHandOut | None = None
        """The careful hand-out of pulled messages, while some of them may have ended the process of
        an earlier owner.
        """
        self._carefully: asyncio.Task[None] | None = None
        self._pulling = start_task(self.run(self._pull), name=f"pull {self.partition_id}")
        self._acking = start_task(self.run(sender.run), name=f"ack {self.partition_id}")

    def _new_sender(self) -> AckSender:
        return AckSender(
            self, self._who, in_flight=self._in_flight, settings=self._settings, rng=self._rng
        )

    # ── the lease ─────────────────────────────────────────────────────────────────────────────────
    def renew(self, deadline_ms: int, address: str | None) -> None:
        """
        Let the lease end at `deadline_ms`, and follow the broker to `address` (None: not known
        now).

        A lapsed lease is not renewed, because messages may have been skipped. No handler starts
        during a hand-over.
        """
        if not self.life.renew(deadline_ms, self._clock.boot_ms()):
            return
        if address is not None and address != self.broker.address:
            self.broker = self._connections.broker_at(address)
            # A broker that still answers at the old address would let its pull wait to the end.
            self._chain.end()
        self._note_deadlines()

    def stop(self) -> None:
        """Start no handler and pull nothing from now on."""
        self._on(PullEvent.STOPPED)
        self._pulling.cancel()
        if self._careful is not None and self._carefully is not None:
            self._carefully.cancel()
            self._careful.stop()

    def _note_deadlines(self) -> None:
        self.deadline_ns = self.life.deadline_ns
        """The value of `life.deadline_ns`, kept here because it is read before every handler."""
        self.deadline_s = deadline_seconds(self.deadline_ns)
        self.acks_until_ns = self.life.acks_until_ns

    def _on(self, event: PullEvent) -> None:
        self.life.on(event)
        self._note_deadlines()

    # ── parked messages ───────────────────────────────────────────────────────────────────────────
    def hand_out(self, messages: list[Message]) -> None:
        """Count messages as handed out, and give them to handlers or the iteration."""
        self._in_flight.count += len(messages)
        self.owner.hand_out(messages)

    def give(self, messages: list[Message]) -> None:
        """Give messages that are already counted as handed out to handlers."""
        self.owner.hand_out(messages)

    def settled(self) -> None:
        """Report that the partition is drained, if only parked messages were in the way."""
        self._report_drained(before=False)

    def is_of(self, message: Message) -> bool:
        """Return True if this client handed the message out, including one of an ancestor's."""
        return message.delivery is self or client_of(message) is self

    def held(self) -> list[Message]:
        """Return the messages that the next request renews: none, because no other session has them
        under this token.
        """
        return []

    def renewed(self, messages: list[Message], sent_ns: int) -> None:
        """Note that a request made at `sent_ns` has renewed messages."""

    # ── messages that are set aside ───────────────────────────────────────────────────────────────
    def divert(self, messages: list[Message]) -> list[Message]:
        """Park the messages whose keys are parked, among those that are counted as handed out, and
        return the others.
        """
        if not self.parking.keys:
            return messages
        left = self._divert(messages)
        self.forget(len(messages) - len(left))
        return left

    def leave_out_parked(self, batch: PulledBatch) -> None:
        """Park the rows of a batch whose keys are parked; they are counted as handed out."""
        if self.parking.keys:
            whole = self._decode(
                batch.record, 0, batch.header, self
            )  # their tries are counted once it is opened
            batch.keep(self.divert(batch.wanted(whole)))

    def _divert(self, messages: list[Message]) -> list[Message]:
        """Park the messages whose keys are parked, pass over the unwanted ones among them, and
        return the others.
        """
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
        """Set a message aside that failed too often, with those of its key that wait after it."""
        offsets = [message.offset, *(behind.offset for behind in waiting)]
        self._tries.ended([(message.offset, message.offset + 1)])
        self.parking.park(message.key, offsets, failure)
        self.forget(len(offsets))

    def bury(self, message: Message, failure: Failure) -> None:
        """Set a message aside alone, so that later ones of its key continue."""
        self._tries.ended([(message.offset, message.offset + 1)])
        self.parking.park(None, [message.offset], failure)
        self.forget(1)

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside alone until its next try, in `pause_ms`, so that later ones of its
        key continue.
        """
        self._tries.ended([(message.offset, message.offset + 1)])
        self.parking.retry(message.offset, failure, pause_ms)
        self.forget(1)

    def blocks(self, message: Message, failure: Failure) -> None:
        """Have the broker show, with the next ack, why a message holds others up."""
        self._tries.blocks(message, failure)

    def redriven_failed(self, source: int, message: Message, failure: Failure) -> None:
        """Have the broker show that a parked message, stored by partition `source`, fails again."""
        self._tries.redriven_failed(source, message, failure)
        self._acks.send_soon()

    def redriven_hangs(self, source: int, message: Message, why: Failure, running_ms: int) -> None:
        """Have the broker show that the try of such a message does not end."""
        if self._tries.redriven_hangs(source, message, why, running_ms):
            self._acks.send_soon()

    def redriven_ended(self, source: int, offset: int) -> None:
        """Note that this message is handled, or no longer here."""
        self._tries.redriven_ended(source, offset)

    # ── what handlers did ─────────────────────────────────────────────────────────────────────────
    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        handled = self._handled
        if offset == handled.end:
            handled.end = offset + 1
        else:
            handled.done(offset)
        if not self._acks.is_due:
            self._acks.send_soon()
        in_flight = self._in_flight
        in_flight.count -= 1
        if in_flight.count <= in_flight.wake_at:
            in_flight.wake()

    def done_all(self, messages: list[Message]) -> None:
        """Note that the messages, which are sorted by offset, are handled."""
        start, end = messages[0].offset, messages[-1].offset + 1
        if end - start == len(messages):
            self.done_range(start, end)
            return
        for first, last in ranges_of(messages):
            if self._careful is not None:
                self._careful.done_range(first, last)
            self._handled.done_range(first, last)
        self._acks.send_soon()
        self._in_flight.remove(len(messages))

    def done_range(self, start: int, end: int) -> None:
        """Note that the messages `[start, end)` are handled."""
        if self._careful is not None:
            self._careful.done_range(start, end)
        self._handled.done_range(start, end)
        self._acks.send_soon()
        self._in_flight.remove(end - start)

    def start_no_more(self) -> None:
        """Let no handler start, without notifying others: this process is a child."""
        self.deadline_ns = 0
        self.deadline_s = 0.0

    def forget(self, count: int) -> None:
        """Note that `count` of the messages handed out will not be handled here."""
        self._in_flight.remove(count)

    def add_retrying(self, count: int) -> None:
        """Note that `count` more of the messages handed out wait for their next try; fewer if it is
        negative.
        """
        self._in_flight.add_retrying(count)

    def check_takes_acks(self, offset: int) -> None:
        """
        Check that the user may ack the message at `offset`.

        Raises:
            LeaseLostError: the partition was handed over, or its lease has ended.
            UsageError: the consumer is open in another process or event loop.
        """
        home = self._connections.home
        if get_ident() != home.thread:
            home.check_thread()
        if self.boot_ns() >= self.acks_until_ns:
            raise LeaseLostError(partition_id=self.partition_id, offset=offset)

    # ── tasks ─────────────────────────────────────────────────────────────────────────────────────
    async def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run the body of a task, whose error ends this client or the consumer."""
        try:
            await body()
        except FencedError as error:
            log.info("%s: %s", self.log_name, error.message)
            self._fence(error)
        except OffsetOutOfRangeError as error:
            # The broker stores less than was pulled from it. Only an owner with the next token may
            # begin again.
            log.error("%s is handed over after an error: %s", self.log_name, error.message)
            self.owner.start_hand_over(self)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self.owner.fail(error)
            raise

    def _fence(self, error: FencedError) -> None:
        first = self.life.on_fence(error.current_token or 0)
        self._note_deadlines()
        if first:
            self.owner.start_hand_over(self)

    async def _pull(self) -> None:
        while self._clock.boot_ns() < self.deadline_ns:
            try:
                if self.life.state is PullState.ACQUIRING:
                    await self._acquire()
                    self._on(PullEvent.ACQUIRED)
                if self._exhausted:
                    self.waiting_for = "acks to the end" if not self.drained else ""
                    self._acks.linger_no_more()
                    self._on(PullEvent.EXHAUSTED)
                    return
                await self._pull_once()
                if self._pauses.failures:
                    self._note_recovered()
            except FencedError:
                raise
            except OffsetOutOfRangeError as error:
                self._skip_removed(error)
            except KeylaneError as error:
                self._on(PullEvent.FAILED)
                self._note_pull_failed(error)
                await asyncio.sleep(self._pauses.next_ms() / 1000)

    @property
    def _exhausted(self) -> bool:
        """Return True when no further message will be pulled."""
        return self._offsets.exhausted

    def _acquire_request(self) -> Acquire | AcquireShared:
        return Acquire(*self._who, self._settings.ttl_ms)

    async def _acquire(self) -> None:
        answer, _ = await self.broker.call(self._acquire_request())
        assert isinstance(answer, Acquired)
        self.no_connection_since_ms = None
        await self.parking.begin(answer)
        if not self._offsets.begun:
            self._offsets.begin(answer.cursor, answer.ranges)
            self._tries.begin(answer.attempts)
            if CarefulHandOut.has_suspects(answer):
                self._begin_carefully(answer)
        self._stored_upto = answer.next_offset
        if answer.sealed:
            self._sealed_at(answer.next_offset)

    def _begin_carefully(self, answer: Acquired) -> None:
        """Find out which message ends the process of its consumer, if there is one."""
        clock, settings = self._clock, self._settings
        self._careful = CarefulHandOut(self, self._acks, answer, settings=settings, clock=clock)
        body = self.run(self._careful.run)
        self._carefully = start_task(body, name=f"careful {self.partition_id}")

    def _sealed_at(self, end_offset: int) -> None:
        """Note that the partition ends at `end_offset`."""
        drained = self.drained
        self._offsets.end_offset = end_offset
        self._report_drained(before=drained)

    def acked_to(self, answer: Acked) -> None:
        """Note that acks are durable."""
        self.no_connection_since_ms = None
        if answer.parked_version:
            self.parking.note(answer.parked_version)  # before the partition counts as drained
        self._acked_to(answer.cursor)

    def _acked_to(self, cursor: int) -> None:
        """Note that the broker has acks of all messages below `cursor`."""
        offsets = self._offsets
        drained = offsets.end_offset is not None and self.drained
        offsets.cursor = cursor
        self._progress.acked(cursor)
        if offsets.end_offset is not None:
            self._report_drained(before=drained)

    def _report_drained(self, *, before: bool) -> None:
        """Report once that the partition is drained, if it was not drained `before`."""
        if self.drained and not before and not self._told_drained:
            self._told_drained = True
            self.owner.report_drained()

    async def _wait_while_held(self) -> None:
        if self.gate.reasons:
            self.waiting_for = ", ".join(sorted(self.gate.reasons))
            await self.gate.passed()

    async def _wait_for_capacity(self, limit: int) -> None:
        """Wait until fewer than `limit` messages are with handlers, and the broker takes acks of
        more.
        """
        if not self._in_flight.has_capacity(limit):
            self.waiting_for = "handlers"
            await self._in_flight.wait_for_capacity(limit)

    async def _pull_once(self) -> None:
        await self._wait_while_held()
        await self._wait_for_capacity(self._settings.buffer_messages)
        await self.parking.wait_for_room()
        if not self._reserves_budget():
            self.waiting_for = "other partitions"
            await self._budget_share.reserve(self._messages_ready, self._settings.pull_bytes)
        try:
            await self._pull_chain()
        finally:
            self._budget_share.end_pull()

    @property
    def _messages_ready(self) -> int:
        """Return the number of messages that the broker is known to have and that are not
        pulled.
        """
        return self._stored_upto - self._offsets.next_offset

    def _reserves_budget(self) -> bool:
        """Take room for the next pull, and return whether there was room."""
        return self._budget_share.try_reserve(self._messages_ready, self._settings.pull_bytes)

    async def _pull_chain(self) -> None:
        if self._clock.boot_ns() >= self.deadline_ns:
            return
        self.waiting_for = "messages"
        pulled = await self._chain.run()
        if pulled is None:
            return
        answer, payload = pulled
        assert isinstance(answer, Batches)
        await self.parking.check(answer.parked_version)
        self._came(answer, payload)
        await self._wait_while_held()
        if answer.sealed:
            self._sealed_at(answer.next_offset)
        opened = 0
        for header in self._open_batches(answer, payload):
            opened += header.length
            if opened >= AT_ONCE_BYTES and not self.owner.keeps_batches:  # otherwise they are cut
                opened = 0
                await asyncio.sleep(0)

    def _came(self, answer: Batches, payload: memoryview) -> None:
        """Note the size of the answer to a pull."""
        self._progress.end_offset = self._stored_upto = answer.next_offset
        self._budget_share.end_pull(len(payload), answer.upto - self._offsets.next_offset)

    def take_at_once(self, answer: Answer, payload: memoryview) -> bool:
        """Hand out the pulled messages; return False, with nothing done, if this needs a wait, or a
        turn of the event loop.
        """
        if (
            type(answer) is not Batches
            or answer.sealed
            or len(payload) > AT_ONCE_BYTES
            or self.gate.reasons
            or answer.parked_version > self.parking.version
        ):
            return False
        self._came(answer, payload)
        if answer.left_out:
            deque(self._open_batches(answer, payload), maxlen=0)
        else:
            for start, header in batch_starts(payload):
                self._open_batch(payload, start, header)
        if self._pauses.failures:
            self._note_recovered()
        return True

    def may_pull(self) -> bool:
        """Return True if nothing must be waited for before the next pull."""
        parking, offsets = self.parking, self._offsets
        return (
            not self.gate.reasons
            and self._in_flight.has_capacity(self._settings.buffer_messages)
            and (not parking.has_parked or parking.has_room)
            and (offsets.end_offset is None or not self._exhausted)
            and self.boot_ns() < self.deadline_ns
            and (self._stored_upto <= offsets.next_offset or self._reserves_budget())
        )

    def pull_request(self) -> Pull:
        """Return the next pull."""
        settings, wanted = self._settings, self.owner.wanted
        return Pull(
            *self._who,
            self._offsets.next_offset,
            settings.pull_bytes,
            min(settings.pull_wait_ms, settings.ttl_ms),
            () if wanted is None else wanted.tags,
            PULL_ANSWERS_MAX,
        )

    def _open_batches(self, answer: Batches, payload: memoryview) -> Iterator[Header]:
        """Open the pulled batches one by one."""
        left_out = deque(answer.left_out)
        for start, header in batch_starts(payload):
            while left_out and left_out[0][0] < header.base_offset:
                self._pass_over(*left_out.popleft())
            self._open_batch(payload, start, header)
            yield header
        for low, high in left_out:
            self._pass_over(low, high)

    def _pass_over(self, start: int, end: int) -> None:
        """Count the messages `[start, end)` as handled: the broker has left them out, and they are
        not wanted.
        """
        for low, high in self._offsets.pass_over(start, end):
            self._handled.done_range(low, high)
            self._acks.send_soon()
        if self._careful is not None:
            self._careful.put([])  # there is no suspect among them any more

    def _open_batch(self, payload: memoryview, start: int, header: Header) -> None:
        """Decode a batch and hand out the messages that were neither pulled before nor acked."""
        if header.base_offset + header.count <= self._offsets.next_offset:
            return
        self._progress.pulled(header)
        if self.owner.keeps_batches:
            record = payload[start : start + header.length]
            batch = PulledBatch(self, record, header, self._offsets.unseen_ranges(header))
            self._in_flight.count += batch.count
            if self._careful is not None and not self._careful.is_over:
                self._careful.put_batch(batch)
            else:
                self.owner.hand_out_batch(batch)
            return
        if self._careful is not None and not self._careful.is_over:
            messages = self._offsets.unseen(self._decode(payload, start, header, self), header)
            self._tries.count_on(messages)
            self._in_flight.count += len(messages)
            self._careful.put(messages)
            return
        cut = column_views(payload, header, start)  # this raises here if the batch does not unpack
        opened = CutBatch(self, cut, header, self._offsets.unseen_ranges(header))
        self._in_flight.count += opened.count
        if opened.count:
            self._budget_share.add_buffered(header.length)
        self.owner.hand_out_batch(opened)

    def open_cut(self, batch: CutBatch) -> list[Message]:
        """Return the messages of a batch to be handled now; messages of parked keys are parked
        instead.
        """
        self._budget_share.release_buffered(batch.header.length)
        who = (self._subject, self.partition_id, self.token)
        messages = decode_messages(batch.columns, batch.header, *who, self)
        if batch.count != batch.header.count:
            messages = batch.wanted(messages)
        batch.is_plain = not self._tries.earlier
        if not batch.is_plain:
            self._tries.count_on(messages)
        return self.divert(messages) if self.parking.keys else messages

    def _skip_removed(self, error: OffsetOutOfRangeError) -> None:
        """
        Skip messages that retention removed before they were pulled.

        Raises:
            OffsetOutOfRangeError: `error`, if no message was removed, so that the broker stores
                less than was pulled.
        """
        first_offset = error.first_offset or 0
        if self._offsets.next_offset >= first_offset:
            raise error
        missed = self._offsets.skip_removed(first_offset)
        if self._careful is not None:
            self._careful.put([])  # there is no suspect among them any more
        log.warning(
            "%s: %s removed before the group got them; it continues at offset %d",
            self.log_name,
            counted(missed, "message was", "messages were"),
            first_offset,
        )

    def decode(self, record: memoryview, header: Header) -> list[Message]:
        """Return every message of a batch that the owner keeps."""
        messages = self._decode(record, 0, header, self)
        self._tries.count_on(messages)
        return messages

    def _decode(
        self, payload: memoryview, start: int, header: Header, delivery: Delivery
    ) -> list[Message]:
        who = (self._subject, self.partition_id, self.token)
        return decode_messages(column_views(payload, header, start), header, *who, delivery)

    # ── what it is asked and told ─────────────────────────────────────────────────────────────────
    def note_unanswered(self, error: KeylaneError) -> None:
        """Note why a call of the partition failed."""
        if not isinstance(error, NO_CONNECTION):
            self.no_connection_since_ms = None
        elif self.no_connection_since_ms is None:
            self.no_connection_since_ms = self._clock.boot_ms()

    @property
    def has_connection(self) -> bool:
        """Return whether the last call of the partition reached its broker; False also before the
        first call.
        """
        return self.no_connection_since_ms is None and self.life.state in ANSWERED

    def _note_pull_failed(self, error: KeylaneError) -> None:
        """Show why nothing is pulled; after WARN_AFTER consecutive failures it is logged as a
        warning.
        """
        self.waiting_for = error.message
        self.note_unanswered(error)
        level = self._trouble_level
        if line := self._troubles.met(error.message, self._clock.boot_ms(), level):
            log.log(level, "%s: %s", self.log_name, line)

    def _note_recovered(self) -> None:
        """Note that a pull has succeeded after failures."""
        level = self._trouble_level
        self._pauses.reset()
        if failures := self._troubles.over(self._clock.boot_ms(), logging.INFO, logging.WARNING):
            log.log(level, "%s: pulls succeed again, after %s", self.log_name, failures)

    @property
    def _trouble_level(self) -> int:
        return logging.WARNING if self._pauses.failures >= WARN_AFTER else logging.INFO

    @property
    def log_name(self) -> str:
        """Return subject, partition and group, for log lines."""
        return partition_name(self._subject, self.partition_id, self.group)

    @property
    def fenced(self) -> bool:
        """Return True once the broker has seen a higher token."""
        return self.life.fenced

    @property
    def lapsed(self) -> bool:
        """Return True once the right to the partition is lost for good: fenced, or past the end of
        the lease.
        """
        return self.life.lapsed(self._clock.boot_ms())

    @property
    def left_ms(self) -> int:
        """Return the milliseconds until the lease ends."""
        return self.life.left_ms(self._clock.boot_ms())

    @property
    def renewed_ms(self) -> int:
        """Return the boot time at which the last heartbeat that renewed the lease was sent."""
        return self.life.lease_until_ms - self._settings.ttl_ms + self._settings.margin_ms

    @property
    def cursor(self) -> int:
        """Return the offset below which the broker has an ack of every message."""
        return self._offsets.cursor

    @property
    def acked_to_end(self) -> bool:
        """Return True when the partition is sealed, and its group has acked it to the end."""
        return self._offsets.drained

    @property
    def drained(self) -> bool:
        """Return True when the partition is acked to the end, and no parked message is with
        handlers.
        """
        return self._offsets.drained and not self.parking.busy

    @property
    def has_messages_out(self) -> bool:
        """Return True while a message is with a handler, or waits for one or for its next try."""
        return self._in_flight.count > 0

    @property
    def is_careful(self) -> bool:
        """Return True while messages that may have ended the process of an earlier owner are
        handled one at a time.
        """
        return not (self._careful is None or self._careful.is_over)

    @property
    def home(self) -> Home:
        """Return the process and event loop in which the consumer is open; there is one for each
        consumer.
        """
        return self._connections.home

    @property
    def has_parked(self) -> bool:
        """Return True if messages may be parked on the partition."""
        return self.parking.has_parked

    def knows_parked(self, version: int) -> bool:
        """Return True if `check_parked` would learn nothing."""
        return version <= self.parking.version

    @property
    def paused(self) -> bool:
        """Return True while the user has paused the partition."""
        return PAUSED in self.gate.reasons

    @property
    def position(self) -> Position:
        """Return how far the partition is pulled and acked."""
        offsets = self._offsets
        return self._progress.position(offsets.next_offset, offsets.cursor, self._clock.wall_ns())

    @property
    def next_offset(self) -> int:
        """Return the first offset that is not pulled."""
        return self._offsets.next_offset

    @property
    def missed(self) -> int:
        """Return the number of missed messages; see `FetchOffsets.missed`."""
        return self._offsets.missed

    @property
    def outstanding(self) -> int:
        """Return the number of messages handed out and not yet handled or forgotten."""
        return self._in_flight.count

    async def wait_handled(self) -> None:
        """Wait until every message handed out is handled or forgotten."""
        await self._in_flight.wait_until_empty()

    @property
    def sealed(self) -> bool:
        """Return True if the partition is sealed: its children wait until the group has acked all
        of it.
        """
        return self._offsets.end_offset is not None

    @property
    def holds_fence(self) -> bool:
        """Return True while the broker has the fence, and the lease has not ended."""
        return self._offsets.begun and not self.lapsed

    @property
    def is_idle(self) -> bool:
        """
        Return True while the broker is known to have acks of all pulled messages, and a pull waits.

        The broker holds the pull lock for the time of the pull. Parking acks a message, and the
        next ack request reports it.
        """
        offsets = self._offsets
        return (
            self._chain.is_under_way
            and not self.has_messages_out
            and offsets.cursor >= offsets.next_offset
        )

    def abandon(self) -> None:
        """End the rest of the client without notifying the broker, because its hand-over has
        failed. A second call changes nothing.
        """
        self._cancel_tasks()
        self._acks.end()
        self._budget_share.close()

    def _cancel_tasks(self) -> list[asyncio.Task[None]]:
        tasks = [self._pulling, self._acking, *self.parking.stop()]
        if self._carefully is not None:
            tasks.append(self._carefully)
        for task in tasks:
            task.cancel()
        return tasks

    async def check_parked(self, version: int) -> None:
        """Fetch the changes of an operator, if the broker's version is newer than the known one."""
        await self.parking.check(version)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    async def hand_over(self, *, flush_ms: int) -> None:
        """Send the last acks and release the pull lock, within `flush_ms`, once the client is
        stopped and its handlers have ended.
        """
        self._on(PullEvent.CLOSED)
        await asyncio.gather(*self._cancel_tasks(), return_exceptions=True)
        try:
            if self.fenced:
                return
            async with asyncio.timeout(flush_ms / 1000):
                await self.parking.flush()
                await self._acks.flush()
                await self._release()
        except (TimeoutError, KeylaneError) as error:
            # The next owner's higher token takes the partition anyway; messages without an ack are
            # redelivered.
            log.info(
                "%s: the hand-over met an error: %s",
                self.log_name,
                getattr(error, "message", "too slow"),
            )
        finally:
            self._acks.end()
            self._budget_share.close()

    async def _release(self) -> None:
        if self._offsets.begun:
            await self.broker.call(Release(*self._who))


def client_of(message: Message) -> PullClient:
    """Return the pull client that handed `message` out."""
    client: PullClient = message.delivery.client  # type: ignore[union-attr]
    return client

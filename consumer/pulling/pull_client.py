"""Consumes a partition under a grant: fence, pull, hand out, ack, release.

    ACQUIRE ─▶ PULL ⇄ hand out ─▶ handled ─▶ ack queue ─▶ ACK
    stop: finish handlers ─▶ flush acks ─▶ RELEASE

`lifetime.py` defines the states.

Invariants
    The fence is raised before the cursor is read; nothing is pulled without it. After
    `deadline_ns`, no handler starts and no request renews the pull lock. After the broker restarts,
    the fence is raised again under the same token; no message is pulled twice.
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
from ...rpc.loop_binding import LoopBinding
from ...rpc.race import start_task
from ..delivery.decode import decode_messages
from ..delivery.pulled_batch import CutBatch, PulledBatch
from ..delivery.user_acks import UserAcks
from ..log_names import partition_name
from ..parking.context import ParkContext
from ..parking.key_parking import KeyParking
from ..prefetch_budget import BudgetShare
from ..settings import ConsumerSettings
from ..unreached_brokers import NO_CONNECTION
from .ack_sender import AckSender
from .acks import ranges_of
from .careful import CarefulDelivery
from .fetch_offsets import FetchOffsets
from .lifetime import ANSWERED, Lifetime, PullEvent, PullState
from .messages_in_flight import MessagesInFlight
from .progress import Position, PullProgress
from .pull_chain import PullChain
from .pull_gate import PAUSED, PullGate
from .pull_owner import PullOwner

log = logging.getLogger("keylane.consumer")
WARN_AFTER = 8
"""The number of consecutive failures, equivalent to about 5 s of backoff, from which failed pulls
are logged as warnings.
"""
AT_ONCE_BYTES = 64 << 10
"""Answers of up to this many bytes are handed out at once. For larger ones, the event loop may run
other tasks between batches.
"""


class PullClient(UserAcks):
    """
    Pulls one partition for one consumer session.

    Args:
        grant: the partition, with the address of its broker, and the fencing token.
        connections: the consumer's connections to brokers.
        deadline_ms: the end of the lease on the boot clock.
        owner: receives the messages, and is notified when the partition changes.
    """

    reports_runs = True
    token_is_single_use = True
    """True if a token only ever has one pull client, so that no message is handled twice under
    it.
    """
    respects_range_limit = True
    """True if pulling stops while the broker cannot accept more ranges above the cursor, because
    only messages that are already pulled can fill the gaps.
    """
    exclusive = True
    """True if no other session can have this delivery's messages under the same token."""
    renewal_ms = math.inf
    exempts_retries = False
    """True if up to `buffer_messages` messages that wait for a retry do not count against the limit
    of messages in flight.
    """
    no_connection_since_ms: int | None = None
    """The boot time, in milliseconds, since which no call has reached the broker; None if the last
    one did.
    """

    def __init__(
        self,
        *,
        subject: str,
        group: str,
        session: str,
        cluster_id: str,
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
        self.cluster_id = cluster_id
        self.codec = owner.codec
        self.client = self
        """The client that hands messages out, as part of the `Delivery` interface."""
        self.lifetime = Lifetime(deadline_ms)
        self._update_deadlines()
        self.waiting_for = "the fence"
        """A text for users that says why nothing is pulled."""
        self._subject = subject
        self._lease = (self.partition_id, group, session, self.token)
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
            self._lease,
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
        self._broker_end = 0
        """One past the last offset that the broker has, as far as is known."""
        self._drained_reported = False
        self._progress = PullProgress()
        self.gate = PullGate()
        self._in_flight = MessagesInFlight(
            retrying_max=settings.buffer_messages if self.exempts_retries else 0
        )
        self._chain = PullChain(self, timeout_ms=settings.call_timeout_ms)
        self._budget_share: BudgetShare = self.owner.budget.new_share()
        self._pauses = settings.backoff.pauses(self._rng)
        self._failure_log = LogFilter()
        """Limits the log lines of failed pulls."""
        sender = self._new_sender()
        self.acks = self._acks = sender
        self._handled = sender.handled
        self._tries = sender.tries
        self.acks_each = sender.acks_each
        """True if the next message of a key waits for the previous one's ack."""
        self.report_failure = sender.record_failure
        """Reports a message's failed attempt to the broker."""
        self.report_hang = sender.record_hang
        self._careful: CarefulDelivery | None = None
        """Hands out messages one at a time while one of them may have killed an earlier owner's
        process.
        """
        self._careful_task: asyncio.Task[None] | None = None
        self._pull_task = start_task(self.run(self._pull), name=f"pull {self.partition_id}")
        self._ack_task = start_task(self.run(sender.run), name=f"ack {self.partition_id}")

    def _new_sender(self) -> AckSender:
        return AckSender(
            self, self._lease, in_flight=self._in_flight, settings=self._settings, rng=self._rng
        )

    # ── the lease ─────────────────────────────────────────────────────────────────────────────────
    def renew(self, deadline_ms: int, address: str | None) -> None:
        """
        Extend the lease to `deadline_ms`, and follow the broker to `address`, unless that is None.

        A lapsed lease is not renewed, because its messages may have been skipped. A renewal does
        not let handlers start during a hand-over.
        """
        if not self.lifetime.renew(deadline_ms, self._clock.boot_ms()):
            return
        if address is not None and address != self.broker.address:
            self.broker = self._connections.broker_at(address)
            # Otherwise a broker that still runs at the old address keeps the pull waiting.
            self._chain.interrupt()
        self._update_deadlines()

    def stop(self) -> None:
        """Stop pulling, and start no more handlers."""
        self._on(PullEvent.STOPPED)
        self._pull_task.cancel()
        if self._careful is not None and self._careful_task is not None:
            self._careful_task.cancel()
            self._careful.stop()

    def _update_deadlines(self) -> None:
        self.deadline_ns = self.lifetime.deadline_ns
        """A copy of `lifetime.deadline_ns`, which is read before every handler call."""
        self.deadline_s = deadline_seconds(self.deadline_ns)
        self.ack_deadline_ns = self.lifetime.ack_deadline_ns

    def _on(self, event: PullEvent) -> None:
        """Move to the next state, and update the deadlines that depend on it."""
        self.lifetime.handle_event(event)
        self._update_deadlines()

    # ── parked messages ───────────────────────────────────────────────────────────────────────────
    def hand_out(self, messages: list[Message]) -> None:
        """Count messages as in flight, and pass them to handlers or to the iterating program."""
        self._in_flight.count += len(messages)
        self.owner.hand_out(messages)

    def hand_out_counted(self, messages: list[Message]) -> None:
        """Pass messages that are already counted as in flight to handlers."""
        self.owner.hand_out(messages)

    def check_drained(self) -> None:
        """Report that the partition is drained, if only parked messages prevented that until
        now.
        """
        self._report_drained(was_drained=False)

    def has_handed_out(self, message: Message) -> bool:
        """Return True if this client handed out the message, even for an ancestor partition."""
        return message.delivery is self or client_of(message) is self

    def messages_to_renew(self) -> list[Message]:
        """Return the messages that the next ack request renews: none in an exclusive group."""
        return []

    def extend_in_flight(self, messages: list[Message], sent_ns: int) -> None:
        """Restart the time in flight of messages that a request sent at `sent_ns` has renewed."""

    # ── setting messages aside ───────────────────────────────────────────────────────────────
    def park_later_messages(self, messages: list[Message]) -> list[Message]:
        """Park messages in flight whose keys are parked, and return the others."""
        if not self.parking.keys:
            return messages
        remaining = self._park_later_messages(messages)
        self.discard_in_flight(len(messages) - len(remaining))
        return remaining

    def park_rows_of_parked_keys(self, batch: PulledBatch) -> None:
        """Park the batch's in-flight rows whose keys are parked, and remove them from it."""
        if self.parking.keys:
            # Failed attempts are not included: they are added when handlers decode the batch.
            messages = self._decode(batch.record, 0, batch.header, self)
            batch.keep(self.park_later_messages(batch.select_wanted(messages)))

    def _park_later_messages(self, messages: list[Message]) -> list[Message]:
        """Park messages whose keys are parked, ack those of them that the filter rejects, and
        return the other messages.
        """
        message_filter, keys = self.owner.message_filter, self.parking.keys
        if message_filter is not None:
            rejected = {
                message.offset
                for message in messages
                if message.key in keys and message_filter.rejects(message)
            }
            for offset in sorted(rejected):
                self._handled.mark_handled(offset)
            if rejected:
                self._acks.send_soon()
            messages = [message for message in messages if message.offset not in rejected]
        return self.parking.park_later_messages(messages)

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Park the key of a message that failed too often, together with the later messages of its
        key in `waiting`.
        """
        offsets = [message.offset, *(later.offset for later in waiting)]
        self._tries.remove([(message.offset, message.offset + 1)])
        self.parking.park(message.key, offsets, failure)
        self.discard_in_flight(len(offsets))

    def dead_letter(self, message: Message, failure: Failure) -> None:
        """Make a message a dead letter; later messages of its key continue."""
        self._tries.remove([(message.offset, message.offset + 1)])
        self.parking.park(None, [message.offset], failure)
        self.discard_in_flight(1)

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Set a message aside for a retry in `pause_ms`; later messages of its key continue."""
        self._tries.remove([(message.offset, message.offset + 1)])
        self.parking.retry(message.offset, failure, pause_ms)
        self.discard_in_flight(1)

    def blocks(self, message: Message, failure: Failure) -> None:
        """Report, with the next ack, why a message blocks others."""
        self._tries.record_blocking(message, failure)

    def report_redriven_failure(self, source: int, message: Message, failure: Failure) -> None:
        """Report that a redriven message, stored by partition `source`, has failed again."""
        self._tries.report_redriven_failure(source, message, failure)
        self._acks.send_soon()

    def report_redriven_hang(
        self, source: int, message: Message, failure: Failure, running_ms: int
    ) -> None:
        """Report that a redriven message is hanging."""
        if self._tries.report_redriven_hang(source, message, failure, running_ms):
            self._acks.send_soon()

    def clear_redriven(self, source: int, offset: int) -> None:
        """Record that a redriven message is handled, or no longer held by this consumer."""
        self._tries.clear_redriven(source, offset)

    # ── results of handlers
    # ─────────────────────────────────────────────────────────────────────────
    def mark_handled(self, offset: int) -> None:
        """Ack the message at `offset`, which is handled."""
        handled = self._handled
        if offset == handled.end:
            handled.end = offset + 1
        else:
            handled.mark_handled(offset)
        if not self._acks.is_due:
            self._acks.send_soon()
        in_flight = self._in_flight
        in_flight.count -= 1
        if in_flight.count <= in_flight.wake_at:
            in_flight.wake()

    def mark_all_handled(self, messages: list[Message]) -> None:
        """Ack messages, sorted by offset, that are handled."""
        start, end = messages[0].offset, messages[-1].offset + 1
        if end - start == len(messages):
            self.mark_range_handled(start, end)
            return
        for first, last in ranges_of(messages):
            if self._careful is not None:
                self._careful.mark_range_handled(first, last)
            self._handled.mark_range_handled(first, last)
        self._acks.send_soon()
        self._in_flight.remove(len(messages))

    def mark_range_handled(self, start: int, end: int) -> None:
        """Ack the messages `[start, end)`, which are handled."""
        if self._careful is not None:
            self._careful.mark_range_handled(start, end)
        self._handled.mark_range_handled(start, end)
        self._acks.send_soon()
        self._in_flight.remove(end - start)

    def on_fork(self) -> None:
        """Start no more handlers in this process, which is a forked child; the client itself is
        unchanged.
        """
        self.deadline_ns = 0
        self.deadline_s = 0.0

    def discard_in_flight(self, count: int) -> None:
        """Stop counting `count` messages in flight that will not be handled here."""
        self._in_flight.remove(count)

    def add_retrying(self, count: int) -> None:
        """Change the number of messages in flight that wait for a retry by `count`."""
        self._in_flight.add_retrying(count)

    def check_can_ack(self, offset: int) -> None:
        """
        Check that the user may ack the message at `offset`.

        Raises:
            LeaseLostError: the partition was handed over, or its lease has ended.
            UsageError: the consumer is open in another process or event loop.
        """
        loop_binding = self._connections.loop_binding
        if get_ident() != loop_binding.thread:
            loop_binding.check_thread()
        if self.boot_ns() >= self.ack_deadline_ns:
            raise LeaseLostError(partition_id=self.partition_id, offset=offset)

    # ── tasks ─────────────────────────────────────────────────────────────────────────────────────
    async def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run a task's body. An error in it ends this client or closes the consumer."""
        try:
            await body()
        except FencedError as error:
            log.info("%s: %s", self.log_name, error.message)
            self._on_fenced(error)
        except OffsetOutOfRangeError as error:
            # The broker stores less than was pulled from it. Only the owner of the next token may
            # start over.
            log.error("%s is handed over after an error: %s", self.log_name, error.message)
            self.owner.start_hand_over(self)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self.owner.fail(error)
            raise

    def _on_fenced(self, error: FencedError) -> None:
        is_first = self.lifetime.on_fence(error.current_token or 0)
        self._update_deadlines()
        if is_first:
            self.owner.start_hand_over(self)

    async def _pull(self) -> None:
        while self._clock.boot_ns() < self.deadline_ns:
            try:
                if self.lifetime.state is PullState.ACQUIRING:
                    await self._acquire()
                    self._on(PullEvent.ACQUIRED)
                if self._exhausted:
                    self.waiting_for = "acks to the end" if not self.drained else ""
                    self._acks.stop_lingering()
                    self._on(PullEvent.EXHAUSTED)
                    return
                await self._pull_once()
                if self._pauses.failures:
                    self._log_recovery()
            except FencedError:
                raise
            except OffsetOutOfRangeError as error:
                self._skip_removed(error)
            except KeylaneError as error:
                self._on(PullEvent.FAILED)
                self._log_pull_failure(error)
                await asyncio.sleep(self._pauses.next_pause_ms() / 1000)

    @property
    def _exhausted(self) -> bool:
        """True once all messages are pulled."""
        return self._offsets.exhausted

    def _acquire_request(self) -> Acquire | AcquireShared:
        return Acquire(*self._lease, self._settings.ttl_ms)

    async def _acquire(self) -> None:
        answer, _ = await self.broker.call(self._acquire_request())
        assert isinstance(answer, Acquired)
        self.no_connection_since_ms = None
        await self.parking.begin(answer)
        if not self._offsets.begun:
            self._offsets.begin(answer.cursor, answer.ranges)
            self._tries.load_earlier(answer.attempts)
            if CarefulDelivery.has_suspects(answer):
                self._begin_carefully(answer)
        self._broker_end = answer.next_offset
        if answer.sealed:
            self._set_end(answer.next_offset)

    def _begin_carefully(self, answer: Acquired) -> None:
        """Hand out messages one at a time, to find out whether one of them kills the process."""
        clock, settings = self._clock, self._settings
        self._careful = CarefulDelivery(self, self._acks, answer, settings=settings, clock=clock)
        body = self.run(self._careful.run)
        self._careful_task = start_task(body, name=f"careful {self.partition_id}")

    def _set_end(self, end_offset: int) -> None:
        """Record that the partition is sealed at `end_offset`."""
        drained = self.drained
        self._offsets.end_offset = end_offset
        self._report_drained(was_drained=drained)

    def apply_ack_reply(self, answer: Acked) -> None:
        """Apply the broker's reply to an ack request."""
        self.no_connection_since_ms = None
        if answer.parked_version:
            self.parking.record_version(
                answer.parked_version
            )  # must precede the check for a drained partition
        self._advance_cursor(answer.cursor)

    def _advance_cursor(self, cursor: int) -> None:
        """Move the cursor: the broker has acks for all messages below it."""
        offsets = self._offsets
        drained = offsets.end_offset is not None and self.drained
        offsets.cursor = cursor
        self._progress.record_acks(cursor)
        if offsets.end_offset is not None:
            self._report_drained(was_drained=drained)

    def _report_drained(self, *, was_drained: bool) -> None:
        """Report once that the partition is drained, unless it already was."""
        if self.drained and not was_drained and not self._drained_reported:
            self._drained_reported = True
            self.owner.report_drained()

    async def _wait_while_held(self) -> None:
        if self.gate.reasons:
            self.waiting_for = ", ".join(sorted(self.gate.reasons))
            await self.gate.wait_open()

    async def _wait_for_capacity(self, limit: int) -> None:
        """Wait until fewer than `limit` messages are in flight and the broker can accept more
        ranges.
        """
        if not self._in_flight.has_capacity(limit):
            self.waiting_for = "handlers"
            await self._in_flight.wait_for_capacity(limit)

    async def _pull_once(self) -> None:
        await self._wait_while_held()
        await self._wait_for_capacity(self._settings.buffer_messages)
        await self.parking.wait_for_capacity()
        if not self._reserves_budget():
            self.waiting_for = "other partitions"
            await self._budget_share.reserve(self._messages_ready, self._settings.pull_bytes)
        try:
            await self._pull_chain()
        finally:
            self._budget_share.end_pull()

    @property
    def _messages_ready(self) -> int:
        """The number of messages that the broker has, as far as is known, and that are not pulled
        yet.
        """
        return self._broker_end - self._offsets.next_offset

    def _reserves_budget(self) -> bool:
        """Reserve budget for the next pull. Return False if there is none."""
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
        self._record_answer(answer, payload)
        await self._wait_while_held()
        if answer.sealed:
            self._set_end(answer.next_offset)
        current_in_flight = 0
        for header in self._open_batches(answer, payload):
            current_in_flight += header.length
            # An owner that keeps batches does not decode them here, so no pause is needed.
            if current_in_flight >= AT_ONCE_BYTES and not self.owner.keeps_batches:
                current_in_flight = 0
                await asyncio.sleep(0)

    def _record_answer(self, answer: Batches, payload: memoryview) -> None:
        """Record the size of the answer to a pull."""
        self._progress.end_offset = self._broker_end = answer.next_offset
        self._budget_share.end_pull(len(payload), answer.upto - self._offsets.next_offset)

    def try_hand_out(self, answer: Answer, payload: memoryview) -> bool:
        """Hand out the messages of an answer. Return False and do nothing if the task must do it,
        because something must be awaited first or the answer is large.
        """
        if (
            type(answer) is not Batches
            or answer.sealed
            or len(payload) > AT_ONCE_BYTES
            or self.gate.reasons
            or answer.parked_version > self.parking.version
        ):
            return False
        self._record_answer(answer, payload)
        if answer.left_out:
            deque(self._open_batches(answer, payload), maxlen=0)
        else:
            for start, header in batch_starts(payload):
                self._open_batch(payload, start, header)
        if self._pauses.failures:
            self._log_recovery()
        return True

    def may_pull(self) -> bool:
        """Return True if the next pull can be sent without waiting."""
        parking, offsets = self.parking, self._offsets
        return (
            not self.gate.reasons
            and self._in_flight.has_capacity(self._settings.buffer_messages)
            and (not parking.has_parked or parking.has_capacity)
            and (offsets.end_offset is None or not self._exhausted)
            and self.boot_ns() < self.deadline_ns
            and (self._broker_end <= offsets.next_offset or self._reserves_budget())
        )

    def pull_request(self) -> Pull:
        """Return the next pull request."""
        settings, message_filter = self._settings, self.owner.message_filter
        return Pull(
            *self._lease,
            self._offsets.next_offset,
            settings.pull_bytes,
            min(settings.pull_wait_ms, settings.ttl_ms),
            () if message_filter is None else message_filter.tags,
            PULL_ANSWERS_MAX,
        )

    def _open_batches(self, answer: Batches, payload: memoryview) -> Iterator[Header]:
        """Hand out the batches of an answer one by one, and yield each header."""
        left_out = deque(answer.left_out)
        for start, header in batch_starts(payload):
            while left_out and left_out[0][0] < header.base_offset:
                self._ack_filtered(*left_out.popleft())
            self._open_batch(payload, start, header)
            yield header
        for low, high in left_out:
            self._ack_filtered(low, high)

    def _ack_filtered(self, start: int, end: int) -> None:
        """Ack the messages `[start, end)`, which the broker omitted because of the filter."""
        for low, high in self._offsets.mark_skipped(start, end):
            self._handled.mark_range_handled(low, high)
            self._acks.send_soon()
        if self._careful is not None:
            self._careful.put([])  # wake it: there may be no suspects left

    def _open_batch(self, payload: memoryview, start: int, header: Header) -> None:
        """Hand out a batch, except for messages that were already pulled or acked."""
        if header.base_offset + header.count <= self._offsets.next_offset:
            return
        self._progress.record_pull(header)
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
            self._tries.add_earlier_tries(messages)
            self._in_flight.count += len(messages)
            self._careful.put(messages)
            return
        cut = column_views(payload, header, start)  # raises if the batch cannot be unpacked
        opened = CutBatch(self, cut, header, self._offsets.unseen_ranges(header))
        self._in_flight.count += opened.count
        if opened.count:
            self._budget_share.add_buffered(header.length)
        self.owner.hand_out_batch(opened)

    def decode_cut_batch(self, batch: CutBatch) -> list[Message]:
        """Decode a batch that handlers are about to get. Messages of parked keys are parked
        instead.
        """
        self._budget_share.release_buffered(batch.header.length)
        source = (self._subject, self.partition_id, self.token)
        messages = decode_messages(batch.columns, batch.header, *source, self)
        if batch.count != batch.header.count:
            messages = batch.select_wanted(messages)
        batch.has_only_first_attempts = not self._tries.earlier_tries
        if not batch.has_only_first_attempts:
            self._tries.add_earlier_tries(messages)
        return self.park_later_messages(messages) if self.parking.keys else messages

    def _skip_removed(self, error: OffsetOutOfRangeError) -> None:
        """
        Skip messages that retention removed before they were pulled.

        Raises:
            OffsetOutOfRangeError: `error`, if nothing was removed, which means that the broker
                stores less than was pulled.
        """
        first_offset = error.first_offset or 0
        if self._offsets.next_offset >= first_offset:
            raise error
        missed = self._offsets.skip_removed(first_offset)
        if self._careful is not None:
            self._careful.put([])  # wake it: there may be no suspects left
        log.warning(
            "%s: %s removed before the group got them; it continues at offset %d",
            self.log_name,
            counted(missed, "message was", "messages were"),
            first_offset,
        )

    def decode(self, record: memoryview, header: Header) -> list[Message]:
        """Decode all messages of a batch."""
        messages = self._decode(record, 0, header, self)
        self._tries.add_earlier_tries(messages)
        return messages

    def _decode(
        self, payload: memoryview, start: int, header: Header, delivery: Delivery
    ) -> list[Message]:
        source = (self._subject, self.partition_id, self.token)
        return decode_messages(column_views(payload, header, start), header, *source, delivery)

    # ── state ─────────────────────────────────────────────────────────────────
    def record_call_error(self, error: KeylaneError) -> None:
        """Record whether a failed call reached the broker."""
        if not isinstance(error, NO_CONNECTION):
            self.no_connection_since_ms = None
        elif self.no_connection_since_ms is None:
            self.no_connection_since_ms = self._clock.boot_ms()

    @property
    def has_connection(self) -> bool:
        """True if the last call reached the broker; False before the first call."""
        return self.no_connection_since_ms is None and self.lifetime.state in ANSWERED

    def _log_pull_failure(self, error: KeylaneError) -> None:
        """Log why a pull failed, as a warning after WARN_AFTER consecutive failures."""
        self.waiting_for = error.message
        self.record_call_error(error)
        level = self._failure_log_level
        if text := self._failure_log.count_failure(error.message, self._clock.boot_ms(), level):
            log.log(level, "%s: %s", self.log_name, text)

    def _log_recovery(self) -> None:
        """Reset the backoff after a successful pull, and log the recovery."""
        level = self._failure_log_level
        self._pauses.reset()
        if failures := self._failure_log.end_failures(
            self._clock.boot_ms(), logging.INFO, logging.WARNING
        ):
            log.log(level, "%s: pulls succeed again, after %s", self.log_name, failures)

    @property
    def _failure_log_level(self) -> int:
        return logging.WARNING if self._pauses.failures >= WARN_AFTER else logging.INFO

    @property
    def log_name(self) -> str:
        """The subject, partition and group, for log lines."""
        return partition_name(self._subject, self.partition_id, self.group)

    @property
    def fenced(self) -> bool:
        """True once the broker has seen a higher token."""
        return self.lifetime.fenced

    @property
    def lease_until_ms(self) -> int:
        """The end of the lease, on the boot clock."""
        return self.lifetime.lease_until_ms

    @property
    def retries_carefully(self) -> bool:
        """True while messages that waited for a retry are handed out one at a time."""
        return self.parking.retries_carefully

    @property
    def fence(self) -> int:
        """The higher token that the broker has seen."""
        return self.lifetime.fence

    def update_grant(self, grant: Grant) -> None:
        """Use a newer grant of the same lease."""
        self.parking.update_grant(grant)

    @property
    def lapsed(self) -> bool:
        """True once the partition is fenced, or its lease has ended."""
        return self.lifetime.lapsed(self._clock.boot_ms())

    @property
    def left_ms(self) -> int:
        """The milliseconds until the lease ends."""
        return self.lifetime.left_ms(self._clock.boot_ms())

    @property
    def renewed_ms(self) -> int:
        """The boot time, in milliseconds, of the heartbeat that last renewed the lease."""
        return self.lifetime.lease_until_ms - self._settings.ttl_ms + self._settings.margin_ms

    @property
    def cursor(self) -> int:
        """The offset below which the broker has acks for all messages."""
        return self._offsets.cursor

    @property
    def acked_to_end(self) -> bool:
        """True once the partition is sealed and its group has acked it to the end."""
        return self._offsets.drained

    @property
    def drained(self) -> bool:
        """True once the partition is acked to the end and no parked message is in a handler."""
        return self._offsets.drained and not self.parking.busy

    @property
    def has_messages_in_flight(self) -> bool:
        """True while any message is in flight: in a handler, or waiting for a handler or a
        retry.
        """
        return self._in_flight.count > 0

    @property
    def is_careful(self) -> bool:
        """True while messages that may have killed an earlier owner's process are handled one at a
        time.
        """
        return not (self._careful is None or self._careful.is_over)

    @property
    def loop_binding(self) -> LoopBinding:
        """The process and event loop in which the consumer is open."""
        return self._connections.loop_binding

    @property
    def has_parked(self) -> bool:
        """True if the partition may have parked messages."""
        return self.parking.has_parked

    def is_parked_current(self, version: int) -> bool:
        """Return True if `check_parked` would have no effect."""
        return version <= self.parking.version

    @property
    def paused(self) -> bool:
        """True while the user has paused the partition."""
        return PAUSED in self.gate.reasons

    @property
    def position(self) -> Position:
        """How far the partition is pulled and acked."""
        offsets = self._offsets
        return self._progress.position(offsets.next_offset, offsets.cursor, self._clock.wall_ns())

    @property
    def next_offset(self) -> int:
        """The first offset that has not been pulled."""
        return self._offsets.next_offset

    @property
    def missed(self) -> int:
        """The number of messages that retention removed before they were pulled."""
        return self._offsets.missed

    @property
    def outstanding(self) -> int:
        """The number of messages in flight."""
        return self._in_flight.count

    async def wait_handled(self) -> None:
        """Wait until no message is in flight."""
        await self._in_flight.wait_until_empty()

    @property
    def sealed(self) -> bool:
        """True if the partition is sealed; its children wait until the group has drained it."""
        return self._offsets.end_offset is not None

    @property
    def holds_fence(self) -> bool:
        """True while the broker has the fence and the lease has not ended."""
        return self._offsets.begun and not self.lapsed

    @property
    def is_idle(self) -> bool:
        """
        True while the broker has acks for all pulled messages and a pull is waiting there.

        The waiting pull keeps the pull lock. A parked message counts as acked, and the next ack
        request confirms that.
        """
        offsets = self._offsets
        return (
            self._chain.is_in_flight
            and not self.has_messages_in_flight
            and offsets.cursor >= offsets.next_offset
        )

    def abandon(self) -> None:
        """Cancel everything without notifying the broker, after a failed hand-over. This call is
        idempotent.
        """
        self._cancel_tasks()
        self._acks.end()
        self._budget_share.close()

    def _cancel_tasks(self) -> list[asyncio.Task[None]]:
        tasks = [self._pull_task, self._ack_task, *self.parking.stop()]
        if self._careful_task is not None:
            tasks.append(self._careful_task)
        for task in tasks:
            task.cancel()
        return tasks

    async def check_parked(self, version: int) -> None:
        """Fetch an operator's changes to parked messages, if `version` is newer than the known
        version.
        """
        await self.parking.check(version)

    # ── hand-over
    # ───────────────────────────────────────────────────────────────────────────────────
    async def hand_over(self, *, flush_ms: int) -> None:
        """Send the last acks and release the pull lock, within `flush_ms` milliseconds. The client
        must be stopped, and its handlers must have ended.
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
            # The next owner takes over with a higher token anyway; unacked messages are
            # redelivered.
            log.info(
                "%s: error during the hand-over: %s",
                self.log_name,
                getattr(error, "message", "too slow"),
            )
        finally:
            self._acks.end()
            self._budget_share.close()

    async def _release(self) -> None:
        if self._offsets.begun:
            await self.broker.call(Release(*self._lease))


def client_of(message: Message) -> PullClient:
    """Return the pull client that handed out `message`."""
    client: PullClient = message.delivery.client  # type: ignore[union-attr]
    return client

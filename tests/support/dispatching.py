"""Workers with the session of a partition, whose broker answers everything at once, in real or in
virtual time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from keylane.consumer.dispatch.failures import FailureRecords
from keylane.consumer.dispatch.jobs import BatchJobs, MessageJobs
from keylane.consumer.dispatch.workers import WorkerPool
from keylane.consumer.session.events import (
    CancelHandlers,
    Event,
    FailureOutcome,
    FlightsPulled,
    KeysListed,
    LeaseGranted,
    MessageHangs,
    MessagesHandled,
    Note,
    OperatorChanged,
    Paused,
    Pulled,
    ReadWindow,
    ReleaseAllowed,
    Request,
    RunEnded,
    SendChanges,
    Stopped,
    TakeTurn,
    Tick,
    TurnTaken,
    WindowRead,
    WorkersFree,
)
from keylane.consumer.session.offsets import NEVER, HeldLease
from keylane.consumer.session.state import PartitionSession, Taking
from keylane.consumer.session.step import step
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import Clock, SystemClock, deadline_seconds
from keylane.protocol.frames import (
    Ack,
    Acked,
    Acquire,
    Acquired,
    AcquireShared,
    ListParked,
    ParkedChanged,
    Pull,
    PullShared,
    Release,
    Released,
)
from keylane.protocol.message import Delivery, Message
from keylane.protocol.offsets import AckedOffsets
from keylane.protocol.parked import Failure, Park, ParkedKeyRow, ParkState
from keylane.protocol.routing import ConsumeStrategy

TOKEN = 5
LEASE_MS = 600_000
GROUP = "billing"
KINDS = {bytes: "parked", type(None): "buried", int: "retried"}
"""What becomes of a message, by the kind of the key under which it is parked."""


class GivenBatch:
    """Messages that have arrived together, and are made when they are next."""

    def __init__(self, delivery: Delivery, keys: tuple[bytes, ...], start: int) -> None:
        self.start = start
        self.end = start + len(keys)
        self.size = 100 * len(keys)
        self.is_opened = False
        partition_id = delivery.leased_id
        self.messages = [
            Message("s", key, b"", start + index, partition_id, TOKEN, delivery=delivery)
            for index, key in enumerate(keys)
        ]

    def open(self) -> list[Message]:
        self.is_opened = True
        return self.messages


class SteppedShell:
    """
    The session of a partition with its timer, and in place of its broker one that has answered by
    the next iteration of the event loop.

    Args:
        pool: the workers.
        answers_acks: False: an ack has no answer until `answer_acks`.
        attempts: the failed tries under earlier owners, as (offset, tries).
        suspects_upto: the offset below which messages are suspects.
    """

    def __init__(
        self,
        pool: WorkerPool,
        settings: ConsumerSettings,
        *,
        partition_id: int = 1,
        clock: Clock | None = None,
        answers_acks: bool = True,
        attempts: tuple[tuple[int, int], ...] = (),
        suspects_upto: int = 0,
    ) -> None:
        self.partition_id = partition_id
        self.delivery = Delivery(
            "s",
            0,
            0,
            None,
            GROUP,
            leased_id=partition_id,
            shell=self,  # type: ignore[arg-type]
        )
        self.is_shared = settings.consume_strategy is ConsumeStrategy.SHARED
        self.begin_until_s = 0.0
        self.ended: list[int] = []
        """The offsets of messages in the order in which they were reported as handled."""
        self.acked = AckedOffsets()
        self.set_aside: list[tuple[str, int, list[int], Failure]] = []
        """How, the offset that failed, those behind it, and why."""
        self.hanging: list[tuple[int, str, int, int]] = []
        """(offset, what, failed tries, milliseconds), as told."""
        self.failed: dict[int, int] = {}
        """The failed tries that the broker has recorded, by offset."""
        self.named: list[str] = []
        """The kinds of failures that acks have named."""
        self.notes: list[Note] = []
        self._redriven: list[Message] = []
        """What an operator has redriven, and was not read yet."""
        self._version = 0
        self._pool = pool
        if self.is_shared:
            pool.on_idle = self._on_idle
        self._attempts = attempts
        self._suspects_upto = suspects_upto
        self._answers_acks = answers_acks
        self._unanswered: list[Ack] = []
        self._boot_ms = (clock or SystemClock()).boot_ms
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER
        self._quiet = asyncio.Event()
        self._end = 0
        self._arrived: list[GivenBatch] = []
        """What was not pulled yet."""
        self._is_pulling = False
        self._left_out: list[tuple[int, int]] = []
        """Offsets without a wanted tag."""
        self._given_to = 0
        """The offset after what a shared group's session was given last."""
        self._wanted = 0
        """How many messages a shared group's session has asked for."""
        lease = HeldLease(partition_id, GROUP, "session", TOKEN)
        self.state = PartitionSession(
            lease,
            settings,
            random.Random(1),
            taking=Taking(in_batches=pool.in_batches),
            has_callbacks=True,
        )
        self.feed(LeaseGranted(self._boot_ms() + LEASE_MS))

    # ── as a shell ────────────────────────────────────────────────────────────────────────────────
    def feed(self, event: Event) -> None:
        messages = self.ask(event)
        may_begin = self.state.tenure.may_hand_out(self._boot_ms())
        until_ns = self.state.tenure.until_ms * 1_000_000
        self.begin_until_s = deadline_seconds(until_ns) if may_begin else 0.0
        if messages:
            self._pool.hand_out(self, messages)

    def has_expired(self, message: Message) -> bool:
        until_ms = self.state.flights.begin_until_ms.get(message.offset, NEVER)
        return self._boot_ms() >= until_ms

    def _tell_free(self, arriving: int) -> None:
        free = self._pool.count_spare(self) - arriving
        if free != self.state.flights.pull_size.free:
            self.ask(WorkersFree(free))

    def _on_idle(self) -> None:
        self.wake()

    def wake(self) -> None:
        if not self.state.calls.pull.is_in_flight:
            self._tell_free(0)

    def ask(self, event: Event) -> list[Message]:
        if isinstance(event, MessagesHandled | MessagesHandled):
            self.ended += [message.offset for message in event.messages]
        elif isinstance(event, RunEnded):
            self.ended += [message.offset for message in self.state.lanes.run[: event.done]]
        elif isinstance(event, MessageHangs):
            why = event.failure
            told = (event.message.offset, why.text, why.attempts, event.running_ms)
            self.hanging.append(told)
        if self.is_shared and isinstance(event, FlightsPulled):
            self._tell_free(sum(end - start for start, end in event.ranges))
        elif self.is_shared and not isinstance(event, WorkersFree):
            self.wake()
        ready = step(self.state, event, self._boot_ms())
        for note in ready.notes:
            if isinstance(note, FailureOutcome):
                self._pool.failures.note_outcome(note)
            else:
                self.notes.append(note)
        for request in ready.requests:
            if isinstance(request, CancelHandlers):
                self._pool.cancel(self)
            else:
                asyncio.get_running_loop().call_soon(self._answer, request)
        self._set_timer(ready.wait_until_ms)
        if ready.has_more:
            self._pool.offer(self)
        if not self.state.tenure.is_live:
            self.begin_until_s = 0.0
            if self.state.lanes.is_idle:
                self._quiet.set()
        return ready.hand_out

    def _set_timer(self, until_ms: int) -> None:
        if until_ms == self._timer_ms:
            return
        self._timer_ms = until_ms
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if until_ms < NEVER:
            wait_s = max(0, until_ms - self._boot_ms()) / 1_000
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer_ms = NEVER
        self.feed(Tick())

    async def wait_quiet(self) -> None:
        await self._quiet.wait()

    # ── as the broker ─────────────────────────────────────────────────────────────────────────────
    def _answer(self, request: Request) -> None:
        if isinstance(request, Acquire | AcquireShared):
            upto = self._suspects_upto
            self.feed(Acquired(0, (), upto, False, self._attempts, suspects_upto=upto))
        elif isinstance(request, Ack):
            self._unanswered.append(request)
            if self._answers_acks:
                self.answer_acks()
        elif isinstance(request, Pull):
            self._is_pulling = True
            self._answer_pull()
        elif isinstance(request, PullShared):
            self._wanted = request.count_max
            self._answer_shared()
        elif isinstance(request, SendChanges):
            self._note_changes(request)
            self.feed(ParkedChanged(1))
        elif isinstance(request, ListParked):
            keys = dict.fromkeys(each.key for each in self._redriven)
            rows = [ParkedKeyRow(key, ParkState.REDRIVING, len(self._redriven)) for key in keys]
            self.feed(KeysListed(self._version, rows))
        elif isinstance(request, ReadWindow):
            messages = [each for each in self._redriven if each.key == request.key]
            self._redriven = [each for each in self._redriven if each.key != request.key]
            self.feed(WindowRead(request.number, messages))
        elif isinstance(request, Release):
            self.feed(Released())
        elif isinstance(request, TakeTurn):
            self.feed(TurnTaken())

    def _answer_pull(self) -> None:
        if self._is_pulling and self._arrived:
            self._is_pulling = False
            arrived, self._arrived = self._arrived, []
            left_out, self._left_out = tuple(self._left_out), []
            self.feed(Pulled(arrived, self._end, self._end, left_out=left_out))

    def _answer_shared(self) -> None:
        """Hand over as many messages as were asked for."""
        if not (self._wanted and self._arrived):
            return
        batch = self._arrived[0]
        start = max(batch.start, self._given_to)
        end = min(batch.end, start + self._wanted)
        self._given_to = end
        if end == batch.end:
            self._arrived.pop(0)
        self._wanted = 0
        given = FlightsPulled([batch], ((start, end),), self._boot_ms(), 0, self._end)
        self.feed(given)

    def answer_acks(self) -> None:
        """Answer the acks that wait for it."""
        answered, self._unanswered = self._unanswered, []
        for ack in answered:
            self.failed.update(ack.failed)
            if ack.failing is not None:
                self.named.append(ack.failing.kind)
            for start, end in ack.ranges:
                self.acked.add(start, end)
            self.feed(Acked(self.acked.cursor))

    def _note_changes(self, request: SendChanges) -> None:
        for change in request.changes:
            if isinstance(change, Park) and change.failure is not None:
                offsets = [each for start, end in change.ranges for each in range(start, end)]
                how = KINDS[type(change.key)]
                self.set_aside.append((how, offsets[0], offsets[1:], change.failure))

    # ── what a test does ──────────────────────────────────────────────────────────────────────────
    def give(self, *keys: bytes, start: int | None = None) -> list[Message]:
        """Have a message of each key arrive, and return them."""
        return self.give_batch(*keys, start=start).messages

    def give_batch(self, *keys: bytes, start: int | None = None) -> GivenBatch:
        """Have a message of each key arrive in a batch, which is opened later."""
        start = self._end if start is None else start
        if start > self._end:
            self._left_out.append((self._end, start))
        self._end = start + len(keys)
        batch = GivenBatch(self.delivery, keys, start)
        self._arrived.append(batch)
        if self.is_shared:
            self._answer_shared()
        else:
            self._answer_pull()
        return batch

    def lapse(self) -> None:
        """End the lease."""
        self.state.tenure.until_ms = self._boot_ms()
        self.begin_until_s = 0.0
        asyncio.get_running_loop().call_soon(self._tick)

    def redrive(self, key: bytes, *offsets: int, partition_id: int, is_loose: bool = False) -> None:
        """Have an operator redrive messages that a partition stores."""
        delivery = replace(self.delivery, is_loose=is_loose)
        self._redriven += [
            Message("s", key, b"", offset, partition_id, TOKEN, delivery=delivery)
            for offset in offsets
        ]
        self._version += 1
        self.feed(OperatorChanged(self._version))

    def pause(self) -> None:
        """Pause the partition."""
        self.feed(Paused(True))

    def resume(self) -> None:
        """Resume the partition."""
        self.feed(Paused(False))

    async def hand_over(self, *, grace_ms: int = 0) -> None:
        """Hand the partition over: its handlers end first."""
        self._pool.forget(self)
        self.feed(Stopped(grace_ms))
        await self._pool.quiesce(self)
        self.feed(ReleaseAllowed())

    @property
    def held(self) -> int:
        """The number of messages that have arrived and have not ended."""
        given_to = self._given_to if self.is_shared else 0
        waiting = sum(batch.end - max(batch.start, given_to) for batch in self._arrived)
        return self.state.intake.held + waiting


class WorkerStory:
    """
    The workers of one consumer and its first partition.

    Args:
        settings: of the consumer.
    """

    def __init__(
        self,
        handler: Callable[[Any], Any],
        *,
        batched: bool = True,
        clock: Clock | None = None,
        handover_ms: int = 0,
        handler_timeout_ms: int = 0,
        cancels: bool = True,
        concurrency: int = 4,
        answers_acks: bool = True,
        attempts: tuple[tuple[int, int], ...] = (),
        **settings: Any,
    ) -> None:
        settings = {"max_records": 8, "handler_backoff": Backoff(first_ms=1, max_ms=1)} | settings
        self.settings = ConsumerSettings(**settings)
        self.crashed: list[BaseException] = []
        self._clock = clock
        self.pool = WorkerPool(
            partial(BatchJobs if batched else MessageJobs, handler),
            runner="handler of batches" if batched else "handler",
            concurrency=concurrency,
            handover_ms=handover_ms,
            clock=clock or SystemClock(),
            on_crash=self.crashed.append,
            failures=FailureRecords(client="c", wall_ms=lambda: 0),
            handler_timeout_ms=handler_timeout_ms,
            cancels=cancels,
        )
        self.shell = SteppedShell(
            self.pool, self.settings, clock=clock, answers_acks=answers_acks, attempts=attempts
        )

    def other_partition(self, partition_id: int = 2, **given: Any) -> SteppedShell:
        """Another partition of the consumer."""
        return SteppedShell(
            self.pool, self.settings, partition_id=partition_id, clock=self._clock, **given
        )

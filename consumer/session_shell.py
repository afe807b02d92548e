"""Does what a partition session says: calls its broker, sets its timer, hands out its messages.

    event ─▶ step ─▶ Ready ─▶ requests: each a call, whose answer is the next event
                        ├─▶ messages: to the worker that asked, or to the dispatch
                        ╰─▶ a time: the one timer of the partition

It decides nothing: what is sent, when, and to whom is in `session/`. Pulls and acks are sent by
callbacks of answers and timers, without a task: a message reaches a worker one iteration of the
event loop after its bytes have arrived, and the next pull is in flight while its handler runs.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from threading import get_ident
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from ..protocol.batch import Columns, batch_starts, column_views, unpack_batch
from ..protocol.clock import ALIGNED_S_MIN, Clock, deadline_seconds, round_to_tick
from ..protocol.codecs.codec import Codec
from ..protocol.control import Grant
from ..protocol.errors import (
    CorruptBatchError,
    FencedError,
    KeylaneError,
    LeaseLostError,
    OffsetOutOfRangeError,
    UnreachableError,
)
from ..protocol.frames import (
    Ack,
    Acked,
    Acquired,
    Answer,
    Batches,
    Handed,
    ListParked,
    Pull,
    PullShared,
    Read,
)
from ..protocol.log_filter import LogFilter
from ..protocol.message import Delivery, Message
from ..protocol.offsets import AckedOffsets
from ..protocol.operations import SubjectHistory
from ..protocol.parked import encode_parked
from ..protocol.record import Header
from ..protocol.routing import ConsumeStrategy
from ..protocol.text import MAYBE_OLDER_COPY, counted, key_digest
from ..rpc.connections import NO_CONNECTION, Connections
from ..rpc.network import Calling, Channel
from ..rpc.operating.client_counts import ConsumerCounts
from ..rpc.race import start_task
from ..rpc.tracing import EndTrace, current_tracing
from .decode import decode_messages
from .dispatch.loop import LoopDispatch
from .dispatch.workers import WorkerPool
from .filter import MessageFilter
from .handed_out import in_handler_error
from .log_names import message_name, partition_name
from .parked_reads import ParkedReads
from .prefetch_budget import PrefetchBudget
from .progress import Position, PullProgress
from .session.events import (
    CallFailed,
    CancelHandlers,
    Event,
    FailureOutcome,
    FindBroker,
    FlightsPulled,
    LeaseGranted,
    LeaveAncestor,
    LeaveTurn,
    Note,
    NoteKind,
    Paused,
    Pulled,
    ReadWindow,
    ReleaseAllowed,
    Request,
    SendChanges,
    Stopped,
    TakeTurn,
    Tick,
    TurnTaken,
    WorkersFree,
)
from .session.offsets import NEVER, HeldLease
from .session.parking import CAREFUL_MS
from .session.state import LocalAcks, PartitionSession, Taking
from .session.step import step
from .session.windows import is_own
from .settings import AckMode, ConsumerSettings

log = logging.getLogger("keylane.consumer")
PAUSED = "resume"
"""The reason that applies while the user has paused the partition: pulling waits for `resume`."""
WARN_AFTER = 8
"""The number of consecutive failures, equivalent to about 5 s of backoff, from which failed pulls
are logged as warnings.
"""
CHAINS_MAX = 1_024
"""The maximum number of pulls that one channel carries beside the queue of its `BrokerClient`."""
_chains: WeakKeyDictionary[Channel, int] = WeakKeyDictionary()


class ShellOwner(Protocol):
    """Is notified when its partitions change, and shares between them what a consumer has once."""

    alone: SuspectLock
    """Runs messages that may kill the process one at a time."""
    budget: PrefetchBudget
    """The prefetch budget of its partitions."""
    counts: ConsumerCounts
    codec: Codec[Any] | None
    message_filter: MessageFilter | None
    """Selects the messages that it wants; None: all."""
    by_hand: bool
    """True if the program takes and acks messages itself; False with handlers."""

    @property
    def allows_redrives(self) -> bool:
        """True if parked messages can be redriven here."""
        ...

    def start_hand_over(self, client: Any) -> None:
        """Start handing over the partition of a shell."""
        ...

    async def history(self) -> SubjectHistory:
        """Return the subject's partitions, past and present."""
        ...

    def nudge(self) -> None:
        """Send the next heartbeat now, because a partition is drained; without a group, look where
        the brokers are, because a read has failed.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """Close the consumer because of a permanent error."""
        ...


class SuspectLock:
    """Serializes messages that may kill the process: if it dies, the message that held the lock is
    probably the cause.
    """

    def __init__(self) -> None:
        self._lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def acquire(self, limit_s: float) -> AsyncIterator[None]:
        """Wait for the lock, in FIFO order, and hold it inside the block, but for at most `limit_s`
        seconds, so that a hanging handler does not block other suspects forever.
        """
        loop = asyncio.get_running_loop()
        if self._lock is None or self._loop is not loop:
            self._lock = asyncio.Lock()
            self._loop = loop
        lock, is_released = self._lock, False
        await lock.acquire()

        def release() -> None:
            nonlocal is_released
            if not is_released:
                is_released = True
                lock.release()

        timer = loop.call_later(limit_s, release)
        try:
            yield
        finally:
            timer.cancel()
            release()


class SessionShell:
    """
    Drives the session of one partition under one grant.

    Args:
        connections: the consumer's connections to brokers.
        deadline_ms: the end of the lease on the boot clock.
        owner: is notified when the partition ends.
        dispatch: the workers.
        acked: for a broadcast consumer, its acks of the partition, which outlive this shell.
        is_superfluous: for a broadcast consumer, returns True for a row whose original message was
            handled; None: there are no such rows.
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
        owner: ShellOwner,
        dispatch: WorkerPool | LoopDispatch,
        acked: AckedOffsets | None = None,
        is_superfluous: Callable[[Message], bool] | None = None,
    ) -> None:
        partition, message_filter = grant.partition, owner.message_filter
        self.partition_id = int(partition.partition_id)
        self.owner = owner
        self.state = PartitionSession(
            HeldLease(self.partition_id, group, session, grant.token),
            settings,
            rng,
            epoch_ms=clock.wall_ms() - clock.boot_ms(),
            rejects=None if message_filter is None else message_filter.rejects,
            redrives_here=owner.allows_redrives,
            has_callbacks=True,
            has_ancestors=bool(partition.parents) and not settings.broadcast,
            broadcast=LocalAcks(AckedOffsets() if acked is None else acked, is_superfluous)
            if settings.broadcast
            else None,
            taking=Taking(dispatch.in_batches, owner.by_hand, dispatch.by_column),
        )
        self.delivery = Delivery(
            subject,
            int(partition.queue),
            partition.logic_start,
            owner.codec,
            group,
            cluster_id,
            self.partition_id,
            settings.consume_strategy is not ConsumeStrategy.SHARED,
            acked=self.state.offsets,
            shell=self,
        )
        self.begin_until_s = 0.0
        """The time of the boot clock from which no handler may begin; 0.0: none may begin now."""
        self.program = TakenByProgram()
        self.gate = PartitionGate(self)
        self.ended = asyncio.Event()
        self._clock = clock
        self._dispatch: WorkerPool | LoopDispatch | None = dispatch
        self._timer = SessionTimer(clock, partial(self.feed_in_callback, Tick()))
        self._quiet = asyncio.Event()
        self._is_forked = False
        self._reported = _Reported.NOTHING
        self.calls = PartitionCalls(self, connections, grant, clock)
        self.feed(LeaseGranted(deadline_ms))

    # ── the session ───────────────────────────────────────────────────────────────────────────────
    def feed(self, event: Event) -> None:
        """Give the session an event that no worker waits for."""
        if self.ended.is_set():
            return
        messages = self.ask(event)
        tenure = self.state.tenure
        may_begin = tenure.may_hand_out(self._clock.boot_ms()) or self._may_begin_acked
        if self._is_forked:
            may_begin = False
        self.begin_until_s = deadline_seconds(tenure.until_ms * 1_000_000) if may_begin else 0.0
        if messages and self._dispatch is not None:
            self._dispatch.hand_out(self, messages)

    def feed_in_callback(self, event: Event) -> None:
        """Give the session an event in a callback, which must not raise: an error closes the
        consumer.
        """
        try:
            self.feed(event)
        except Exception as error:  # noqa: BLE001 - a callback must not raise
            self.owner.fail(error)

    @property
    def _may_begin_acked(self) -> bool:
        """True if messages that were acked first may still begin: nobody else gets them."""
        tenure = self.state.tenure
        is_acked = self.state.settings.ack is AckMode.BEFORE
        return is_acked and tenure.fence is None and not self.state.has_ended

    def ask(self, event: Event) -> list[Message]:
        """Give the session a worker's event, and return what it hands out."""
        dispatch, state = self._dispatch, self.state
        if dispatch is None:
            return []
        if state.flights.is_shared:
            self._count_workers(event, dispatch)
        ready = step(state, event, self._clock.boot_ms())
        for note in ready.notes:
            self._note(note, dispatch)
        for request in ready.requests:
            self._do(request)
        if self._dispatch is None:  # cancelled handlers had its last messages
            return ready.hand_out
        if ready.wait_until_ms != self._timer.until_ms:
            self._timer.set(ready.wait_until_ms)
        if ready.has_more:
            dispatch.offer(self)
        if not state.tenure.is_live:
            self._on_stopping()
        elif self._reported is _Reported.NOTHING and state.is_drained:
            self._reported = _Reported.DRAINED
            self.owner.nudge()
        return ready.hand_out

    def _do(self, request: Request) -> None:
        if isinstance(request, CancelHandlers):
            if self._dispatch is not None:
                self._dispatch.cancel(self)
        elif isinstance(request, FindBroker):
            self.owner.nudge()
        else:
            self.calls.begin(request)

    def _count_workers(self, event: Event, dispatch: WorkerPool | LoopDispatch) -> None:
        """Tell a shared group's session how many workers are free, before it decides what to
        pull.
        """
        if isinstance(event, FlightsPulled):
            self._tell_free(dispatch, sum(end - start for start, end in event.ranges))
        elif not isinstance(event, WorkersFree) and not self.state.calls.pull.is_in_flight:
            self._tell_free(dispatch)

    def _tell_free(self, dispatch: WorkerPool | LoopDispatch, arriving: int = 0) -> None:
        free = dispatch.count_spare(self) - arriving
        if free != self.state.flights.pull_size.free:
            self.ask(WorkersFree(free))

    def wake(self) -> None:
        """A worker is idle: pull, unless that is known, or a pull is in flight."""
        if self._dispatch is not None and not self.state.calls.pull.is_in_flight:
            self._tell_free(self._dispatch)

    def has_expired(self, message: Message) -> bool:
        """Return True if another consumer of a shared group may soon have the message."""
        state = self.state
        if state.settings.ack is AckMode.BEFORE or not is_own(state, message):
            return False
        until_ms = state.flights.begin_until_ms.get(message.offset, NEVER)
        return self._clock.boot_ms() >= until_ms

    def _on_stopping(self) -> None:
        state = self.state
        if self._reported is not _Reported.ENDING:
            self._reported = _Reported.ENDING
            if not self._may_begin_acked:
                self.begin_until_s = 0.0
            self._timer.loop.call_soon(self.owner.start_hand_over, self)
        if state.lanes.is_idle and not state.acks.awaited:
            self._quiet.set()
        if state.has_ended:
            self.abandon()

    def _note(self, note: Note | FailureOutcome, dispatch: WorkerPool | LoopDispatch) -> None:
        if isinstance(note, FailureOutcome):
            self.owner.counts.failed_tries += 1
            dispatch.failures.note_outcome(note)
        elif note.kind is NoteKind.MISSED:
            missed = counted(note.count, "message was", "messages were")
            if self.state.flights.is_shared:  # it does not know which ones other consumers had
                missed = f"messages below offset {note.offset} were"
            log.warning(
                "%s: %s removed before %s got them; it continues at offset %d",
                self.log_name,
                missed,
                "the group" if self.delivery.group else "a broadcast consumer",
                note.offset,
            )
        elif note.message is not None:
            log.warning(
                "%s: the process of its consumer ended while it was handled, %s%s",
                message_name(note.message),
                counted(note.count, "time"),
                "; it is set aside" if note.is_set_aside else "",
            )
        elif note.kind is NoteKind.FENCED:
            log.info("%s: the broker has seen a higher token", self.log_name)
        elif note.kind is NoteKind.WANTED:
            log.info("%s is handed over: its broker has another owner waiting", self.log_name)
        elif note.kind is NoteKind.LOST:
            log.warning(
                "%s: the lease ended while %s acked; no handler gets these messages, as with any "
                "at-most-once loss",
                self.log_name,
                counted(note.count, "message was", "messages were"),
            )
        elif note.kind is NoteKind.PROTECTED:
            log.warning("%s, %s: %s", self.log_name, key_digest(note.key), note.kind)
        elif note.kind is not NoteKind.LAPSED:
            log.warning("%s: %s (offset %d)", self.log_name, note.kind, note.offset)

    # ── called by the consumer ────────────────────────────────────────────────────────────────────
    def renew(self, deadline_ms: int, address: str | None) -> None:
        """Extend the lease to `deadline_ms`, and follow the broker to `address`, unless that is
        None.
        """
        if self.lapsed:
            return
        if address is not None:
            self.calls.follow(address)
        self.feed(LeaseGranted(deadline_ms))

    def stop(self) -> None:
        """Pull nothing more, and start no more handlers."""
        self._reported = _Reported.ENDING
        if self._dispatch is not None:
            self._dispatch.forget(self)
        self.feed(Stopped(self.state.settings.handover_ms))

    async def wait_quiet(self) -> None:
        """Wait until no worker has a message of the partition, which is being handed over."""
        await self._quiet.wait()

    async def hand_over(self, *, flush_ms: int) -> None:
        """Send the last acks and release the pull lock, within `flush_ms` milliseconds. The client
        must be stopped, and its handlers must have ended.
        """
        self.feed(ReleaseAllowed())
        try:
            async with asyncio.timeout(flush_ms / 1000):
                await self.ended.wait()
        except TimeoutError:
            # The next owner takes over with a higher token anyway; unacked messages are
            # redelivered.
            log.info("%s: error during the hand-over: too slow", self.log_name)
        finally:
            self.abandon()

    def on_fork(self) -> None:
        """Start no more handlers in this process, which is a forked child."""
        self._is_forked = True
        self.begin_until_s = 0.0

    def abandon(self) -> None:
        """Stop at once, without notifying the broker, unless the partition has ended."""
        if self.ended.is_set():
            return
        self.ended.set()
        self._quiet.set()
        # The garbage collector does not look into messages: one that a program keeps refers to
        # this object, and must not keep the consumer.
        self._dispatch = None
        self._timer.set(NEVER)
        self.calls.close()

    # ── the program's acks ────────────────────────────────────────────────────────────────────────
    def ack(self, message: Message) -> Coroutine[Any, Any, None]:
        """Ack a message for the program. Raises InvalidRequestError if a handler has it."""
        if not self.owner.by_hand:
            raise in_handler_error(message)
        if isinstance(self._dispatch, LoopDispatch):
            return self._dispatch.ack(self, message)
        return self._refuse(message)

    def nack(self, message: Message, after_s: float) -> Coroutine[Any, Any, None]:
        """Give a message back for the program. Raises InvalidRequestError if a handler has it."""
        if not self.owner.by_hand:
            raise in_handler_error(message)
        if isinstance(self._dispatch, LoopDispatch):
            return self._dispatch.nack(self, message, after_s)
        return self._refuse(message)

    async def _refuse(self, message: Message) -> None:
        """Raise LeaseLostError: the partition has ended."""
        self.check_can_ack(message.offset)

    def check_can_ack(self, offset: int) -> None:
        """
        Check that the program may ack the message at `offset`.

        Raises:
            LeaseLostError: the partition was handed over, or its lease has ended.
            UsageError: the consumer is open in another process or event loop.
        """
        binding = self.calls.connections.loop_binding
        if get_ident() != binding.thread:
            binding.check_thread()
        if self.program.has_given_up or self.ended.is_set() or self.lapsed:
            raise LeaseLostError(partition_id=self.partition_id, offset=offset)

    def has_stored(self, messages: list[Message]) -> bool:
        """Return True if the broker has stored the outcome of handled messages."""
        acks = self.state.acks
        for message in messages:
            is_apart = message.delivery is not self.delivery
            if is_apart and self.state.parking:
                return False
            ref = message.partition_id, message.offset
            if not is_apart and (ref in acks.awaited or message.offset in acks.handled):
                return False
        return True

    # ── state, for the consumer ───────────────────────────────────────────────────────────────────
    @property
    def log_name(self) -> str:
        """The subject, partition and group, for log lines."""
        return partition_name(self.delivery.subject, self.partition_id, self.delivery.group)

    @property
    def waiting_for(self) -> str:
        """A text for users that says why nothing is pulled."""
        state = self.state
        if self.calls.failures.text:
            return self.calls.failures.text
        if not state.tenure.is_acquired:
            return "the fence"
        if self.gate.reasons:
            return ", ".join(sorted(self.gate.reasons))
        if state.offsets.is_exhausted:
            return "" if state.is_drained else "acks to the end"
        if self.calls.pulls.waits_for_budget:
            return "other partitions"
        return "messages" if state.calls.pull.is_in_flight else "handlers"

    @property
    def token_is_single_use(self) -> bool:
        """True if no other session may hold the same token: the group is not shared, and the
        consumer is none that broadcasts.
        """
        return self.delivery.exclusive and self.state.tenure.lease.token > 0

    @property
    def lapsed(self) -> bool:
        """True once the partition is fenced, or its lease has ended."""
        tenure = self.state.tenure
        return tenure.fence is not None or self._clock.boot_ms() >= tenure.until_ms

    @property
    def left_ms(self) -> int:
        """The milliseconds until the lease ends."""
        return max(0, self.state.tenure.until_ms - self._clock.boot_ms())

    @property
    def renewed_ms(self) -> int:
        """The boot time, in milliseconds, of the heartbeat that last renewed the lease."""
        settings = self.state.settings
        return self.state.tenure.granted_until_ms - settings.ttl_ms + settings.margin_ms

    @property
    def lag_messages(self) -> int:
        """The number of messages from the cursor on, as of the last answer of the broker."""
        return max(0, self.calls.pulls.progress.end_offset - self.state.offsets.cursor)

    @property
    def position(self) -> Position:
        """How far the partition is pulled and acked."""
        offsets, progress = self.state.offsets, self.calls.pulls.progress
        progress.record_acks(offsets.cursor)
        return progress.position(offsets.next_offset, offsets.cursor, self._clock.wall_ns())


class PartitionGate:
    """The reasons for which nothing of a partition is pulled or handed out, as texts for users."""

    def __init__(self, shell: SessionShell) -> None:
        self.reasons: set[str] = set()
        self._shell = shell

    def pass_on(self, shell: SessionShell) -> None:
        """Hold back the shell that takes the place of this one, for the same reasons."""
        self._shell = shell
        shell.gate = self
        if self.reasons:
            shell.feed(Paused(True))

    def add(self, reason: str) -> None:
        """Pause the partition until `remove` is called with the same reason."""
        self.reasons.add(reason)
        self._shell.feed(Paused(True))

    def remove(self, reason: str) -> None:
        """Remove a reason, and resume the partition if it was the last one."""
        self.reasons.discard(reason)
        if not self.reasons:
            self._shell.feed(Paused(False))

    @property
    def is_paused(self) -> bool:
        """True while the user has paused the partition."""
        return PAUSED in self.reasons


class SessionTimer:
    """The one timer of a session. It is set in milliseconds of the boot clock."""

    def __init__(self, clock: Clock, on_due: Callable[[], None]) -> None:
        self.until_ms = NEVER
        """When it is due."""
        self._clock = clock
        self._on_due = on_due
        self.loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def set(self, until_ms: int) -> None:
        """Set the time at which it is due; NEVER stops it."""
        self.until_ms = until_ms
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if until_ms >= NEVER:
            return
        # To the nanosecond, so that acks of all partitions leave in one turn of the event loop.
        wait_s = max(0, until_ms * 1_000_000 - self._clock.boot_ns()) / 1e9
        now_s = self.loop.time()
        # Renewals of all partitions on a machine share a wake-up of the processor.
        at_s = round_to_tick(wait_s, now_s) if wait_s >= ALIGNED_S_MIN else now_s + wait_s
        self._handle = self.loop.call_at(at_s, self._fire)

    def _fire(self) -> None:
        self._handle = None
        self.until_ms = NEVER
        self._on_due()


class TakenByProgram:
    """What a program that acks messages itself may still say about those of one partition."""

    def __init__(self) -> None:
        self.given_back: dict[tuple[int, int], None] = {}
        """What it has given back and has not got again, the oldest first."""
        self.has_given_up = False
        """True once it can ack nothing any more."""


class _Reported(enum.Enum):
    """What the owner of a partition knows of its end."""

    NOTHING = enum.auto()
    DRAINED = enum.auto()
    ENDING = enum.auto()


class PartitionCalls:
    """
    Makes the calls that one session asks for, and gives it their answers as events.

    Args:
        shell: the shell of the partition.
        grant: says where the partition's broker is.
    """

    def __init__(
        self, shell: SessionShell, connections: Connections, grant: Grant, clock: Clock
    ) -> None:
        assert grant.partition.address is not None
        self.connections = connections
        self.broker = connections.broker_at(grant.partition.address)
        """The partition's broker; a renewal of the lease may name another one."""
        self.broker_group = str(grant.partition.broker_group)
        self.failures = CallFailures(shell.log_name, clock)
        self.reads = ParkedReads(
            self, shell.state.tenure, shell.delivery, grant, history=shell.owner.history
        )
        self.pulls = PartitionPulls(shell, self, clock)
        self._shell = shell
        self._tracing = current_tracing()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn_left = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    def begin(self, request: Request) -> None:
        """Begin what a session asks for."""
        if isinstance(request, Pull):
            self.pulls.begin(request)
        elif isinstance(request, Ack):
            end_trace = None
            if self._tracing is not None and request.ranges:
                end_trace = self._tracing.begin_ack(self._shell.delivery, request.ranges)
            channel = self.broker.live_channel
            if channel is None:
                self.start(self.call(request, end_trace))
            else:
                channel.begin(
                    request,
                    timeout_ms=self._shell.state.settings.call_timeout_ms,
                    on_answer=partial(self._on_answer, request, end_trace),
                )
        elif isinstance(request, LeaveTurn):
            self._turn_left.set()
        elif isinstance(request, TakeTurn):
            self.start(self._hold_turn())
        else:
            self.start(self.call(request))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the partition ends; an error in it closes the consumer."""
        task = start_task(work, name=f"session of {self._shell.partition_id}")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._shell.owner.fail(error)

    async def _hold_turn(self) -> None:
        self._turn_left.clear()
        async with self._shell.owner.alone.acquire(CAREFUL_MS / 1000):
            self._shell.feed(TurnTaken())
            await self._turn_left.wait()

    async def call(self, request: Request, end_trace: EndTrace | None = None) -> None:
        """Send a request, and give the session its answer."""
        event: Event
        try:
            event = await self._ask_broker(request)
            self.failures.no_connection_since_ms = None
        except KeylaneError as error:
            event = self.note_failure(request, error)
        _end_trace(end_trace, event)
        self._shell.feed(event)
        self._wake_waiters()

    async def _ask_broker(self, request: Any) -> Event:
        if isinstance(request, SendChanges):
            answer, _ = await self.broker.call(request.frame, encode_parked(list(request.changes)))
        elif isinstance(request, ListParked):
            return await self.reads.list_keys()
        elif isinstance(request, ReadWindow):
            return await self.reads.read_window(request)
        elif isinstance(request, LeaveAncestor):
            return await self.reads.leave_ancestor(request.source)
        elif isinstance(request, Pull | PullShared | Read):
            return await self.pulls.send_and_wait(request)
        else:
            answer, _ = await self.broker.call(request)
            if isinstance(answer, Acquired):
                self.pulls.progress.record_end(answer.next_offset)
                answer = await self.reads.adopt(answer)
        event: Any = answer  # Acquired, Acked, ParkedChanged and Released are events as they are
        checked: Event = event
        return checked

    def _on_answer(self, request: Ack, end_trace: EndTrace | None, call: Calling) -> None:
        shell = self._shell
        event: Event
        try:
            answer, _ = call.result()
            assert isinstance(answer, Acked)
            event = answer
            self.failures.no_connection_since_ms = None
        except KeylaneError as error:
            event = self.note_failure(request, error)
        except Exception as error:  # noqa: BLE001 - a callback must not raise
            shell.owner.fail(error)
            return
        _end_trace(end_trace, event)
        shell.feed_in_callback(event)
        if self._waiters:
            self._wake_waiters()

    def note_failure(self, request: Any, error: KeylaneError) -> CallFailed:
        """Log why a call failed, unless the session does, and return the session's event."""
        self.failures.note_connection(error)
        if isinstance(error, FencedError):
            log.info("%s: %s", self._shell.log_name, error.message)
        elif isinstance(error, OffsetOutOfRangeError):
            self._log_out_of_range(error)
        elif not isinstance(request, Ack | SendChanges):
            self.failures.log_failure(error.message)
        return CallFailed(request, error)

    def _log_out_of_range(self, error: OffsetOutOfRangeError) -> None:
        """Log that the broker stores less than was pulled; of removed messages, the session
        notes how many.
        """
        state = self._shell.state
        if state.flights.is_shared or state.offsets.next_offset < (error.first_offset or 0):
            return
        if self._shell.delivery.group:
            log.error("%s is handed over after an error: %s", self._shell.log_name, error.message)
            return
        # Unlike with a lease, a new token cannot help; only the broker's data folder can.
        text = f"the broker stores less than was read from it, and {MAYBE_OLDER_COPY}"
        self.failures.log_failure(f"{text}: {error.message}")

    def follow(self, address: str) -> None:
        """Call the broker at `address` from now on."""
        if address != self.broker.address:
            self.broker = self.connections.broker_at(address)
            # Otherwise a broker that still runs at the old address keeps the pull waiting.
            self.pulls.interrupt(UnreachableError(f"the partition has moved to {address}"))

    async def wait_for_answer(self, timeout_s: float | None = None) -> None:
        """Wait until the broker answers, or the partition ends, for at most so many seconds."""
        if not self._shell.ended.is_set():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            limit_s = None if timeout_s is None else max(0.0, timeout_s)
            await asyncio.wait((waiter,), timeout=limit_s)

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Cancel all calls, because the partition has ended."""
        self._turn_left.set()
        self._wake_waiters()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self.pulls.close()  # after those that wait for room, which would get it

    async def wait_closed(self) -> None:
        """Wait until the cancelled calls have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)


def _end_trace(end_trace: EndTrace | None, event: Event) -> None:
    if end_trace is not None:
        end_trace(event.error if isinstance(event, CallFailed) else None)


class CallFailures:
    """
    The failed calls of one partition: their log lines, and a text for users.

    Args:
        name: the name of the partition, for log lines.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.text = ""
        """Why pulls fail; "" if they do not."""
        self.no_connection_since_ms: int | None = None
        """The boot time since which no call has reached the broker; None if the last one did."""
        self._name = name
        self._boot_ms = clock.boot_ms
        self._count = 0
        """The number of consecutive pulls that failed."""
        self._filter = LogFilter()

    def note_connection(self, error: KeylaneError) -> None:
        """Record whether a call that failed has reached the broker."""
        if not isinstance(error, NO_CONNECTION):
            self.no_connection_since_ms = None
        elif self.no_connection_since_ms is None:
            self.no_connection_since_ms = self._boot_ms()

    def log_failure(self, text: str) -> None:
        """Log why a call failed, as a warning after WARN_AFTER consecutive failures."""
        self.text = text
        self._count += 1
        level = logging.WARNING if self._count >= WARN_AFTER else logging.INFO
        if line := self._filter.count_failure(text, self._boot_ms(), level):
            log.log(level, "%s: %s", self._name, line)

    def log_recovery(self) -> None:
        """Log that a pull has succeeded, if earlier ones failed."""
        if not self._count:
            return
        level = logging.WARNING if self._count >= WARN_AFTER else logging.INFO
        self._count = 0
        self.text = ""
        if failures := self._filter.end_failures(self._boot_ms(), logging.INFO, logging.WARNING):
            log.log(level, "%s: pulls succeed again, after %s", self._name, failures)


class PartitionPulls:
    """
    The pulls of one partition. One is in flight at a time, within the prefetch budget; one that
    waits at its broker stays on its channel, and is answered several times.
    """

    def __init__(self, shell: SessionShell, calls: PartitionCalls, clock: Clock) -> None:
        self.budget_share = shell.owner.budget.new_share()
        self._counts = shell.owner.counts
        self.waits_for_budget = False
        self.progress = PullProgress()
        self._shell = shell
        self._calls = calls
        self._boot_ms = clock.boot_ms
        self._call: Calling | None = None
        self._request: Pull | None = None
        self._channel: Channel | None = None

    def begin(self, request: Pull) -> None:
        """Pull, once the budget has room."""
        state = self._shell.state
        ready = self.progress.end_offset - state.offsets.next_offset
        if not self.budget_share.try_reserve(ready, state.settings.pull_bytes):
            self._calls.start(self._pull_when_reserved(request, ready))
            return
        channel = self._calls.broker.live_channel
        if channel is None:
            self._calls.start(self._pull_first(request))
        elif channel is not self._channel and _chains.get(channel, 0) >= CHAINS_MAX:
            self._calls.start(self._calls.call(replace(request, answers_max=1)))
        else:
            self._send(channel, request)

    async def _pull_when_reserved(self, request: Pull, ready: int) -> None:
        self.waits_for_budget = True
        try:
            await self.budget_share.reserve(ready, self._shell.state.settings.pull_bytes)
        finally:
            self.waits_for_budget = False
        if not self._shell.ended.is_set():
            await self._pull_first(request)

    async def _pull_first(self, request: Pull) -> None:
        """Open a channel, and pull."""
        try:
            channel = await self._calls.broker.channel()
        except KeylaneError as error:
            self._end()
            self._shell.feed(self._calls.note_failure(request, error))
            return
        if not self._shell.ended.is_set():
            self._send(channel, request)

    def _send(self, channel: Channel, request: Pull) -> None:
        if channel is not self._channel:
            self._leave_channel()
            self._channel = channel
            _chains[channel] = _chains.get(channel, 0) + 1
        self._request = request
        self._call = channel.begin(
            request,
            timeout_ms=self._shell.state.settings.call_timeout_ms + request.wait_ms,
            on_answer=partial(self._on_answer, request),
            on_part=self._on_part,
        )

    async def send_and_wait(self, request: Pull | PullShared | Read) -> Event:
        """Pull or read by the queue of the `BrokerClient`. Raises KeylaneError."""
        sent_ms = self._boot_ms()
        answer, payload = await self._calls.broker.call(request, wait_ms=request.wait_ms)
        self._calls.failures.log_recovery()
        if isinstance(answer, Handed):
            return self._handed(answer, payload, sent_ms)
        return self._pulled(answer, payload, has_more=False)

    def _on_part(self, answer: Answer, payload: memoryview) -> None:
        """Store an answer that is followed by another."""
        if not self._shell.ended.is_set():
            try:
                self._shell.feed(self._pulled(answer, payload, has_more=True))
            except Exception as error:  # noqa: BLE001 - a callback must not raise
                self._shell.owner.fail(error)

    def _on_answer(self, request: Pull, call: Calling) -> None:
        if call is not self._call and self._call is not None:
            return  # it was given up
        self._call = None
        event: Event
        try:
            answer, payload = call.result()
            event = self._pulled(answer, payload, has_more=False)
            self._calls.failures.log_recovery()
        except KeylaneError as error:
            self._end()
            event = self._calls.note_failure(request, error)
        except Exception as error:  # noqa: BLE001 - a callback must not raise
            self._shell.owner.fail(error)
            return
        self._shell.feed_in_callback(event)

    def _pulled(self, answer: Answer, payload: memoryview, *, has_more: bool) -> Pulled:
        assert isinstance(answer, Batches)
        batches = []
        for start, header in batch_starts(payload):
            batches.append(self._record_at(payload, start, header))
            self.progress.record_pull(header)
            self._counts.add_batch(header.count, header.length)
            self.budget_share.add_buffered(header.length)
        self._calls.failures.no_connection_since_ms = None
        self.progress.record_end(answer.next_offset)
        next_offset = self._shell.state.offsets.next_offset
        self.budget_share.end_pull(len(payload), max(0, answer.upto - next_offset))
        is_sealed = answer.sealed and answer.upto >= answer.next_offset
        return Pulled(
            batches,
            answer.upto,
            answer.next_offset,
            is_sealed,
            answer.parked_version,
            answer.left_out,
            has_more,
        )

    def _handed(self, answer: Handed, payload: memoryview, sent_ms: int) -> FlightsPulled:
        """Return the messages of a shared group that are in flight since `sent_ms`."""
        batches = []
        for start, header in batch_starts(payload):
            batches.append(self._record_at(payload, start, header))
            self.progress.record_pull(header)
            self._counts.add_batch(header.count, header.length)
        self._calls.failures.no_connection_since_ms = None
        self.progress.end_offset = answer.next_offset
        return FlightsPulled(
            batches,
            answer.ranges,
            sent_ms,
            answer.cursor,
            answer.next_offset,
            answer.sealed,
            answer.crashes,
            answer.tries,
        )

    def _record_at(self, payload: memoryview, start: int, header: Header) -> PulledRecord:
        """Cut a batch from an answer. Raises CorruptBatchError if it cannot be unpacked, unless the
        program takes messages itself: then it gets the error when it comes to the batch.
        """
        record, columns = payload[start : start + header.length], None
        if self._shell.state.lanes.columns is None:
            try:
                columns = column_views(payload, header, start)
            except CorruptBatchError:
                if not self._shell.owner.by_hand:
                    raise
        return PulledRecord(self._shell, record, header, columns)

    def _end(self) -> None:
        self.budget_share.end_pull()
        if self._channel is not None and self._channel.closed:
            self._leave_channel()

    def _leave_channel(self) -> None:
        if self._channel is not None:
            _chains[self._channel] -= 1
            self._channel = None

    def interrupt(self, error: UnreachableError) -> None:
        """Cancel the pull in flight, if there is one, as if it had failed with `error`."""
        call, request = self._call, self._request
        if call is not None and request is not None and not call.done():
            self._call = None
            call.cancel()
            self._end()
            self._shell.feed(CallFailed(request, error))

    def close(self) -> None:
        """Cancel the pull in flight, and return the budget."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        self._leave_channel()
        self.budget_share.close()


class PulledRecord:
    """
    A batch as it was pulled; its messages are made when it is opened.

    Args:
        record: the batch as its broker stores it.
        columns: what it has, if that is known to be sound.
    """

    __slots__ = ("_columns", "_is_buffered", "_record", "_shell", "end", "header", "size", "start")

    def __init__(
        self,
        shell: SessionShell,
        record: memoryview,
        header: Header,
        columns: Columns[memoryview] | None,
    ) -> None:
        self._shell = shell
        self._record = record
        self._columns = columns
        self._is_buffered = True
        self.header = header
        self.size = header.length
        self.start = header.base_offset
        self.end = header.next_offset

    def open(self) -> list[Message]:
        """Make and return all messages. Raises CorruptBatchError."""
        header = self.header
        columns = self._columns or column_views(self._record, header)
        self._release()
        token = self._shell.state.tenure.lease.token
        return decode_messages(columns, header, header.partition_id, token, self._shell.delivery)

    def unpack(self) -> memoryview:
        """Return the batch without compression. Raises CorruptBatchError."""
        unpacked = memoryview(unpack_batch(self._record, self.header))
        self._release()
        return unpacked

    def _release(self) -> None:
        if self._is_buffered:
            self._is_buffered = False
            self._shell.calls.pulls.budget_share.release_buffered(self.size)

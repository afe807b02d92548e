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
import logging
import random
from collections.abc import Callable, Coroutine
from functools import partial
from threading import get_ident
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from ..protocol.batch import Columns, batch_starts, column_views, unpack_batch
from ..protocol.clock import ALIGNED_S_MIN, Clock, deadline_seconds, round_to_tick
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
from ..protocol.message import Message
from ..protocol.offsets import AckedOffsets
from ..protocol.parked import Failure, encode_parked
from ..protocol.record import Header
from ..protocol.routing import ConsumeStrategy
from ..protocol.text import MAYBE_OLDER_COPY, counted, key_digest
from ..rpc.connections import Connections
from ..rpc.loop_binding import LoopBinding
from ..rpc.network import Calling, Channel
from ..rpc.race import start_task
from .delivery.copied import copied_delivery
from .delivery.decode import decode_messages
from .delivery.handed_out import check_not_in_handler
from .dispatch.failures import FailedAttempts
from .log_names import message_name, partition_name
from .parked_reads import ParkedReads
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
    MessageHangs,
    Note,
    NoteKind,
    Paused,
    Pulled,
    ReadWindow,
    ReleaseAllowed,
    Request,
    SendChanges,
    SettingsStored,
    Stopped,
    TakeTurn,
    Tick,
    TurnTaken,
    WorkersFree,
)
from .session.offsets import NEVER
from .session.state import CAREFUL_MS, Broadcast, PartitionSession, Taking
from .session.step import step
from .session.windows import is_own
from .settings import AckMode, ConsumerSettings
from .shell_owner import ShellOwner
from .unreached_brokers import NO_CONNECTION

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


class SessionDispatch(Protocol):
    """The workers of a consumer, to the shells of its partitions."""

    failures: FailedAttempts
    """Logs what becomes of failed messages."""

    @property
    def in_batches(self) -> bool:
        """True if sessions are to hand out batches."""
        ...

    @property
    def by_column(self) -> bool:
        """True if the program takes rows as columns."""
        ...

    def hand_out(self, shell: Any, messages: list[Message]) -> None:
        """Accept messages that no worker has asked for."""
        ...

    def offer(self, shell: Any) -> None:
        """Note that a worker that asks this partition may get something."""
        ...

    def cancel(self, shell: Any) -> None:
        """Cancel the handlers that have messages of this partition."""
        ...

    def forget(self, shell: Any) -> None:
        """Note that this partition is being handed over."""
        ...

    def count_spare(self, shell: Any) -> int:
        """Return for how many messages a worker is free; if negative, how many messages wait for
        one.
        """
        ...


class _EndedDispatch:
    """In place of the workers, once a partition has ended: the garbage collector does not look into
    messages, which refer to their partition.
    """

    def hand_out(self, shell: Any, messages: list[Message]) -> None:
        """Drop messages of a partition that has ended."""

    def offer(self, shell: Any) -> None:
        """Nothing is offered any more."""

    def cancel(self, shell: Any) -> None:
        """No handler has a message."""

    def forget(self, shell: Any) -> None:
        """The partition is handed over already."""

    async def ack(self, shell: SessionShell, message: Message) -> None:
        """Raise LeaseLostError."""
        shell.check_can_ack(message.offset)

    async def nack(self, shell: SessionShell, message: Message, _after_s: float) -> None:
        """Raise LeaseLostError."""
        shell.check_can_ack(message.offset)


_ENDED = _EndedDispatch()


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
        shell, header = self._shell, self.header
        columns = self._columns or column_views(self._record, header)
        self._release()
        subject, token = shell.subject, shell.token
        delivery: Any = shell
        return decode_messages(columns, header, subject, header.partition_id, token, delivery)

    def unpack(self) -> memoryview:
        """Return the batch without compression. Raises CorruptBatchError."""
        unpacked = memoryview(unpack_batch(self._record, self.header))
        self._release()
        return unpacked

    def _release(self) -> None:
        if self._is_buffered:
            self._is_buffered = False
            self._shell.budget_share.release_buffered(self.size)


class PartitionGate:
    """The reasons for which nothing of a partition is pulled or handed out, as texts for users."""

    def __init__(self, shell: SessionShell) -> None:
        self.reasons: set[str] = set()
        self._shell = shell

    def add(self, reason: str) -> None:
        """Pause the partition until `remove` is called with the same reason."""
        self.reasons.add(reason)
        self._shell.feed(Paused(True))

    def remove(self, reason: str) -> None:
        """Remove a reason, and resume the partition if it was the last one."""
        self.reasons.discard(reason)
        if not self.reasons:
            self._shell.feed(Paused(False))


class SessionShell:
    """
    Drives the session of one partition under one grant.

    It is also the `Delivery` of the messages that it hands out.

    Args:
        connections: the consumer's connections to brokers.
        deadline_ms: the end of the lease on the boot clock.
        owner: is notified when the partition ends.
        dispatch: the workers.
        acked: for a broadcast consumer, its acks of the partition, which outlive this shell.
        is_superfluous: for a broadcast consumer, returns True for a row whose original message was
            handled; None: there are no such rows.
    """

    is_copied = is_apart = is_loose = False

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
        dispatch: SessionDispatch,
        acked: AckedOffsets | None = None,
        is_superfluous: Callable[[Message], bool] | None = None,
    ) -> None:
        assert grant.partition.address is not None
        self.subject = subject
        self.group = group
        self.grant = grant
        self.partition_id = self.leased_id = int(grant.partition.partition_id)
        self.token = grant.token
        self.owner = owner
        self.client = self
        """The client that hands messages out, as part of the `Delivery` interface."""
        self.connections = connections
        self.broker = connections.broker_at(grant.partition.address)
        self.lease = (self.partition_id, group, session, grant.token)
        self.settings = settings
        self.is_shared = settings.consume_strategy is ConsumeStrategy.SHARED
        self.exclusive = not self.is_shared
        self.token_is_single_use = not (self.is_shared or settings.broadcast)
        """True if no other session may hold the same token."""
        message_filter = owner.message_filter
        self.cluster_id = cluster_id
        self.session = session
        """The id of the consumer's session at the metaserver."""
        self.state = PartitionSession(
            self.lease,
            settings,
            rng,
            epoch_ms=clock.wall_ms() - clock.boot_ms(),
            rejects=None if message_filter is None else message_filter.rejects,
            redrives_here=owner.allows_redrives,
            has_callbacks=True,
            has_ancestors=bool(grant.partition.parents) and not settings.broadcast,
            broadcast=Broadcast(acked or AckedOffsets(), is_superfluous)
            if settings.broadcast
            else None,
            taking=Taking(dispatch.in_batches, owner.by_hand, dispatch.by_column),
        )
        self.begin_until_s = 0.0
        """The time of the boot clock from which no handler may begin; 0.0: none may begin now."""
        self.given_back: dict[tuple[int, int], None] = {}
        """What the program has given back and has not got again, the oldest first."""
        self.has_given_up = False
        """True once the program can ack nothing any more."""
        self.handled: list[Message] = []
        """Messages whose handlers have returned and that the session does not know of."""
        self.no_connection_since_ms: int | None = None
        """The boot time since which no call has reached the broker; None if the last one did."""
        self.gate = PartitionGate(self)
        self.budget_share = owner.budget.new_share()
        self.ended = asyncio.Event()
        self._clock = clock
        self._boot_ms = clock.boot_ms
        self._dispatch: Any = dispatch  # a loop also takes acks
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER
        self._tasks: set[asyncio.Task[None]] = set()
        self._pull_call: Calling | None = None
        self._pull_request: Pull | None = None
        self._pull_channel: Channel | None = None
        self._waits_for_budget = False
        self._waiters: list[asyncio.Future[None]] = []
        self._turn_left = asyncio.Event()
        self._quiet = asyncio.Event()
        self._reads = ParkedReads(self)
        self._progress = PullProgress()
        self._error_text = ""
        self._failures = 0
        """The number of consecutive pulls that failed."""
        self._failure_log = LogFilter()
        self._is_forked = self._is_reported_drained = self._is_stopping = False
        self.lease_until_ms = deadline_ms
        """The end of the lease, on the boot clock."""
        self.feed(LeaseGranted(deadline_ms))

    # ── the session ───────────────────────────────────────────────────────────────────────────────
    def feed(self, event: Event) -> None:
        """Give the session an event that no worker waits for."""
        messages = self.ask(event)
        tenure = self.state.tenure
        may_begin = tenure.may_hand_out(self._boot_ms()) or self._may_begin_acked
        if self._is_forked:
            may_begin = False
        self.begin_until_s = deadline_seconds(tenure.until_ms * 1_000_000) if may_begin else 0.0
        if messages:
            self._dispatch.hand_out(self, messages)

    @property
    def _may_begin_acked(self) -> bool:
        """True if messages that were acked first may still begin: nobody else gets them."""
        tenure = self.state.tenure
        is_acked = self.state.settings.ack is AckMode.BEFORE
        return is_acked and tenure.fence is None and not self.state.has_ended

    def ask(self, event: Event) -> list[Message]:
        """Give the session a worker's event, and return what it hands out."""
        if self.ended.is_set():
            return []
        state = self.state
        if self.is_shared:
            self._count_workers(event)
        ready = step(state, event, self._boot_ms())
        for note in ready.notes:
            self._note(note)
        for request in ready.requests:
            self._do(request)
        if ready.wait_until_ms != self._timer_ms:
            self._set_timer(ready.wait_until_ms)
        if ready.has_more:
            self._dispatch.offer(self)
        if not state.tenure.is_live:
            self._on_stopping()
        elif not self._is_reported_drained and state.is_drained:
            self._is_reported_drained = True
            self.owner.report_drained()
        return ready.hand_out

    def _count_workers(self, event: Event) -> None:
        """Tell a shared group's session how many workers are free, before it decides what to
        pull.
        """
        if isinstance(event, FlightsPulled):
            self._tell_free(sum(end - start for start, end in event.ranges))
        elif not isinstance(event, WorkersFree) and not self.state.calls.pull.is_in_flight:
            self._tell_free(0)

    def _tell_free(self, arriving: int) -> None:
        free = self._dispatch.count_spare(self) - arriving
        if free != self.state.flights.pull_size.free:
            self.ask(WorkersFree(free))

    def wake(self) -> None:
        """A worker is idle: pull, unless that is known, or a pull is in flight."""
        if not self.state.calls.pull.is_in_flight and not self.ended.is_set():
            self._tell_free(0)

    def has_expired(self, message: Message) -> bool:
        """Return True if another consumer of a shared group may soon have the message."""
        state = self.state
        if state.settings.ack is AckMode.BEFORE or not is_own(state, message):
            return False
        until_ms = state.flights.begin_until_ms.get(message.offset, NEVER)
        return self._boot_ms() >= until_ms

    def _on_stopping(self) -> None:
        state = self.state
        if not self._is_stopping:
            self._is_stopping = True
            if not self._may_begin_acked:
                self.begin_until_s = 0.0
            self._loop.call_soon(self.owner.start_hand_over, self)
        if state.lanes.is_idle and not state.acks.awaited:
            self._quiet.set()
        if state.has_ended and not self.ended.is_set():
            self._close()

    def _note(self, note: Note | FailureOutcome) -> None:
        if isinstance(note, FailureOutcome):
            self._dispatch.failures.note_outcome(note)
        elif note.kind is NoteKind.MISSED:
            missed = counted(note.count, "message was", "messages were")
            if self.is_shared:  # it does not know which ones other consumers had
                missed = f"messages below offset {note.offset} were"
            log.warning(
                "%s: %s removed before %s got them; it continues at offset %d",
                self.log_name,
                missed,
                "the group" if self.group else "a broadcast consumer",
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

    def _set_timer(self, until_ms: int) -> None:
        self._timer_ms = until_ms
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if until_ms >= NEVER or self.ended.is_set():
            return
        # To the nanosecond, so that acks of all partitions leave in one turn of the event loop.
        wait_s = max(0, until_ms * 1_000_000 - self._clock.boot_ns()) / 1e9
        now_s = self._loop.time()
        # Renewals of all partitions on a machine share a wake-up of the processor.
        at_s = round_to_tick(wait_s, now_s) if wait_s >= ALIGNED_S_MIN else now_s + wait_s
        self._timer = self._loop.call_at(at_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_ms = NEVER
        self._feed_in_callback(Tick())

    def _feed_in_callback(self, event: Event) -> None:
        """Give the session an event in a callback, which must not raise: an error closes the
        consumer.
        """
        try:
            self.feed(event)
        except Exception as error:  # noqa: BLE001 - a callback must not raise
            self.owner.fail(error)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────
    def _do(self, request: Request) -> None:
        if isinstance(request, Pull):
            self._begin_pull(request)
        elif isinstance(request, Ack):
            channel = self.broker.live_channel
            if channel is None:
                self.start(self._call(request))
            else:
                channel.begin(
                    request,
                    timeout_ms=self.settings.call_timeout_ms,
                    on_answer=partial(self._on_answer, request),
                )
        elif isinstance(request, CancelHandlers):
            self._dispatch.cancel(self)
        elif isinstance(request, LeaveTurn):
            self._turn_left.set()
        elif isinstance(request, TakeTurn):
            self.start(self._hold_turn())
        elif isinstance(request, FindBroker):
            self.owner.find_broker()
        else:
            self.start(self._call(request))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until this partition ends; an error in it closes the consumer."""
        task = start_task(work, name=f"session of {self.partition_id}")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.owner.fail(error)

    async def _hold_turn(self) -> None:
        self._turn_left.clear()
        async with self.owner.alone.acquire(CAREFUL_MS / 1000):
            self.feed(TurnTaken())
            await self._turn_left.wait()

    async def _call(self, request: Request) -> None:
        event: Event
        try:
            event = await self._ask_broker(request)
            self._note_reached()
        except KeylaneError as error:
            event = self._failed(request, error)
        if not self.ended.is_set():
            self.feed(event)
            self._wake_waiters()

    async def _ask_broker(self, request: Any) -> Event:
        if isinstance(request, SendChanges):
            answer, _ = await self.broker.call(request.frame, encode_parked(list(request.changes)))
        elif isinstance(request, ListParked):
            return await self._reads.list_keys()
        elif isinstance(request, ReadWindow):
            return await self._reads.read_window(request)
        elif isinstance(request, LeaveAncestor):
            return await self._reads.leave_ancestor(request.source)
        elif isinstance(request, Pull | PullShared | Read):
            sent_ms = self._boot_ms()
            answer, payload = await self.broker.call(request, wait_ms=request.wait_ms)
            self._log_recovery()
            if isinstance(answer, Handed):
                return self._handed(answer, payload, sent_ms)
            return self._pulled(answer, payload, has_more=False)
        else:
            answer, _ = await self.broker.call(request)
            if isinstance(answer, Acquired):
                self._progress.end_offset = max(self._progress.end_offset, answer.next_offset)
                answer = await self._reads.adopt(answer)
        event: Any = answer  # Acquired, Acked, ParkedChanged and Released are events as they are
        checked: Event = event
        return checked

    def _failed(self, request: Any, error: KeylaneError) -> CallFailed:
        if not isinstance(error, NO_CONNECTION):
            self.no_connection_since_ms = None
        elif self.no_connection_since_ms is None:
            self.no_connection_since_ms = self._boot_ms()
        if isinstance(error, FencedError):
            log.info("%s: %s", self.log_name, error.message)
        elif isinstance(error, OffsetOutOfRangeError):
            self._log_out_of_range(error)
        elif not isinstance(request, Ack | SendChanges):
            self._log_failure(error.message)
        return CallFailed(request, error)

    def _note_reached(self) -> None:
        self.no_connection_since_ms = None

    def _on_answer(self, request: Ack, call: Calling) -> None:
        event: Event
        try:
            answer, _ = call.result()
            assert isinstance(answer, Acked)
            event = answer
            self._note_reached()
        except KeylaneError as error:
            event = self._failed(request, error)
        except Exception as error:  # noqa: BLE001 - a callback must not raise
            self.owner.fail(error)
            return
        if not self.ended.is_set():
            self._feed_in_callback(event)
            if self._waiters:
                self._wake_waiters()

    # ── pulls ─────────────────────────────────────────────────────────────────────────────────────
    def _begin_pull(self, request: Pull) -> None:
        ready = self._progress.end_offset - self.state.offsets.next_offset
        if not self.budget_share.try_reserve(ready, self.settings.pull_bytes):
            self.start(self._pull_when_reserved(request, ready))
            return
        channel = self.broker.live_channel
        if channel is None:
            self.start(self._pull_first(request))
        elif channel is not self._pull_channel and _chains.get(channel, 0) >= CHAINS_MAX:
            self.start(self._call(replace(request, answers_max=1)))
        else:
            self._send_pull(channel, request)

    async def _pull_when_reserved(self, request: Pull, ready: int) -> None:
        self._waits_for_budget = True
        try:
            await self.budget_share.reserve(ready, self.settings.pull_bytes)
        finally:
            self._waits_for_budget = False
        if not self.ended.is_set():
            await self._pull_first(request)

    async def _pull_first(self, request: Pull) -> None:
        """Open a channel, and pull."""
        try:
            channel = await self.broker.channel()
        except KeylaneError as error:
            self._end_pull()
            self.feed(self._failed(request, error))
            return
        if not self.ended.is_set():
            self._send_pull(channel, request)

    def _send_pull(self, channel: Channel, request: Pull) -> None:
        if channel is not self._pull_channel:
            self._leave_channel()
            self._pull_channel = channel
            _chains[channel] = _chains.get(channel, 0) + 1
        self._pull_request = request
        self._pull_call = channel.begin(
            request,
            timeout_ms=self.settings.call_timeout_ms + request.wait_ms,
            on_answer=partial(self._on_pull_answer, request),
            on_part=self._on_part,
        )

    def _leave_channel(self) -> None:
        if self._pull_channel is not None:
            _chains[self._pull_channel] -= 1
            self._pull_channel = None

    def _on_part(self, answer: Answer, payload: memoryview) -> None:
        """Store an answer that is followed by another."""
        if not self.ended.is_set():
            try:
                self.feed(self._pulled(answer, payload, has_more=True))
            except Exception as error:  # noqa: BLE001 - a callback must not raise
                self.owner.fail(error)

    def _on_pull_answer(self, request: Pull, call: Calling) -> None:
        if call is not self._pull_call and self._pull_call is not None:
            return  # it was given up
        self._pull_call = None
        event: Event
        try:
            answer, payload = call.result()
            event = self._pulled(answer, payload, has_more=False)
            self._log_recovery()
        except KeylaneError as error:
            self._end_pull()
            event = self._failed(request, error)
        except Exception as error:  # noqa: BLE001 - a callback must not raise
            self.owner.fail(error)
            return
        if not self.ended.is_set():
            self._feed_in_callback(event)

    def _end_pull(self) -> None:
        self.budget_share.end_pull()
        if self._pull_channel is not None and self._pull_channel.closed:
            self._leave_channel()

    def _pulled(self, answer: Answer, payload: memoryview, *, has_more: bool) -> Pulled:
        assert isinstance(answer, Batches)
        batches = []
        for start, header in batch_starts(payload):
            batches.append(self._record_at(payload, start, header))
            self._progress.record_pull(header)
            self.budget_share.add_buffered(header.length)
        self._note_reached()
        self._progress.end_offset = max(self._progress.end_offset, answer.next_offset)
        self.budget_share.end_pull(
            len(payload), max(0, answer.upto - self.state.offsets.next_offset)
        )
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

    def _record_at(self, payload: memoryview, start: int, header: Header) -> PulledRecord:
        """Cut a batch from an answer. Raises CorruptBatchError if it cannot be unpacked, unless the
        program takes messages itself: then it gets the error when it comes to the batch.
        """
        record, columns = payload[start : start + header.length], None
        if self.state.lanes.columns is None:
            try:
                columns = column_views(payload, header, start)
            except CorruptBatchError:
                if not self.owner.by_hand:
                    raise
        return PulledRecord(self, record, header, columns)

    def _handed(self, answer: Handed, payload: memoryview, sent_ms: int) -> FlightsPulled:
        """Return the messages of a shared group that are in flight since `sent_ms`."""
        batches = []
        for start, header in batch_starts(payload):
            batches.append(self._record_at(payload, start, header))
            self._progress.record_pull(header)
        self._note_reached()
        self._progress.end_offset = answer.next_offset
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

    def _log_out_of_range(self, error: OffsetOutOfRangeError) -> None:
        """Log that the broker stores less than was pulled; of removed messages, the session
        notes how many.
        """
        if self.is_shared or self.state.offsets.next_offset < (error.first_offset or 0):
            return
        if self.group:
            log.error("%s is handed over after an error: %s", self.log_name, error.message)
            return
        # Unlike with a lease, a new token cannot help; only the broker's data folder can.
        text = f"the broker stores less than was read from it, and {MAYBE_OLDER_COPY}"
        self._log_failure(f"{text}: {error.message}")

    def _log_failure(self, text: str) -> None:
        """Log why a call failed, as a warning after WARN_AFTER consecutive failures."""
        self._error_text = text
        self._failures += 1
        level = logging.WARNING if self._failures >= WARN_AFTER else logging.INFO
        if line := self._failure_log.count_failure(text, self._boot_ms(), level):
            log.log(level, "%s: %s", self.log_name, line)

    def _log_recovery(self) -> None:
        if not self._failures:
            return
        level = logging.WARNING if self._failures >= WARN_AFTER else logging.INFO
        self._failures = 0
        self._error_text = ""
        if failures := self._failure_log.end_failures(
            self._boot_ms(), logging.INFO, logging.WARNING
        ):
            log.log(level, "%s: pulls succeed again, after %s", self.log_name, failures)

    # ── called by the consumer ────────────────────────────────────────────────────────────────────
    def renew(self, deadline_ms: int, address: str | None) -> None:
        """Extend the lease to `deadline_ms`, and follow the broker to `address`, unless that is
        None.
        """
        if self.lapsed:
            return
        self.lease_until_ms = deadline_ms
        if address is not None and address != self.broker.address:
            self.broker = self.connections.broker_at(address)
            call = self._pull_call
            if call is not None and not call.done():
                # Otherwise a broker that still runs at the old address keeps the pull waiting.
                self._pull_call = None
                call.cancel()
                self._end_pull()
                assert self._pull_request is not None
                moved = UnreachableError(f"the partition has moved to {address}")
                self.feed(CallFailed(self._pull_request, moved))
        self.feed(LeaseGranted(deadline_ms))

    def apply_settings(self, settings: ConsumerSettings) -> None:
        """Apply the settings that an operator has stored for the group."""
        self.settings = settings
        self.feed(SettingsStored(settings))

    def update_grant(self, grant: Grant) -> None:
        """Use a newer grant of the same lease, unless all ancestors have been adopted."""
        self._reads.update_grant(grant)

    def stop(self) -> None:
        """Pull nothing more, and start no more handlers."""
        self._is_stopping = True
        if not self.ended.is_set():
            self._dispatch.forget(self)
        self.feed(Stopped(self.settings.handover_ms))

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
            self._close()

    def abandon(self) -> None:
        """Stop at once, without notifying the broker."""
        self._close()

    def on_fork(self) -> None:
        """Start no more handlers in this process, which is a forked child."""
        self._is_forked = True
        self.begin_until_s = 0.0

    def _close(self) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._quiet.set()
        self._turn_left.set()
        # A message that a program keeps refers to this object, and must not keep the consumer.
        self._dispatch = _ENDED
        self._wake_waiters()
        self._set_timer(NEVER)
        if self._pull_call is not None:
            self._pull_call.cancel()
            self._pull_call = None
        self._leave_channel()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self.budget_share.close()

    # ── the messages' delivery ────────────────────────────────────────────────────────────────────
    @property
    def queue(self) -> int:
        """The number of the logic queue."""
        return int(self.grant.partition.queue)

    @property
    def broker_group(self) -> str:
        """The name of the partition's broker group."""
        return str(self.grant.partition.broker_group)

    @property
    def logic_start(self) -> int:
        """The logic offset of the partition's offset 0."""
        return self.grant.partition.logic_start

    @property
    def codec(self) -> Any:
        """The codec of the consumer; None if values are bytes."""
        return self.owner.codec

    def ack(self, message: Message) -> Any:
        """Ack a message for the program. Raises InvalidRequestError if a handler has it."""
        check_not_in_handler(message)
        return self._dispatch.ack(self, message)

    def nack(self, message: Message, after_s: float) -> Any:
        """Give a message back for the program. Raises InvalidRequestError if a handler has it."""
        check_not_in_handler(message)
        return self._dispatch.nack(self, message, after_s)

    def __reduce_ex__(self, _protocol: object) -> Any:
        # A handler may pass its message to a pool of processes, where there is no shell.
        delivery: Any = self
        return copied_delivery(delivery)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def check_can_ack(self, offset: int) -> None:
        """
        Check that the program may ack the message at `offset`.

        Raises:
            LeaseLostError: the partition was handed over, or its lease has ended.
            UsageError: the consumer is open in another process or event loop.
        """
        binding = self.connections.loop_binding
        if get_ident() != binding.thread:
            binding.check_thread()
        if self.has_given_up or self.ended.is_set() or self.lapsed:
            raise LeaseLostError(partition_id=self.partition_id, offset=offset)

    def has_stored(self, messages: list[Message]) -> bool:
        """Return True if the broker has stored the outcome of handled messages."""
        acks = self.state.acks
        for message in messages:
            is_apart = message.delivery is not self
            if is_apart and self.state.parking:
                return False
            ref = message.partition_id, message.offset
            if not is_apart and (ref in acks.awaited or message.offset in acks.handled):
                return False
        return True

    async def wait_for_answer(self, timeout_s: float | None = None) -> None:
        """Wait until the broker answers, or the partition ends, for at most so many seconds."""
        if not self.ended.is_set():
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            limit_s = None if timeout_s is None else max(0.0, timeout_s)
            await asyncio.wait((waiter,), timeout=limit_s)

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def report_hang(
        self, message: Message, failure: Failure, running_ms: int, *, is_failed_try: bool = False
    ) -> None:
        """Report to the broker that a message hangs in its handler, and whether that is a failed
        try.
        """
        self.feed(MessageHangs(message, failure, running_ms, is_failed_try))

    # ── state, for the consumer ───────────────────────────────────────────────────────────────────
    @property
    def log_name(self) -> str:
        """The subject, partition and group, for log lines."""
        return partition_name(self.subject, self.partition_id, self.group)

    @property
    def loop_binding(self) -> LoopBinding:
        """The process and event loop in which the consumer is open."""
        return self.connections.loop_binding

    @property
    def waiting_for(self) -> str:
        """A text for users that says why nothing is pulled."""
        state = self.state
        if self._error_text:
            return self._error_text
        if not state.tenure.is_acquired:
            return "the fence"
        if self.gate.reasons:
            return ", ".join(sorted(self.gate.reasons))
        if state.offsets.is_exhausted:
            return "" if state.is_drained else "acks to the end"
        if self._waits_for_budget:
            return "other partitions"
        return "messages" if state.calls.pull.is_in_flight else "handlers"

    @property
    def fence(self) -> int:
        """The higher token that the broker has seen; 0 if it is unknown or there is none."""
        return self.state.tenure.fence or 0

    @property
    def fenced(self) -> bool:
        """True once the broker has seen a higher token."""
        return self.state.tenure.fence is not None

    @property
    def lapsed(self) -> bool:
        """True once the partition is fenced, or its lease has ended."""
        return self.fenced or self._boot_ms() >= self.lease_until_ms

    @property
    def left_ms(self) -> int:
        """The milliseconds until the lease ends."""
        return max(0, self.lease_until_ms - self._boot_ms())

    @property
    def renewed_ms(self) -> int:
        """The boot time, in milliseconds, of the heartbeat that last renewed the lease."""
        return self.lease_until_ms - self.settings.ttl_ms + self.settings.margin_ms

    @property
    def has_connection(self) -> bool:
        """True if the last call reached the broker; False before the first call."""
        return self.no_connection_since_ms is None and self.state.tenure.is_acquired

    @property
    def cursor(self) -> int:
        """The offset below which the broker has acks for all messages."""
        return self.state.offsets.cursor

    @property
    def next_offset(self) -> int:
        """The first offset that has not been pulled."""
        return self.state.offsets.next_offset

    @property
    def missed(self) -> int:
        """The number of messages that retention removed before they were pulled."""
        return self.state.offsets.missed

    @property
    def outstanding(self) -> int:
        """The number of messages that are pulled and have not ended."""
        return self.state.intake.held

    @property
    def sealed(self) -> bool:
        """True if the partition is sealed."""
        return self.state.offsets.end_offset is not None

    @property
    def drained(self) -> bool:
        """True once the partition is acked to the end and no parked message is in a handler."""
        return self.state.is_drained

    @property
    def is_careful(self) -> bool:
        """True while messages that may have killed an earlier owner's process are handled one at a
        time.
        """
        return self.state.suspects is not None

    @property
    def retries_carefully(self) -> bool:
        """True while messages that waited for a retry are handed out one at a time."""
        redrives = self.state.redrives
        return redrives.has_waiting and self._boot_ms() < redrives.careful_until_ms

    @property
    def has_parked(self) -> bool:
        """True if the partition may have parked messages."""
        return self.state.parking.version > 0

    @property
    def paused(self) -> bool:
        """True while the user has paused the partition."""
        return PAUSED in self.gate.reasons

    @property
    def position(self) -> Position:
        """How far the partition is pulled and acked."""
        offsets = self.state.offsets
        self._progress.record_acks(offsets.cursor)
        return self._progress.position(offsets.next_offset, offsets.cursor, self._clock.wall_ns())

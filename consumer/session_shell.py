"""Does what a partition session says: calls its broker, sets its timer, hands out its messages.

    event ─▶ step ─▶ Ready ─▶ requests: each a call, whose answer is the next event
                        ├─▶ messages: to the worker that asked, or to the dispatch
                        ╰─▶ a time: the one timer of the partition

It decides nothing: what is sent, when, and to whom is in `session/`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ..protocol.batch import batch_starts, column_views
from ..protocol.clock import Clock, deadline_seconds
from ..protocol.errors import KeylaneError
from ..protocol.frames import (
    Answer,
    Batches,
    ListParked,
    ParkedEdited,
    ParkedKeys,
    ParkedRows,
    Pull,
    Read,
    ReadEdited,
    ReadParked,
)
from ..protocol.ids import MAX_I64
from ..protocol.message import Message
from ..protocol.offsets import Range
from ..protocol.parked import ParkedKeyRow, decode_key_rows, encode_parked
from ..protocol.record import Header
from ..rpc.race import start_task
from .delivery.decode import decode_messages
from .delivery.suspect_lock import SuspectLock
from .session.events import (
    CallFailed,
    Event,
    KeysListed,
    Pulled,
    Tick,
    TurnTaken,
    WindowRead,
)
from .session.ready import CancelHandlers, LeaveTurn, ReadWindow, Request, SendChanges, TakeTurn
from .session.state import PartitionSession
from .session.step import step
from .session.suspects import CAREFUL_MS
from .session.tenure import NEVER

log = logging.getLogger("keylane.consumer")
READ_BYTES = 1 << 18


class AnsweringBroker(Protocol):
    """A broker that answers data calls."""

    async def call(
        self, request: Any, payload: bytes = b"", *, wait_ms: int = 0
    ) -> tuple[Answer, memoryview]:
        """Make a call. Raises KeylaneError."""
        ...


class SessionDispatch(Protocol):
    """The workers of a consumer, to the shells of its partitions."""

    def hand_out(self, shell: SessionShell, messages: list[Message]) -> None:
        """Accept messages that no worker has asked for."""
        ...

    def offer(self, shell: SessionShell) -> None:
        """Note that a worker that asks this partition may get something."""
        ...

    def cancel(self, shell: SessionShell) -> None:
        """Cancel the handlers that have messages of this partition."""
        ...


class PulledRecord:
    """A batch as it was pulled; its messages are made when it is opened."""

    __slots__ = ("_header", "_lease", "_record", "end", "start")

    def __init__(self, record: memoryview, header: Header, lease: tuple[str, int]) -> None:
        self._record = record
        self._header = header
        self._lease = lease
        self.start = header.base_offset
        self.end = header.next_offset

    def open(self) -> list[Message]:
        """Make and return all messages."""
        subject, token = self._lease
        header = self._header
        columns = column_views(self._record, header)
        no_delivery: Any = None  # a message knows its session once programs ack by it
        return decode_messages(columns, header, subject, header.partition_id, token, no_delivery)


class SessionShell:
    """
    Drives the session of one partition.

    Args:
        broker: the partition's.
        locate: finds the broker of another partition, for parked messages that it stores.
        turn: lets one suspect of the consumer run at a time.
        on_error: called with an error that ends the consumer.
    """

    def __init__(
        self,
        session: PartitionSession,
        *,
        subject: str,
        broker: AnsweringBroker,
        clock: Clock,
        dispatch: SessionDispatch,
        turn: SuspectLock,
        locate: Callable[[int], Awaitable[AnsweringBroker]],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.session = session
        self.ended = asyncio.Event()
        self._subject = subject
        self._broker = broker
        self._boot_ms = clock.boot_ms
        self._dispatch = dispatch
        self._turn = turn
        self._locate = locate
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn_left = asyncio.Event()
        self._has_listed = False
        self.begin_until_s = 0.0
        """The time of the boot clock from which no handler may begin; 0.0: none may begin now."""
        self.handled: list[Message] = []
        """Messages whose handlers have returned and that the session does not know of."""

    def feed(self, event: Event) -> None:
        """Give the session an event that no worker waits for."""
        messages = self.ask(event)
        tenure = self.session.tenure
        may_begin = tenure.may_hand_out(self._boot_ms())
        self.begin_until_s = deadline_seconds(tenure.until_ms * 1_000_000) if may_begin else 0.0
        if messages:
            self._dispatch.hand_out(self, messages)

    def ask(self, event: Event) -> list[Message]:
        """Give the session a worker's event, and return what it hands out."""
        ready = step(self.session, event, self._boot_ms())
        for note in ready.notes:
            log.info("partition %d: %s", self.session.partition_id, note)
        for request in ready.requests:
            self._do(request)
        if ready.wait_until_ms != self._timer_ms:
            self._set_timer(ready.wait_until_ms)
        if ready.has_more:
            self._dispatch.offer(self)
        if self.session.has_ended and not self.ended.is_set():
            self._close()
        return ready.hand_out

    def close(self) -> None:
        """Stop at once, as the end of the process would."""
        self._close()

    def _close(self) -> None:
        self.ended.set()
        self._turn_left.set()
        self._set_timer(NEVER)
        for task in self._tasks:
            task.cancel()

    def _set_timer(self, until_ms: int) -> None:
        self._timer_ms = until_ms
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if until_ms < NEVER and not self.ended.is_set():
            delay_s = max(0, until_ms - self._boot_ms()) / 1000
            self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_ms = NEVER
        if self._boot_ms() < self.session.next_timer_ms:  # the timer was early
            self._set_timer(self.session.next_timer_ms)
            return
        self.feed(Tick())

    # ── requests ──────────────────────────────────────────────────────────────────────────────────
    def _do(self, request: Request) -> None:
        if isinstance(request, CancelHandlers):
            self._dispatch.cancel(self)
        elif isinstance(request, LeaveTurn):
            self._turn_left.set()
        elif isinstance(request, TakeTurn):
            self._start(self._hold_turn())
        else:
            self._start(self._call(request))

    def _start(self, work: Any) -> None:
        name = f"session of {self.session.partition_id}"
        task: asyncio.Task[None] = start_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            self._on_error(error)

    async def _hold_turn(self) -> None:
        self._turn_left.clear()
        async with self._turn.acquire(CAREFUL_MS / 1000):
            self.feed(TurnTaken())
            await self._turn_left.wait()

    async def _call(self, request: Request) -> None:
        event: Event
        try:
            event = await self._ask_broker(request)
        except KeylaneError as error:
            event = CallFailed(request, error)
        if not self.ended.is_set():
            self.feed(event)

    async def _ask_broker(self, request: Any) -> Event:
        if isinstance(request, Pull):
            return await self._pull(request)
        if isinstance(request, SendChanges):
            answer, _ = await self._broker.call(request.frame, encode_parked(list(request.changes)))
        elif isinstance(request, ListParked):
            return await self._list(request)
        elif isinstance(request, ReadWindow):
            return await self._read_window(request)
        else:
            answer, _ = await self._broker.call(request)
        event: Any = answer  # Acquired, Acked, ParkedChanged and Released are events as they are
        checked: Event = event
        return checked

    async def _pull(self, request: Pull) -> Pulled:
        answer, payload = await self._broker.call(request, wait_ms=request.wait_ms)
        assert isinstance(answer, Batches)
        lease = self._subject, self.session.tenure.lease[3]
        batches = []
        for start, header in batch_starts(payload):
            record = payload[start : start + header.length]
            column_views(record, header)  # raises if the batch cannot be unpacked
            batches.append(PulledRecord(record, header, lease))
        return Pulled(
            batches,
            answer.upto,
            answer.next_offset,
            answer.sealed and answer.upto >= answer.next_offset,
            answer.parked_version,
            answer.left_out,
        )

    # ── parked messages ───────────────────────────────────────────────────────────────────────────
    async def _list(self, request: ListParked) -> KeysListed:
        rows: list[ParkedKeyRow] = []
        version, first = 0, 0
        while True:
            page = ListParked(*self.session.tenure.lease, first)
            answer, payload = await self._broker.call(page)
            assert isinstance(answer, ParkedKeys)
            rows += decode_key_rows(payload)
            version = answer.parked_version
            if answer.following is None:
                break
            first = answer.following
        aside = [] if self._has_listed else await self._list_aside(rows)
        self._has_listed = True
        return KeysListed(version, rows, aside)

    async def _list_aside(self, rows: list[ParkedKeyRow]) -> list[tuple[int, int, int, int]]:
        """Return what waits for a retry."""
        return [
            (row.key, *parked)
            for row in rows
            if isinstance(row.key, int) and row.key
            for parked in await self._rows(row.key, MAX_I64)
        ]

    async def _rows(self, key: Any, count: int) -> tuple[tuple[int, int, int], ...]:
        answer = await self._read_rows(key, count)
        return answer.rows

    async def _read_rows(self, key: Any, count: int) -> ParkedRows:
        request = ReadParked(*self.session.tenure.lease, key, count)
        answer, _ = await self._broker.call(request)
        assert isinstance(answer, ParkedRows)
        return answer

    async def _read_window(self, request: ReadWindow) -> WindowRead:
        if request.ranges:
            source, ranges = request.source, list(request.ranges)
            edited: tuple[tuple[int, int], ...] = ()
        else:
            rows = await self._read_rows(request.key, request.count)
            if not rows.rows:
                return WindowRead(request.number, [])
            source = rows.rows[0][0]
            ranges = [(low, high) for each, low, high in rows.rows if each == source]
            edited = rows.edited
        messages, upto = await self._read(source, ranges)
        await self._apply_edits(request.key, edited, messages)
        left = [(max(low, upto), high) for low, high in ranges if high > upto]
        return WindowRead(request.number, messages, (), left if request.ranges else ())

    async def _read(self, source: int, ranges: list[Range]) -> tuple[list[Message], int]:
        """Read the first messages of a source that are in the ranges, and return up to where."""
        own = source == self.session.partition_id
        broker = self._broker if own else await self._locate(source)
        answer, payload = await broker.call(Read(source, ranges[0][0], READ_BYTES))
        assert isinstance(answer, Batches)
        lease = self._subject, self.session.tenure.lease[3]
        messages: list[Message] = []
        for start, header in batch_starts(payload):
            record = payload[start : start + header.length]
            opened = PulledRecord(record, header, lease).open()
            base = header.base_offset
            for low, high in ranges:
                messages += opened[max(low - base, 0) : max(high - base, 0)]
        return messages, answer.upto

    async def _apply_edits(
        self, key: Any, edited: tuple[tuple[int, int], ...], messages: list[Message]
    ) -> None:
        """Put in the values with which an operator has replaced those of parked messages."""
        partition_id, group, *_ = self.session.tenure.lease
        for message in messages:
            if (message.partition_id, message.offset) not in edited:
                continue
            request = ReadEdited(partition_id, group, key, message.partition_id, message.offset)
            answer, value = await self._broker.call(request)
            assert isinstance(answer, ParkedEdited)
            if answer.properties is not None:
                message.value = bytes(value)
                message.packed_properties = answer.properties

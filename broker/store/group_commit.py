"""Group commit: decided records wait in a queue, and one writer at a time makes them durable with one sync.

    decide ▶ submit ▶ queue ─┐                                  ┌▶ durable, future resolved
                             ├▶ take ▶ write, fdatasync, index ─┤
    mark ▶ late records ─────┘                                  └▶ failed: see below

A commit is written by a thread, or, if it is small, into memory here and synced by the kernel (`quick_sync`).  While it
is written, records for the next one gather.  "Late" records (cursors) are made when a commit is taken: one per key, with
everything that was decided until then.  A commit that is full leaves only messages for the next one, because a late
record must not come before a record that was decided earlier.

Invariants
    A future is resolved only after the sync of its record.
    After a failure every decision that is not durable is undone, newest first.  The state is then the durable state.
    After a failed write or sync nothing is written again.  The records of that commit fail with UNKNOWN fate, waiting
    records with NOT_DONE.
    If the disk is full, no record of the commit is kept.  The next append after RETRY_FULL_MS tries again.

Source: Gray's group commit; PostgreSQL's fsyncgate shows why a failed sync must not be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

from ...protocol.clock import Clock
from ...protocol.errors import (
    BrokerReadOnlyError,
    DiskFullError,
    FlushFailedError,
    KeylaneError,
    OverloadedError,
    StorageError,
)
from ...rpc.operating.histogram import Histogram
from ..storage.append_file import Buffer
from ..storage.index.interface import ConsumeQueues, Unit
from ..storage.log.commit_log import SMALL_BYTES_MAX, CommitLog, WritePlan
from .admission import WAITING_MAX, AdmissionQueue
from .quick_sync import QuickSync

log = logging.getLogger("keylane.broker")

RETRY_FULL_MS = 1_000
OWN_QUEUED_BYTES_MAX = 1 << 20
"""Room in the queue for records that are not messages, so that fast producers never keep out fences and seals."""
_NOTHING = bytearray()


class RunBlocking(Protocol):
    """Runs blocking code: in a thread in production, in place in a simulation."""

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> Awaitable[Any]:
        """The value of `function(*args)`, or its exception."""
        ...


class Entry:
    """A record that is to be written.  `count` is 0 if it has no messages.  A marker has no bytes, only a future."""

    __slots__ = (
        "appended_at_ms", "base_offset", "count", "future", "partition_id", "position", "record", "on_durable", "stamped",
        "undo",
    )  # fmt: skip

    def __init__(
        self,
        record: Buffer,
        *,
        partition_id: int = 0,
        base_offset: int = 0,
        count: int = 0,
        appended_at_ms: int = 0,
        on_durable: Callable[[Entry], None] | None = None,
        undo: Callable[[], object] | None = None,
    ) -> None:
        self.record = record
        self.partition_id = partition_id
        self.base_offset = base_offset
        self.count = count
        self.appended_at_ms = appended_at_ms
        self.position = -1
        """Position in the log, once a commit has taken it."""
        self.stamped: bytearray = _NOTHING
        """The header as it is in the log, once a commit has taken it."""
        self.on_durable = on_durable
        """Called when the record is durable, before `future` is resolved."""
        self.undo = undo
        """Called to undo the decision if the record cannot be made durable."""
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Late:
    __slots__ = ("futures", "make")

    def __init__(self, make: Callable[[], Entry]) -> None:
        self.make = make
        self.futures: list[asyncio.Future[None]] = []


class GroupCommit:
    """The queue of a commit log, and its only writer."""

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        *,
        run_blocking: RunBlocking,
        clock: Clock,
        queued_bytes_max: int,
        commit_bytes_max: int,
        free_bytes: Callable[[], int] = lambda: 1 << 62,
        durations: Histogram | None = None,
        quick: QuickSync | None = None,
    ) -> None:
        """
        Args:
            quick: makes small commits durable without `run_blocking`.
        """
        self._quick = quick
        self._log = log
        self._queues = queues
        self._run_blocking = run_blocking
        self._clock = clock
        self._queued_bytes_max = queued_bytes_max
        self._commit_bytes_max = commit_bytes_max
        self._queue: deque[Entry] = deque()
        self.queued_bytes = 0
        """Bytes in the queue and in the commit that is being written."""
        self._durations = durations or Histogram()
        self._own = 0
        """Number of records in the queue that are not messages."""
        self._late: dict[Hashable, _Late] = {}
        self._task: asyncio.Task[None] | None = None
        self._failure: KeylaneError | None = None
        self._free_bytes = free_bytes
        self._full_until_ms = 0
        self._full_bytes = 0
        """Bytes of the commit that did not fit on the disk."""
        self._refusal = ""
        self._admission = AdmissionQueue(WAITING_MAX, self._has_room)
        self.commits = 0
        """Durable commits since the start."""
        self.failures = 0
        """Number of commits whose decisions were undone."""
        self.on_commit: Callable[[], None] = lambda: None
        """Called after each durable commit."""

    @property
    def failed(self) -> bool:
        """True after a failed write or sync: the log is not written again."""
        return self._failure is not None

    @property
    def reason(self) -> str:
        """Why writes are refused; "" if they are taken."""
        if self._failure is not None:
            return self._failure.message
        if self._refusal:
            return self._refusal
        if self._full_until_ms:
            now_ms = self._clock.boot_ms()
            if now_ms >= self._full_until_ms and not self._fits():
                self._full_until_ms = now_ms + RETRY_FULL_MS
            if now_ms < self._full_until_ms:
                return "the disk is full"
        return ""

    def _fits(self) -> bool:
        try:
            return self._free_bytes() >= self._full_bytes
        except StorageError:
            return False

    def refuse_messages(self, reason: str) -> None:
        """Refuse messages for this reason; "" takes them again.  Fences, seals and acks are still written."""
        self._refusal = reason

    def _has_room(self, length: int) -> bool:
        taken = self.queued_bytes + self._admission.promised_bytes
        return taken + length <= self._queued_bytes_max or not taken

    def takes_now(self, length: int) -> bool:
        """True if messages of `length` bytes need not wait for room; then decide on them, with `in_turn=True`."""
        return self._admission.passes(length) or bool(self.reason)  # `check_room` raises it

    def turn(self, length: int) -> AbstractAsyncContextManager[None]:
        """Wait for room for messages of `length` bytes; the block decides on them, with `in_turn=True`."""
        if self.takes_now(length):
            return nullcontext()
        return self._admission.turn(length)

    def check_room(self, length: int, *, own: bool = False, in_turn: bool = False) -> None:
        """
        Check that a record of `length` bytes may be decided on.

        Args:
            own: the record has no messages.  It has extra room, and is taken while messages are refused.
            in_turn: the caller has waited for room with `turn`.

        Raises:
            BrokerReadOnlyError: a write has failed, the disk is full, or messages are refused.
            OverloadedError: the queue is full.
        """
        if self._failure is not None or self._refusal or self._full_until_ms:
            reason = self.reason
            if reason and not (own and reason is self._refusal):
                raise BrokerReadOnlyError(f"the broker takes no writes: {reason}")
        if in_turn:
            return
        most = self._queued_bytes_max + (OWN_QUEUED_BYTES_MAX if own else 0)
        taken = self.queued_bytes + (0 if own else self._admission.promised_bytes)
        if taken + length > most and taken:
            raise OverloadedError(f"{self.queued_bytes} bytes wait for the disk", retry_after_ms=10)

    def submit(self, entry: Entry) -> asyncio.Future[None]:
        """Queue a record, after `check_room`; the future is resolved when the record is durable."""
        self._queue.append(entry)
        self.queued_bytes += len(entry.record)
        self._own += _is_own(entry)
        if self._task is None:
            self._start()
        return entry.future

    def submit_late(self, key: Hashable, make: Callable[[], Entry]) -> asyncio.Future[None]:
        """Have the next commit call `make` and write its record, if it has bytes; calls with the same key share a record."""
        late = self._late.get(key)
        if late is None:
            late = self._late[key] = _Late(make)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        late.futures.append(future)
        if self._task is None:
            self._start()
        return future

    def flushed(self) -> asyncio.Future[None]:
        """A future that is resolved when all submitted records are durable, or fails as they do."""
        entry = Entry(b"")
        if self._task is None:
            entry.future.set_result(None)
            return entry.future
        return self.submit(entry)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._drain(), name="group commit")

    async def _drain(self) -> None:
        try:
            while self._queue or self._late:
                plan = self._log.plan()
                entries: list[Entry] = []
                fits = True
                try:
                    units = self._take(plan, entries)
                    if plan.end > plan.start:
                        fits = await self._make_durable(plan, units)
                except StorageError as error:
                    self._fail(error, entries, plan)
                except Exception as error:
                    log.exception("the commit failed")
                    self._fail(FlushFailedError(f"a bug in the broker: {error!r}"), entries, plan)
                else:
                    if not fits:
                        self._full(plan)
                    elif plan.end > plan.start:
                        self._full_until_ms = 0
                    self._note_durable(entries)
        finally:
            self._task = None

    def _take(self, plan: WritePlan, entries: list[Entry]) -> list[tuple[int, Unit]]:
        """Move entries from the queue into a commit; returns the units of messages, for the index."""
        units = []
        queue = self._queue
        left = self._commit_bytes_max
        while queue and (left > 0 or self._own or not queue[0].record):
            entry = queue.popleft()
            entries.append(entry)
            self._own -= _is_own(entry)
            length = len(entry.record)
            if length:
                left -= length
                entry.position, entry.stamped = plan.add(
                    entry.record,
                    base_offset=entry.base_offset,
                    appended_at_ms=entry.appended_at_ms,
                )
                if entry.count:
                    unit = Unit(
                        entry.base_offset, entry.count, entry.position, length, entry.appended_at_ms
                    )
                    units.append((entry.partition_id, unit))
        for key, late in list(self._late.items()):
            entry = late.make()
            del self._late[key]
            if entry.record:
                entry.position, entry.stamped = plan.add(
                    entry.record, base_offset=entry.base_offset, appended_at_ms=entry.appended_at_ms
                )
            self.queued_bytes += len(entry.record)
            entries.append(entry)
            entries += [_waiting(future) for future in late.futures]
        return units

    async def _make_durable(self, plan: WritePlan, units: list[tuple[int, Unit]]) -> bool:
        """As `_write`, without a thread if the commit is small and nothing else is being written."""
        quick = self._quick
        small = plan.end - plan.start <= SMALL_BYTES_MAX and self._queues.dispatches_in_memory
        if quick is None or not (small and quick.is_ready()):
            return bool(await self._run_blocking(self._write, plan, units))
        began_ns = self._clock.boot_ns()
        try:
            file = quick.write(self._log.begin_write, plan)
        except DiskFullError:
            await self._run_blocking(self._log.undo, plan)
            raise
        if file is None:
            return bool(await self._run_blocking(self._write, plan, units))
        try:
            await quick.sync(file)
        except asyncio.CancelledError:
            # The file has bytes that are never noted as durable, so nothing may be written behind them.
            self._failure = FlushFailedError("a commit was cancelled")
            raise
        self._durations.observe(self._clock.boot_ns() - began_ns)
        if quick.is_ready() and self._queues.dispatches_in_memory:
            return quick.write(self._end_write, plan, units)
        return bool(await self._run_blocking(self._end_write, plan, units))

    def _end_write(self, plan: WritePlan, units: list[tuple[int, Unit]]) -> bool:
        self._log.end_write(plan)
        return self._dispatch(units)

    def _write(self, plan: WritePlan, units: list[tuple[int, Unit]]) -> bool:
        """Write a commit; False if only the index is full.  Its units then wait in memory, where readers find them."""
        began_ns = self._clock.boot_ns()
        self._log.write(plan)
        self._durations.observe(self._clock.boot_ns() - began_ns)
        return self._dispatch(units)

    def _dispatch(self, units: list[tuple[int, Unit]]) -> bool:
        try:
            self._queues.dispatch(units)
        except DiskFullError:
            return False
        except StorageError as error:
            # The records are durable, so their fate must not be NOT_DONE.
            raise FlushFailedError(error.message, **error.details) from error
        return True

    def _note_durable(self, entries: list[Entry]) -> None:
        self.commits += 1
        for entry in entries:
            self.queued_bytes -= len(entry.record)
            if entry.on_durable is not None:
                entry.on_durable(entry)
            if not entry.future.done():
                entry.future.set_result(None)
        self._admission.admit()
        self.on_commit()

    def _full(self, plan: WritePlan) -> None:
        log.error("the disk is full: no writes for %d ms", RETRY_FULL_MS)
        self._full_bytes = plan.end - plan.start
        self._full_until_ms = self._clock.boot_ms() + RETRY_FULL_MS

    def _fail(self, error: StorageError, entries: list[Entry], plan: WritePlan) -> None:
        self.failures += 1
        if isinstance(error, DiskFullError):
            self._full(plan)
        else:
            log.critical("no writes until the broker is restarted: %s", error)
            self._failure = error
        waiting = list(self._queue)
        self._queue.clear()
        self._own = 0
        for late in self._late.values():
            waiting += [_waiting(future) for future in late.futures]
        self._late.clear()
        for entry in reversed(entries + waiting):
            if entry.undo is not None:
                entry.undo()
        self.queued_bytes = 0
        for entry in entries:
            _refuse(entry, type(error)(error.message, **error.details))
        for entry in waiting:
            _refuse(entry, BrokerReadOnlyError(f"the broker takes no writes: {error.message}"))
        self._admission.admit(all_of_them=True)

    async def close(self) -> None:
        """Wait until every submitted record is durable or has failed."""
        while self._task is not None:
            await asyncio.wait([self._task])


def _is_own(entry: Entry) -> bool:
    return not entry.count and len(entry.record) > 0


def _waiting(future: asyncio.Future[None]) -> Entry:
    entry = Entry(b"")
    entry.future = future
    return entry


def _refuse(entry: Entry, error: KeylaneError) -> None:
    if not entry.future.done():
        entry.future.set_exception(error)
        entry.future.exception()  # marks it as retrieved: its caller may have been cancelled

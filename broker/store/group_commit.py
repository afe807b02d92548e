"""Group commit: decided records wait in a queue, and a single writer makes many of them durable
with one sync.

    decide ▶ submit ▶ queue ─┐                                  ┌▶ durable: `on_done(None)`
                             ├▶ fill ▶ write, fdatasync, index ─┤
    add_deferred ────────────┘                                  └▶ failed: see below

A thread writes a commit. A small commit is written to the page cache on the event loop, and synced
by the kernel (`quick_sync`). In both cases `_finish_commit` is called, which starts the next commit
with the records that have accumulated in the meantime. Deferred records (cursors) are built when a
commit is filled: one per key, with everything that has been decided so far. A full commit leaves
only messages for the next one, because a deferred record must not precede a record that was decided
earlier.

Invariants
    A record's callback is called, or its future resolved, only after the record is synced; an
    exception in the callback affects no other record. After a failure all decisions that are not
    durable are undone, newest first, so the state equals the durable state. After a failed write or
    sync, nothing more is written: the records of that commit fail with the fate UNKNOWN, and queued
    records with NOT_DONE. If the disk is full, the log keeps no record of the commit, and writes
    are tried again after RETRY_FULL_MS.

Group commit is described by Gray. PostgreSQL's fsyncgate shows why a failed sync must not be
repeated.

Appends are admitted to the commit queue in the order of their arrival.

    the commit queue has room, and no append waits ─▶ admitted immediately
    the commit queue is full                       ─▶ waits, and later appends wait behind it
    too many wait, or one has waited WAIT_MS       ─▶ refused, before anything is decided

Without this order, large appends would starve, because smaller ones would use all the room that
becomes free.

Invariants
    Appends are admitted in the order of arrival, so the appends of a connection are decided in
    order. An admitted append's room is reserved until it is decided. The next append is admitted at
    the end of each admission, and not only after a durable commit, because a refused or repeated
    append does not cause a commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

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
from ...rpc.threads.turn import at_end
from ..storage.append_file import Buffer
from ..storage.index.interface import ConsumeQueues, Unit
from ..storage.log.commit_log import SMALL_BYTES_MAX, CommitLog, WritePlan
from .copy_wait import CopyWait
from .quick_sync import QuickSync

WAITING_MAX = 32
"""The maximum number of appends that may wait at a broker. They take 36 MB if all batches have the
maximum size.
"""
WAIT_MS = 2_000
"""The maximum time that an append waits, in milliseconds. It is shorter than a producer's timeout,
because a refusal tells the producer that the batch was not stored, and a timeout does not.
"""


class AdmissionQueue:
    """
    The queue of appends that wait for room in the commit queue.

    Args:
        waiting_max: the maximum number of appends that may wait, each with a batch in memory. Bytes
            are not counted, so large batches are not refused more often than small ones.
        fits: returns True if the commit queue has room for this many bytes.
    """

    def __init__(self, waiting_max: int, fits: Callable[[int], bool]) -> None:
        self._waiting_max = waiting_max
        self._fits = fits
        self._waiting_appends: OrderedDict[asyncio.Future[None], int] = OrderedDict()
        """Maps the future of each waiting append to the append's size in bytes, in order of
        arrival.
        """
        self.empty = True
        """True if no append waits or is being decided, so that an append that fits does not have to
        wait.
        """
        self.reserved_bytes = 0
        """The total size of the appends that have been admitted and not decided yet, in bytes."""

    @property
    def waiting(self) -> int:
        """The number of waiting appends."""
        return len(self._waiting_appends)

    @asynccontextmanager
    async def admission(self, length: int) -> AsyncIterator[None]:
        """
        Wait until an append of `length` bytes is admitted. The block must decide on it without
        awaiting anything. The next append is admitted at the end of the block.

        Raises:
            OverloadedError: too many appends are waiting, or this one has waited for WAIT_MS.
        """
        if len(self._waiting_appends) >= self._waiting_max:
            raise OverloadedError("too many appends wait for the disk", limit=self._waiting_max)
        admission_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_appends[admission_future] = length
        self.empty = False
        try:
            async with asyncio.timeout(WAIT_MS / 1000):
                await admission_future
        except BaseException as error:
            self._remove(admission_future, length)
            self.admit()
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"the append waited {WAIT_MS} ms for the disk", retry_after_ms=10
                ) from None
            raise
        self._remove(admission_future, length)
        try:
            yield
        finally:
            self.admit()

    def _remove(self, admission_future: asyncio.Future[None], length: int) -> None:
        """Remove an append from the queue, or release the room reserved for it."""
        if self._waiting_appends.pop(admission_future, None) is None:
            self.reserved_bytes -= length
        self.empty = not self._waiting_appends and not self.reserved_bytes

    def admit(self, *, force: bool = False) -> None:
        """Admit the waiting appends that fit. If `force` is true, admit all of them, so that
        `check_room` refuses those that do not fit.
        """
        while self._waiting_appends:
            admission_future, length = next(iter(self._waiting_appends.items()))
            if not (force or self._fits(length)):
                return
            del self._waiting_appends[admission_future]
            self.reserved_bytes += length
            if not admission_future.done():
                admission_future.set_result(None)


log = logging.getLogger("keylane.broker")

RETRY_FULL_MS = 1_000
CONTROL_QUEUED_BYTES_MAX = 1 << 20
"""The extra room in the queue, in bytes, for control records (records without messages). It
prevents fast producers from keeping out fences and seals.
"""
_NOTHING = bytearray()
T = TypeVar("T")
DoneCallback = Callable[[KeylaneError | None], object]
"""A callback that is called once with the outcome of a record: None if it is durable, otherwise the
error for the caller.
"""
_Write = Callable[[WritePlan, list[tuple[int, Unit]]], bool]
"""A function that makes a plan durable and adds its units to the index. It returns False if the
plan is durable but there is no disk space for the index.
"""


class RunBlocking(Protocol):
    """Runs blocking code: in a thread in production, and in place in a simulation."""

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> Awaitable[Any]:
        """Return an awaitable whose result is that of `function(*args)`."""
        ...


class Entry:
    """A record to be written; `count` is its number of messages. An entry without bytes is a
    marker: its callback is called after all earlier records are durable.
    """

    __slots__ = (
        "appended_at_ms",
        "base_offset",
        "count",
        "is_control",
        "on_done",
        "on_durable",
        "partition_id",
        "position",
        "record",
        "size_bytes",
        "stamped_header",
        "undo",
    )

    def __init__(
        self,
        record: Buffer,
        *,
        partition_id: int = 0,
        base_offset: int = 0,
        count: int = 0,
        appended_at_ms: int = 0,
        is_control: bool | None = None,
        on_durable: Callable[[Entry], None] | None = None,
        undo: Callable[[], object] | None = None,
    ) -> None:
        """
        Args:
            is_control: True if the record is written with the next commit, however large that is.
                None: if it has no messages.
        """
        self.record = record
        self.size_bytes = len(record)
        self.partition_id = partition_id
        self.base_offset = base_offset
        self.count = count
        self.appended_at_ms = appended_at_ms
        self.is_control = not count if is_control is None else is_control
        self.position = -1
        """The record's position in the log, once it is part of a commit."""
        self.stamped_header: bytearray = _NOTHING
        """The record's header as written to the log, once it is part of a commit."""
        self.on_durable = on_durable
        """A function that is called when the record is durable, before `on_done`."""
        self.undo = undo
        """A function that undoes the decision, called if the record cannot be made durable."""
        self.on_done: DoneCallback | None = None
        """The callback for the record's outcome."""


class _Commit:
    """Records that become durable together."""

    __slots__ = ("callbacks", "entries", "plan", "units")

    def __init__(self, plan: WritePlan) -> None:
        self.plan = plan
        self.entries: list[Entry] = []
        self.units: list[tuple[int, Unit]] = []
        """The index units of its batches."""
        self.callbacks: list[DoneCallback] = []
        """The callbacks for its deferred records."""


class _DeferredRecord:
    """A record that is built when a commit is filled, and the callbacks for its outcome."""

    __slots__ = ("callbacks", "make_entry")

    def __init__(self, make_entry: Callable[[], Entry]) -> None:
        self.make_entry = make_entry
        self.callbacks: list[DoneCallback] = []


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
        broker_group: str = "",
    ) -> None:
        """
        Args:
            quick: makes small commits durable without `run_blocking`. None disables this.
            broker_group: the broker's name in error messages.
        """
        self._broker_group = broker_group
        self._quick = quick
        self._log = log
        self._queues = queues
        self._run_blocking = run_blocking
        self._clock = clock
        self._boot_ns = clock.boot_ns
        self._queued_bytes_max = queued_bytes_max
        self._commit_bytes_max = commit_bytes_max
        self._queue: deque[Entry] = deque()
        self.queued_bytes = 0
        """The number of bytes in the queue and in the commit that is being written."""
        self._durations = durations or Histogram()
        self._queued_controls = 0
        """The number of control records in the queue."""
        self._deferred_records: dict[Hashable, _DeferredRecord] = {}
        self._must_begin_segment = False
        """True if the next commit must begin a segment."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The store's event loop, once a record has been submitted."""
        self._running = False
        """True if a commit is in progress or scheduled."""
        self._had_several = False
        """True if the last commit had more than one record."""
        self._idle: asyncio.Future[None] | None = None
        """A future that `close` waits for; resolved when no commit is in progress."""
        self._failure: KeylaneError | None = None
        self._free_bytes = free_bytes
        self._disk_full_until_ms = 0
        self._rejected_bytes = 0
        """The size of the last commit that did not fit on the disk."""
        self._refusal = ""
        self._admission = AdmissionQueue(WAITING_MAX, self._has_room)
        self.commits = 0
        """The number of durable commits since the broker started."""
        self.failures = 0
        """The number of failed commits, whose decisions were undone."""
        self.on_commit: list[Callable[[], None]] = []
        """Functions that are called after each durable commit."""
        self.copy_wait = CopyWait(self._boot_ns)
        """The wait of the commit that is synced here for copies of the log."""
        self._is_held = False
        """True while no further commit may begin."""
        self._held = asyncio.Event()
        """Set while none is in progress for that reason; `_running` is true then as well."""

    @property
    def has_failed(self) -> bool:
        """True after a write or sync has failed. Nothing more is written to the log."""
        return self._failure is not None

    @property
    def refusal_reason(self) -> str:
        """The reason why messages are refused; "" if they are accepted."""
        if self._failure is not None:
            return self._failure.message
        if self._refusal:
            return self._refusal
        if self._disk_full_until_ms:
            now_ms = self._clock.boot_ms()
            if now_ms >= self._disk_full_until_ms and not self._has_free_space():
                self._disk_full_until_ms = now_ms + RETRY_FULL_MS
            if now_ms < self._disk_full_until_ms:
                return "the disk is full"
        return ""

    def _has_free_space(self) -> bool:
        try:
            return self._free_bytes() >= self._rejected_bytes
        except StorageError:
            return False

    def refuse_messages(self, reason: str) -> None:
        """Refuse messages for this reason, but continue to accept fences, seals and acks. With "",
        messages are accepted again.
        """
        self._refusal = reason

    def _has_room(self, length: int) -> bool:
        used = self.queued_bytes + self._admission.reserved_bytes
        return used + length <= self._queued_bytes_max or not used

    def has_room_now(self, length: int) -> bool:
        """Return True if an append of `length` bytes does not have to wait for room. The caller may
        then decide on it with `is_admitted=True`.
        """
        used_bytes = self.queued_bytes
        fits = used_bytes + length <= self._queued_bytes_max or not used_bytes
        return (fits and self._admission.empty) or bool(
            self.refusal_reason
        )  # `check_room` raises it

    def admission(self, length: int) -> AbstractAsyncContextManager[None]:
        """Wait for room for an append of `length` bytes. The block must decide on it with
        `is_admitted=True`.
        """
        if self.has_room_now(length):
            return nullcontext()
        return self._admission.admission(length)

    def check_room(
        self, length: int, *, is_control: bool = False, is_admitted: bool = False
    ) -> None:
        """
        Check that a record of `length` bytes may be submitted, before deciding on it.

        Args:
            is_control: True for a control record, which has no messages. It may use the extra room,
                and is accepted while only messages are refused.
            is_admitted: True if the caller has waited for room with `admission`.

        Raises:
            BrokerReadOnlyError: a write has failed, the disk is full, or messages are refused.
            OverloadedError: the queue is full.
        """
        if self._failure is not None or self._refusal or self._disk_full_until_ms:
            reason = self.refusal_reason
            if reason and not (is_control and reason is self._refusal):
                raise self._read_only_error(reason)
        if is_admitted:
            return
        limit_bytes = self._queued_bytes_max + (CONTROL_QUEUED_BYTES_MAX if is_control else 0)
        used_bytes = self.queued_bytes + (0 if is_control else self._admission.reserved_bytes)
        if used_bytes + length > limit_bytes and used_bytes:
            raise OverloadedError(f"{self.queued_bytes} bytes wait for the disk", retry_after_ms=10)

    def check_accepts_messages(self) -> None:
        """Raise BrokerReadOnlyError if messages are refused for any reason."""
        if reason := self.refusal_reason:
            raise self._read_only_error(reason)

    @property
    def _broker_name(self) -> str:
        return f"broker group {self._broker_group!r}" if self._broker_group else "the broker"

    def _read_only_error(self, reason: str) -> BrokerReadOnlyError:
        text = f"{self._broker_name} takes no writes: {reason}"
        return BrokerReadOnlyError(text, broker_group=self._broker_group)

    def submit(self, entry: Entry) -> asyncio.Future[None]:
        """Queue a record like `add`. Return a future that is resolved when the record is
        durable.
        """
        future, _ = self.call_with_future(partial(self.add, entry))
        return future

    def add(self, entry: Entry, on_done: DoneCallback) -> None:
        """Queue a record for which `check_room` was called. `on_done` is called when the record is
        durable or has failed.
        """
        entry.on_done = on_done
        size = entry.size_bytes
        self._queue.append(entry)
        self.queued_bytes += size
        if size and entry.is_control:
            self._queued_controls += 1
        if not self._running:
            self._schedule()

    def add_deferred(
        self, key: Hashable, make_entry: Callable[[], Entry], on_done: DoneCallback
    ) -> None:
        """Make the next commit call `make_entry` and write the record that it returns, unless the
        record is empty. Calls with the same key share a record.
        """
        deferred_record = self._deferred_records.get(key)
        if deferred_record is None:
            deferred_record = self._deferred_records[key] = _DeferredRecord(make_entry)
        deferred_record.callbacks.append(on_done)
        if not self._running:
            self._schedule()

    def begin_segment(self) -> asyncio.Future[None]:
        """Begin a segment, even if there is no record to write. Return a future that is resolved
        when this is durable.
        """
        self._must_begin_segment = True
        return self.submit(Entry(b""))

    async def hold(self) -> None:
        """Begin no further commit until `release` or `refuse` is called, and wait for the one in
        progress. Records that are submitted wait.
        """
        self._is_held = True
        if not self._running:
            self._running = True
            self._held.set()
        await self._held.wait()

    def release(self) -> None:
        """Go on after a `hold`, which may have been cancelled."""
        self._is_held = False
        if self._held.is_set():
            self._held.clear()
            self._start_next_commit()

    def refuse(self, error: KeylaneError) -> None:
        """Let the records that wait since a `hold` fail with an error that says that nothing was
        done, and store nothing more.
        """
        assert self._held.is_set()
        self._is_held = False
        self._held.clear()
        self._failure = error
        for callback in self._undo_all([]):
            _notify(callback, error.copy())
        self._admission.admit(force=True)
        self._stop_committing()

    def wait_flushed(self) -> asyncio.Future[None]:
        """Return a future that is resolved when all submitted records are durable. It fails if
        their commit fails.
        """
        if self._running:
            return self.submit(Entry(b""))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    def call_when_flushed(self, on_done: DoneCallback) -> None:
        """Call `on_done` when all submitted records are durable or have failed, but not before this
        method returns.
        """
        if self._running:
            self.add(Entry(b""), on_done)
        else:
            at_end(partial(on_done, None), self._loop or self._find_loop())

    def call_with_future(
        self, begin: Callable[[DoneCallback], T]
    ) -> tuple[asyncio.Future[None], T]:
        """Call `begin` with a callback that resolves a future. Return the future, and the result of
        `begin`.
        """
        future: asyncio.Future[None] = (self._loop or self._find_loop()).create_future()
        return future, begin(partial(_resolve, future))

    def _find_loop(self) -> asyncio.AbstractEventLoop:
        # Cache the loop, because Python 3.11 asks the kernel for the process id on each call.
        self._loop = asyncio.get_running_loop()
        return self._loop

    def _schedule(self) -> None:
        """Schedule a commit. If the last one had several records, wait for the next iteration of
        the event loop, because more records may arrive in this one.
        """
        self._running = True
        loop = self._loop or self._find_loop()
        if self._had_several:
            loop.call_soon(self._start_next_commit)
        else:
            at_end(self._start_next_commit, loop)

    def _start_next_commit(self) -> None:
        """Start the next commit, or stop if no records are waiting."""
        if self._is_held:
            self._held.set()
            return
        try:
            while self._queue or self._deferred_records:
                if self._failure is not None:  # `check_room` is not called for deferred records
                    self._reject_all(self._undo_all([]), self._failure)
                    break
                commit = _Commit(self._log.plan())
                try:
                    self._fill_commit(commit)
                    if commit.plan.end > commit.plan.start or len(commit.plan.chunks) > 1:
                        self._start_write(commit)
                        return
                except Exception as error:  # noqa: BLE001 - any error fails the commit
                    self._fail_commit(error, commit)
                else:
                    self._complete_commit(commit)
        except BaseException:
            self._stop_committing()  # the next submission schedules a commit again
            raise
        self._stop_committing()

    def _stop_committing(self) -> None:
        self._running = False
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    def _fill_commit(self, commit: _Commit) -> None:
        """Move entries from the queue to a commit, and build its deferred records."""
        plan, entries, queue = commit.plan, commit.entries, self._queue
        remaining_bytes = self._commit_bytes_max
        if self._must_begin_segment:
            self._must_begin_segment = False
            plan.begin_segment()
        while queue and (remaining_bytes > 0 or self._queued_controls or not queue[0].record):
            entry = queue.popleft()
            entries.append(entry)
            length = entry.size_bytes
            if not length:
                continue
            remaining_bytes -= length
            entry.position, entry.stamped_header = plan.add(
                entry.record, base_offset=entry.base_offset, appended_at_ms=entry.appended_at_ms
            )
            if entry.count:
                unit = Unit(
                    entry.base_offset, entry.count, entry.position, length, entry.appended_at_ms
                )
                commit.units.append((entry.partition_id, unit))
            elif entry.is_control:
                self._queued_controls -= 1
        while self._deferred_records:
            key = next(iter(self._deferred_records))
            deferred_record = self._deferred_records[key]
            entry = deferred_record.make_entry()
            del self._deferred_records[key]
            if entry.record:
                entry.position, entry.stamped_header = plan.add(
                    entry.record, base_offset=entry.base_offset, appended_at_ms=entry.appended_at_ms
                )
                self.queued_bytes += entry.size_bytes
            entries.append(entry)
            commit.callbacks += deferred_record.callbacks
        self._had_several = len(entries) > 1

    def _start_write(self, commit: _Commit) -> None:
        """Start to make a commit durable. No thread is used if the commit is small and nothing else
        is being written.
        """
        quick, plan = self._quick, commit.plan
        small = plan.end - plan.start <= SMALL_BYTES_MAX and self._queues.dispatches_in_memory
        if quick is not None and small and quick.is_ready():
            began_ns = self._boot_ns()
            file = quick.write(self._log.begin_write, plan)
            if file is not None:
                if self.copy_wait.copies is not None:
                    self.copy_wait.on_write()
                quick.sync(file, partial(self._on_synced, quick, commit, began_ns))
                return
        if self.copy_wait.copies is None:
            self._finish_in_thread(self._write, commit)
        else:
            end = partial(self._finish_in_thread, self._end_write, commit)
            on_written = partial(
                (self._loop or self._find_loop()).call_soon_threadsafe, self.copy_wait.on_write
            )
            self._run_in_thread(
                partial(self._write_bytes, on_written),
                commit,
                lambda _: self._end_when_copied(commit, end),
            )

    def _on_synced(
        self, quick: QuickSync, commit: _Commit, began_ns: int, failure: Exception | None
    ) -> None:
        """Finish a commit that the kernel has synced, or has failed to sync."""
        if failure is not None:
            self._finish_commit(commit, failure)
            return
        self._durations.observe(self._boot_ns() - began_ns)
        if self.copy_wait.copies is None:
            self._end_synced(quick, commit)
        else:
            self._end_when_copied(commit, partial(self._end_synced, quick, commit))

    def _end_synced(self, quick: QuickSync, commit: _Commit) -> None:
        """Finish a durable commit without a thread, if that is possible now."""
        if not (quick.is_ready() and self._queues.dispatches_in_memory):
            self._finish_in_thread(self._end_write, commit)
            return
        failure: Exception | None = None
        index_has_space = True
        try:
            index_has_space = quick.write(self._end_write, commit.plan, commit.units)
        except Exception as fault:  # noqa: BLE001 - any error fails the commit
            failure = fault
        self._finish_commit(commit, failure, index_has_space=index_has_space)

    def _end_when_copied(self, commit: _Commit, end: Callable[[], None]) -> None:
        """Call `end` when all copies that count have a commit that is synced here."""
        self.copy_wait.begin(
            commit.plan.end,
            on_copied=end,
            on_given_up=lambda reason: self._finish_commit(commit, FlushFailedError(reason)),
        )

    def _finish_in_thread(self, function: _Write, commit: _Commit) -> None:
        """Write a commit, or the rest of it, in a thread, and finish it."""

        def finish(index_has_space: bool) -> None:
            self._finish_commit(commit, None, index_has_space=index_has_space)

        self._run_in_thread(function, commit, finish)

    def _run_in_thread(
        self, function: _Write, commit: _Commit, on_success: Callable[[bool], None]
    ) -> None:
        """Write a commit, or a part of it, in a thread. A failure finishes the commit."""
        write = asyncio.ensure_future(self._run_blocking(function, commit.plan, commit.units))
        write.add_done_callback(partial(self._on_written, commit, on_success))

    def _on_written(
        self, commit: _Commit, on_success: Callable[[bool], None], write: asyncio.Future[bool]
    ) -> None:
        if write.cancelled():  # the commit may already be durable, or may become so
            self._finish_commit(commit, FlushFailedError("a commit was cancelled"))
        elif (failure := write.exception()) is None:
            on_success(write.result())
        elif isinstance(failure, Exception):  # any other exception terminates the program
            self._finish_commit(commit, failure)

    def _finish_commit(
        self, commit: _Commit, failure: Exception | None, *, index_has_space: bool = True
    ) -> None:
        """Report the outcome of a commit to its callbacks, and start the next commit.
        `index_has_space` is False if the index has no disk space.
        """
        try:
            if failure is not None:
                self._fail_commit(failure, commit)
            else:
                if index_has_space:
                    self._disk_full_until_ms = 0
                else:
                    self._pause_writes(commit.plan)
                self._complete_commit(commit)
        except BaseException:
            self._stop_committing()
            raise
        self._start_next_commit()

    def _write_bytes(
        self, on_written: Callable[[], object], plan: WritePlan, _units: list[tuple[int, Unit]]
    ) -> bool:
        """Write a plan and sync it here, while copies get it: it is durable when all have it."""
        began_ns = self._clock.boot_ns()
        self._log.write_bytes(plan, on_written)
        self._durations.observe(self._clock.boot_ns() - began_ns)
        return True

    def _end_write(self, plan: WritePlan, units: list[tuple[int, Unit]]) -> bool:
        self._log.end_write(plan)
        return self._dispatch_units(units)

    def _write(self, plan: WritePlan, units: list[tuple[int, Unit]]) -> bool:
        """Make a plan durable, and add its units to the index. Return False if there is no disk
        space for the index; the units are then kept in memory, where readers find them.
        """
        began_ns = self._clock.boot_ns()
        self._log.write(plan)
        self._durations.observe(self._clock.boot_ns() - began_ns)
        return self._dispatch_units(units)

    def _dispatch_units(self, units: list[tuple[int, Unit]]) -> bool:
        try:
            self._queues.dispatch(units)
        except DiskFullError:
            return False
        except StorageError as error:
            # The records are durable, so their fate must not be NOT_DONE.
            raise FlushFailedError(error.message, **error.details) from error
        return True

    def _complete_commit(self, commit: _Commit) -> None:
        """Apply and report the records of a durable commit."""
        self.commits += 1
        for entry in commit.entries:
            self.queued_bytes -= entry.size_bytes
            error: KeylaneError | None = None
            try:
                if entry.on_durable is not None:
                    entry.on_durable(entry)
            except Exception as failure:
                log.exception("a bug: cannot apply a durable record")
                error = _bug_error(failure)
            _notify(entry.on_done, error)
        for callback in commit.callbacks:
            _notify(callback, None)
        if not self._admission.empty:
            self._admission.admit()
        for call in self.on_commit:
            call()

    def _pause_writes(self, plan: WritePlan) -> None:
        """Refuse writes for RETRY_FULL_MS, because the disk was too full for this plan."""
        log.error("the disk is full; writes are refused for %d ms", RETRY_FULL_MS)
        self._rejected_bytes = plan.end - plan.start
        self._disk_full_until_ms = self._clock.boot_ms() + RETRY_FULL_MS

    def _fail_commit(self, failure: Exception, commit: _Commit) -> None:
        """Undo a commit and all queued records, and report the failure to their callers."""
        if isinstance(failure, StorageError):
            error = failure
        else:
            log.error("the commit failed", exc_info=failure)
            error = _bug_error(failure)
        self.failures += 1
        if isinstance(error, DiskFullError):
            self._pause_writes(commit.plan)
        elif self.copy_wait.given_up:
            log.info("the broker stores nothing more: %s", error.message)
            self._failure = error
        else:
            log.critical("the broker refuses writes until it is restarted: %s", error)
            self._failure = error
        queued_callbacks = self._undo_all(commit.entries)
        for callback in (*(entry.on_done for entry in commit.entries), *commit.callbacks):
            _notify(callback, error.copy(message=f"{self._broker_name}: {error.message}"))
        self._reject_all(queued_callbacks, error)

    def _undo_all(self, commit_entries: list[Entry]) -> list[DoneCallback | None]:
        """Undo all queued records, and then those of a commit, newest first. Return the callbacks
        for the queued and deferred records.
        """
        queued_entries = list(self._queue)
        self._queue.clear()
        self._queued_controls = 0
        deferred_callbacks = [
            callback for record in self._deferred_records.values() for callback in record.callbacks
        ]
        self._deferred_records.clear()
        for entry in reversed(commit_entries + queued_entries):
            if entry.undo is not None:
                entry.undo()
        self.queued_bytes = 0
        return [*(entry.on_done for entry in queued_entries), *deferred_callbacks]

    def _reject_all(self, callbacks: list[DoneCallback | None], error: KeylaneError) -> None:
        for callback in callbacks:
            _notify(callback, self._read_only_error(error.message))
        self._admission.admit(force=True)

    async def close(self) -> None:
        """Wait until every submitted record is durable or has failed."""
        while self._running:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle])


def _notify(callback: DoneCallback | None, error: KeylaneError | None) -> None:
    """Report the outcome of a record to its callback, if there is one. An exception in the callback
    is only logged, because the other records of the commit must be reported as well.
    """
    try:
        if callback is not None:
            callback(error)
    except Exception:
        log.exception("a bug in a callback of a commit")


def _resolve(future: asyncio.Future[None], error: KeylaneError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # mark it as retrieved, because the caller may have been cancelled


def _bug_error(failure: Exception) -> FlushFailedError:
    return FlushFailedError(f"a bug in the broker: {failure!r}")

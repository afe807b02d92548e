"""Group commit: decided records wait in a queue, and one writer at a time makes them durable with
one sync.

    decide ▶ submit ▶ queue ─┐                                  ┌▶ durable, `ended` called
                             ├▶ take ▶ write, fdatasync, index ─┤
    mark ▶ late records ─────┘                                  └▶ failed: see below

A commit is written by a thread. A small one is written into memory here and synced by the kernel
(`quick_sync`). Either way `_ended` is called and begins the next commit, for which records gather
meanwhile. "Late" records (cursors) are made when a commit is taken: one per key, with everything
that was decided until then. A full commit leaves only messages for the next one, because a late
record must not come before a record that was decided earlier.

Invariants
    `ended` is called, or a future resolved, only after the sync of its record; an error raised
    there affects no other record. After a failure every decision that is not durable is undone,
    newest first. The state is then the durable state. After a failed write or sync nothing is
    written again. The records of that commit fail with UNKNOWN fate, waiting records with NOT_DONE.
    If the disk is full, no record of the commit is kept. The next append after RETRY_FULL_MS tries
    again.

Source: Gray's group commit; PostgreSQL's fsyncgate shows why a failed sync must not be repeated.

Admits appends to the commit queue in the order of their arrival.

    the commit queue has room, and no append waits ─▶ admitted at once
    the commit queue is full                       ─▶ waits; later appends wait after it
    too many wait, or one waits WAIT_MS            ─▶ refused, before anything is decided

Without this order a large append would starve: smaller appends would take all room that becomes
free.

Invariants
    Appends are admitted in the order of arrival, so the appends of a connection are decided in
    their order. Room that is promised to an admitted append is kept until the append is decided.
    The end of each turn admits the next append. A commit does that as well, but a refused or
    repeated append makes none.
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
from .quick_sync import QuickSync

WAITING_MAX = 32
"""The most appends that may wait at a broker; they take 36 MB if each has the largest batch."""
WAIT_MS = 2_000
"""The longest wait of an append, in milliseconds. It is less than a producer's timeout: a refusal
says that the batch was not stored, a timeout does not.
"""


class AdmissionQueue:
    """
    The queue of appends that wait for room in the commit queue.

    Args:
        waiting_max: the number of appends that may wait, each with a batch in memory. Bytes are not
            counted, so a large batch is refused no more often than a small one.
        fits: returns whether the commit queue has room for this number of bytes.
    """

    def __init__(self, waiting_max: int, fits: Callable[[int], bool]) -> None:
        self._waiting_max = waiting_max
        self._fits = fits
        self._waiting: OrderedDict[asyncio.Future[None], int] = OrderedDict()
        """Waiting append → its bytes, in the order of arrival."""
        self.empty = True
        """True if no append waits or is being decided: one that fits is admitted at once."""
        self.promised_bytes = 0
        """Bytes of the appends that are admitted and not decided yet."""

    @property
    def waiting(self) -> int:
        """The number of waiting appends."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, length: int) -> AsyncIterator[None]:
        """
        Wait until an append of `length` bytes is admitted; the block then decides on it without
        another await.

        The end of the block admits the next append.

        Raises:
            OverloadedError: too many appends wait, or this one has waited WAIT_MS.
        """
        if len(self._waiting) >= self._waiting_max:
            raise OverloadedError("too many appends wait for the disk", limit=self._waiting_max)
        ours: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[ours] = length
        self.empty = False
        try:
            async with asyncio.timeout(WAIT_MS / 1000):
                await ours
        except BaseException as error:
            self._leave(ours, length)
            self.admit()
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"the append waited {WAIT_MS} ms for the disk", retry_after_ms=10
                ) from None
            raise
        self._leave(ours, length)
        try:
            yield
        finally:
            self.admit()

    def _leave(self, ours: asyncio.Future[None], length: int) -> None:
        if self._waiting.pop(ours, None) is None:
            self.promised_bytes -= length
        self.empty = not self._waiting and not self.promised_bytes

    def admit(self, *, all_of_them: bool = False) -> None:
        """Admit the waiting appends that fit. With `all_of_them`, admit every append; each is then
        refused.
        """
        while self._waiting:
            ours, length = next(iter(self._waiting.items()))
            if not (all_of_them or self._fits(length)):
                return
            del self._waiting[ours]
            self.promised_bytes += length
            if not ours.done():
                ours.set_result(None)


log = logging.getLogger("keylane.broker")

RETRY_FULL_MS = 1_000
OWN_QUEUED_BYTES_MAX = 1 << 20
"""The extra room in the queue, in bytes, for records that are not messages, so that fast producers
cannot keep out fences and seals.
"""
_NOTHING = bytearray()
T = TypeVar("T")
Ended = Callable[[KeylaneError | None], object]
"""A function that is called once with the outcome of a record: None if it is durable, otherwise the
error for the caller who waits.
"""
_Work = Callable[[WritePlan, list[tuple[int, Unit]]], bool]
"""Writes a commit or a part of it, and its units for the index. It returns False if only the index
is full.
"""


class RunBlocking(Protocol):
    """Runs blocking code: in a thread in production, in place in a simulation."""

    def __call__(self, function: Callable[..., Any], /, *args: Any) -> Awaitable[Any]:
        """Return the value of `function(*args)`, or raise its exception."""
        ...


class Entry:
    """A record that is to be written. `count` is 0 if it has no messages. A marker has no bytes,
    only an `ended` that waits for it.
    """

    __slots__ = (
        "appended_at_ms",
        "base_offset",
        "count",
        "ended",
        "partition_id",
        "position",
        "record",
        "on_durable",
        "size_bytes",
        "stamped",
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
        on_durable: Callable[[Entry], None] | None = None,
        undo: Callable[[], object] | None = None,
    ) -> None:
        self.record = record
        self.size_bytes = len(record)
        self.partition_id = partition_id
        self.base_offset = base_offset
        self.count = count
        self.appended_at_ms = appended_at_ms
        self.position = -1
        """The position in the log, once a commit has taken the record."""
        self.stamped: bytearray = _NOTHING
        """The header as it is in the log, once a commit has taken the record."""
        self.on_durable = on_durable
        """A function that is called when the record is durable, before `ended`."""
        self.undo = undo
        """A function that undoes the decision; it is called if the record cannot be made durable.
        """
        self.ended: Ended | None = None
        """The function that waits for the record's outcome."""


class _Commit:
    """Records that become durable together."""

    __slots__ = ("entries", "plan", "units", "waiting")

    def __init__(self, plan: WritePlan) -> None:
        self.plan = plan
        self.entries: list[Entry] = []
        self.units: list[tuple[int, Unit]] = []
        """The units of its messages, for the index."""
        self.waiting: list[Ended] = []
        """The functions that wait for its late records."""


class _Late:
    __slots__ = ("make", "waiting")

    def __init__(self, make: Callable[[], Entry]) -> None:
        self.make = make
        self.waiting: list[Ended] = []


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
            quick: makes small commits durable without `run_blocking`.
            broker_group: the name that refusals give.
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
        """Bytes in the queue and in the commit that is being written."""
        self._durations = durations or Histogram()
        self._own = 0
        """The number of records in the queue that are not messages."""
        self._late: dict[Hashable, _Late] = {}
        self._rolls = False
        """True if the next commit begins a segment."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the store, once something was submitted."""
        self._running = False
        """True if a commit is under way or about to begin."""
        self._shared = False
        """True if the last commit had more than one record."""
        self._idle: asyncio.Future[None] | None = None
        """A future that `close` waits for."""
        self._failure: KeylaneError | None = None
        self._free_bytes = free_bytes
        self._full_until_ms = 0
        self._full_bytes = 0
        """Bytes of the commit that did not fit on the disk."""
        self._refusal = ""
        self._admission = AdmissionQueue(WAITING_MAX, self._has_room)
        self.commits = 0
        """The number of durable commits since the start."""
        self.failures = 0
        """The number of commits whose decisions were undone."""
        self.on_commit: Callable[[], None] = lambda: None
        """A function that is called after each durable commit."""

    @property
    def failed(self) -> bool:
        """True after a failed write or sync: the log is not written again."""
        return self._failure is not None

    @property
    def reason(self) -> str:
        """Why writes are refused; "" if they are accepted."""
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
        """Refuse messages for this reason; "" accepts them again. Fences, seals and acks are still
        written.
        """
        self._refusal = reason

    def _has_room(self, length: int) -> bool:
        taken = self.queued_bytes + self._admission.promised_bytes
        return taken + length <= self._queued_bytes_max or not taken

    def takes_now(self, length: int) -> bool:
        """Return True if messages of `length` bytes need not wait for room. The caller then decides
        on them with `in_turn=True`.
        """
        taken = self.queued_bytes
        fits = taken + length <= self._queued_bytes_max or not taken
        return (fits and self._admission.empty) or bool(self.reason)  # `check_room` raises it

    def turn(self, length: int) -> AbstractAsyncContextManager[None]:
        """Wait for room for messages of `length` bytes; the block decides on them with
        `in_turn=True`.
        """
        if self.takes_now(length):
            return nullcontext()
        return self._admission.turn(length)

    def check_room(self, length: int, *, own: bool = False, in_turn: bool = False) -> None:
        """
        Check that a record of `length` bytes may be decided on.

        Args:
            own: the record has no messages. It has extra room, and is accepted while messages are
                refused.
            in_turn: the caller has waited for room with `turn`.

        Raises:
            BrokerReadOnlyError: a write has failed, the disk is full, or messages are refused.
            OverloadedError: the queue is full.
        """
        if self._failure is not None or self._refusal or self._full_until_ms:
            reason = self.reason
            if reason and not (own and reason is self._refusal):
                raise self._read_only(reason)
        if in_turn:
            return
        most = self._queued_bytes_max + (OWN_QUEUED_BYTES_MAX if own else 0)
        taken = self.queued_bytes + (0 if own else self._admission.promised_bytes)
        if taken + length > most and taken:
            raise OverloadedError(f"{self.queued_bytes} bytes wait for the disk", retry_after_ms=10)

    def check_takes_messages(self) -> None:
        """Raise BrokerReadOnlyError if a write has failed, the disk is full, or messages are
        refused.
        """
        if reason := self.reason:
            raise self._read_only(reason)

    @property
    def _who(self) -> str:
        return f"broker group {self._broker_group!r}" if self._broker_group else "the broker"

    def _read_only(self, reason: str) -> BrokerReadOnlyError:
        text = f"{self._who} takes no writes: {reason}"
        return BrokerReadOnlyError(text, broker_group=self._broker_group)

    def submit(self, entry: Entry) -> asyncio.Future[None]:
        """Queue a record like `add`, and return a future that is resolved when the record is
        durable.
        """
        future, _ = self.waited_for(partial(self.add, entry))
        return future

    def add(self, entry: Entry, ended: Ended) -> None:
        """Queue a record, after `check_room`; `ended` is called once the record is durable or has
        failed.
        """
        entry.ended = ended
        size = entry.size_bytes
        self._queue.append(entry)
        self.queued_bytes += size
        if size and not entry.count:
            self._own += 1
        if not self._running:
            self._start()

    def add_late(self, key: Hashable, make: Callable[[], Entry], ended: Ended) -> None:
        """Let the next commit call `make` and write its record, if that has bytes. Calls with the
        same key share a record.
        """
        late = self._late.get(key)
        if late is None:
            late = self._late[key] = _Late(make)
        late.waiting.append(ended)
        if not self._running:
            self._start()

    def roll(self) -> asyncio.Future[None]:
        """Begin a segment, even if there is no record to write. The future is resolved when that is
        durable.
        """
        self._rolls = True
        return self.submit(Entry(b""))

    def flushed(self) -> asyncio.Future[None]:
        """Return a future that is resolved when all submitted records are durable; it fails if they
        fail.
        """
        if self._running:
            return self.submit(Entry(b""))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    def when_flushed(self, ended: Ended) -> None:
        """Call `ended` when all submitted records are durable or have failed, but not before this
        method returns.
        """
        if self._running:
            self.add(Entry(b""), ended)
        else:
            at_end(partial(ended, None), self._loop or self._find_loop())

    def waited_for(self, begin: Callable[[Ended], T]) -> tuple[asyncio.Future[None], T]:
        """Return a future for the outcome of a record, and the value of `begin`, which is called
        with a function that resolves the future.
        """
        future: asyncio.Future[None] = (self._loop or self._find_loop()).create_future()
        return future, begin(partial(_resolve, future))

    def _find_loop(self) -> asyncio.AbstractEventLoop:
        # The loop is kept, because Python 3.11 asks the kernel for the process's id each time.
        self._loop = asyncio.get_running_loop()
        return self._loop

    def _start(self) -> None:
        """Begin a commit soon. If the last one had more than one record, wait for the end of this
        turn of the loop, because others may arrive in it.
        """
        self._running = True
        loop = self._loop or self._find_loop()
        if self._shared:
            loop.call_soon(self._next)
        else:
            at_end(self._next, loop)

    def _next(self) -> None:
        """Begin the next commit, or stop if there is none."""
        try:
            while self._queue or self._late:
                if self._failure is not None:  # late records are submitted without `check_room`
                    self._refuse_all(self._undo_all([]), self._failure)
                    break
                commit = _Commit(self._log.plan())
                try:
                    self._take(commit)
                    if commit.plan.end > commit.plan.start or len(commit.plan.chunks) > 1:
                        self._begin(commit)
                        return
                except Exception as error:  # noqa: BLE001 - every one fails the commit
                    self._fail(error, commit)
                else:
                    self._note_durable(commit)
        except BaseException:
            self._stop()  # the next submission begins again
            raise
        self._stop()

    def _stop(self) -> None:
        self._running = False
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    def _take(self, commit: _Commit) -> None:
        """Move entries from the queue into a commit."""
        plan, entries, queue = commit.plan, commit.entries, self._queue
        left = self._commit_bytes_max
        if self._rolls:
            self._rolls = False
            plan.roll()
        while queue and (left > 0 or self._own or not queue[0].record):
            entry = queue.popleft()
            entries.append(entry)
            length = entry.size_bytes
            if not length:
                continue
            left -= length
            entry.position, entry.stamped = plan.add(
                entry.record, base_offset=entry.base_offset, appended_at_ms=entry.appended_at_ms
            )
            if entry.count:
                unit = Unit(
                    entry.base_offset, entry.count, entry.position, length, entry.appended_at_ms
                )
                commit.units.append((entry.partition_id, unit))
            else:
                self._own -= 1
        while self._late:
            key = next(iter(self._late))
            late = self._late[key]
            entry = late.make()
            del self._late[key]
            if entry.record:
                entry.position, entry.stamped = plan.add(
                    entry.record, base_offset=entry.base_offset, appended_at_ms=entry.appended_at_ms
                )
                self.queued_bytes += entry.size_bytes
            entries.append(entry)
            commit.waiting += late.waiting
        self._shared = len(entries) > 1

    def _begin(self, commit: _Commit) -> None:
        """Begin to make a commit durable. No thread is needed if the commit is small and nothing
        else is being written.
        """
        quick, plan = self._quick, commit.plan
        small = plan.end - plan.start <= SMALL_BYTES_MAX and self._queues.dispatches_in_memory
        if quick is not None and small and quick.is_ready():
            began_ns = self._boot_ns()
            file = quick.write(self._log.begin_write, plan)
            if file is not None:
                quick.sync(file, partial(self._synced, quick, commit, began_ns))
                return
        self._run(self._write, commit)

    def _synced(
        self, quick: QuickSync, commit: _Commit, began_ns: int, failure: Exception | None
    ) -> None:
        """Note that the kernel has synced a commit, or has failed to."""
        fits = True
        if failure is None:
            self._durations.observe(self._boot_ns() - began_ns)
            if not (quick.is_ready() and self._queues.dispatches_in_memory):
                self._run(self._end_write, commit)
                return
            try:
                fits = quick.write(self._end_write, commit.plan, commit.units)
            except Exception as fault:  # noqa: BLE001 - every one fails the commit
                failure = fault
        self._ended(commit, failure, fits=fits)

    def _run(self, function: _Work, commit: _Commit) -> None:
        """Let a thread write a commit, or the rest of it."""
        writing = asyncio.ensure_future(self._run_blocking(function, commit.plan, commit.units))
        writing.add_done_callback(partial(self._written, commit))

    def _written(self, commit: _Commit, writing: asyncio.Future[bool]) -> None:
        if writing.cancelled():  # it may be or become durable
            self._ended(commit, FlushFailedError("a commit was cancelled"))
        elif (failure := writing.exception()) is None:
            self._ended(commit, None, fits=writing.result())
        elif isinstance(failure, Exception):  # any other one ends the program
            self._ended(commit, failure)

    def _ended(self, commit: _Commit, failure: Exception | None, *, fits: bool = True) -> None:
        """Report the outcome of a commit to its waiting functions, and begin the next commit;
        `fits` is False if the index is full.
        """
        try:
            if failure is not None:
                self._fail(failure, commit)
            else:
                if fits:
                    self._full_until_ms = 0
                else:
                    self._full(commit.plan)
                self._note_durable(commit)
        except BaseException:
            self._stop()
            raise
        self._next()

    def _end_write(self, plan: WritePlan, units: list[tuple[int, Unit]]) -> bool:
        self._log.end_write(plan)
        return self._dispatch(units)

    def _write(self, plan: WritePlan, units: list[tuple[int, Unit]]) -> bool:
        """Write a commit. Return False if only the index is full: its units then wait in memory,
        where readers find them.
        """
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

    def _note_durable(self, commit: _Commit) -> None:
        self.commits += 1
        for entry in commit.entries:
            self.queued_bytes -= entry.size_bytes
            error: KeylaneError | None = None
            try:
                if entry.on_durable is not None:
                    entry.on_durable(entry)
            except Exception as failure:
                log.exception("a bug: cannot apply a durable record")
                error = _bug(failure)
            _tell(entry.ended, error)
        for ended in commit.waiting:
            _tell(ended, None)
        if not self._admission.empty:
            self._admission.admit()
        self.on_commit()

    def _full(self, plan: WritePlan) -> None:
        log.error("the disk is full; writing pauses for %d ms", RETRY_FULL_MS)
        self._full_bytes = plan.end - plan.start
        self._full_until_ms = self._clock.boot_ms() + RETRY_FULL_MS

    def _fail(self, failure: Exception, commit: _Commit) -> None:
        """Undo a commit and all records that wait after it."""
        if isinstance(failure, StorageError):
            error = failure
        else:
            log.error("the commit failed", exc_info=failure)
            error = _bug(failure)
        self.failures += 1
        if isinstance(error, DiskFullError):
            self._full(commit.plan)
        else:
            log.critical("the broker refuses writes until it is restarted: %s", error)
            self._failure = error
        waiting = self._undo_all(commit.entries)
        for ended in (*(entry.ended for entry in commit.entries), *commit.waiting):
            _tell(ended, error.copy(message=f"{self._who}: {error.message}"))
        self._refuse_all(waiting, error)

    def _undo_all(self, taken: list[Entry]) -> list[Ended | None]:
        """Undo all waiting records and then those that a commit has `taken`, newest first. Return
        the functions that waited for the waiting records.
        """
        queued = list(self._queue)
        self._queue.clear()
        self._own = 0
        late = [ended for each in self._late.values() for ended in each.waiting]
        self._late.clear()
        for entry in reversed(taken + queued):
            if entry.undo is not None:
                entry.undo()
        self.queued_bytes = 0
        return [*(entry.ended for entry in queued), *late]

    def _refuse_all(self, waiting: list[Ended | None], error: KeylaneError) -> None:
        for ended in waiting:
            _tell(ended, self._read_only(error.message))
        self._admission.admit(all_of_them=True)

    async def close(self) -> None:
        """Wait until every submitted record is durable or has failed."""
        while self._running:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle])


def _tell(ended: Ended | None, error: KeylaneError | None) -> None:
    """Report the outcome of a record to the function that waits for it, if there is one. An error
    there does not keep the other records of the commit from being reported.
    """
    try:
        if ended is not None:
            ended(error)
    except Exception:
        log.exception("a bug in a callback of a commit")


def _resolve(future: asyncio.Future[None], error: KeylaneError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # marks it as retrieved: its caller may have been cancelled


def _bug(failure: Exception) -> FlushFailedError:
    return FlushFailedError(f"a bug in the broker: {failure!r}")

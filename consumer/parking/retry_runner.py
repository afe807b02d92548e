"""Retries messages that were set aside without their keys, when they are due, at the partition's
owner.

    failed ─▶ put: Park under its number of attempts ─▶ durable ─▶ waiting, by due time
        ─▶ read, handed out ─▶ done: Unpark
                            ├─ failed: Shift to the next number ─▶ waiting
                            ╰─ failed too often: Shift to the dead letters

The numbers of attempts are durable, but the due times are not: a new owner retries all messages at
once.

If the previous owner ended without releasing the partition, a message may have killed its process.
For CAREFUL_MS, messages are then handed out one at a time, each after a Shift to its negated
number, which durably records that an attempt has started: if this process dies too, the next owner
makes the message a dead letter.

Invariants
    A message is handed out only while its Park or Shift is durable, and to one handler at a time. A
    drained partition starts no attempts, because its children have adopted the waiting messages, or
    will.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from ...protocol.errors import CorruptBatchError, CorruptLogError, FencedError, KeylaneError
from ...protocol.ids import MAX_I64
from ...protocol.log_filter import LogFilter
from ...protocol.message import Message
from ...protocol.offsets import Range
from ...protocol.parked import RETRIED, Failure, ParkedKeyRow, Shift, crash_failure
from ...protocol.text import counted
from .context import ParkContext
from .park_sender import ParkSender
from .redrive import CONCURRENT_MAX, WINDOW, RedriveDelivery, Redrives
from .retry_schedule import DueTry, RetrySchedule

log = logging.getLogger("keylane.consumer")

RETRIES_MAX = 100_000
"""Pulling the partition stops while this many offset ranges wait for a retry."""
CAREFUL_MS = 30_000
LONG_S = 5.0
"""The longest time to wait for a message while messages are handed out one at a time, in
seconds.
"""


class RetryDelivery(RedriveDelivery):
    """The delivery of messages of one source that are due for a retry."""

    __slots__ = ("retrying",)

    retrying: RetryRunner

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Schedule another retry for a message that failed again."""
        self._reschedule(message, failure, failure.attempts, pause_ms)

    def dead_letter(self, message: Message, failure: Failure) -> None:
        """Make a message that failed too often a dead letter."""
        self._reschedule(message, failure, None, 0)

    def park(self, message: Message, failure: Failure, _waiting: list[Message]) -> None:
        """Make the message a dead letter, as `dead_letter` does; no later message waits for it."""
        self.dead_letter(message, failure)

    def _reschedule(
        self, message: Message, failure: Failure, next_key: int | None, pause_ms: int
    ) -> None:
        self._clear_failures([message.offset])
        assert isinstance(self._key, int)
        self.retrying.reschedule(
            self._key, next_key, self._source, message.offset, failure, pause_ms
        )
        self.unacked -= 1
        self._subtract(1)
        self.client.discard_in_flight(1)


class RetryRunner:
    """Retries the waiting messages of one partition under one grant."""

    def __init__(self, context: ParkContext, sender: ParkSender, redrives: Redrives) -> None:
        self._context = context
        self._client = context.client
        self._sender = sender
        self._redrives = redrives
        self._due = RetrySchedule()
        self._failure_log = LogFilter()
        self._begun = False
        self._careful_until_ns = 0
        self._wake = asyncio.Event()
        self._capacity_freed = asyncio.Event()
        """Set when waiting messages were taken."""
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)
        self._run_task: asyncio.Task[None] | None = None
        self._tries: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """True while a handler may have a message that is being retried."""
        return bool(self._tries)

    @property
    def is_careful(self) -> bool:
        """True while messages are handed out one at a time."""
        return self._client.boot_ns() < self._careful_until_ns

    @property
    def has_capacity(self) -> bool:
        """True if more messages may wait for a retry."""
        return len(self._due) < RETRIES_MAX

    async def wait_for_capacity(self) -> None:
        """Wait while too many messages wait for a retry."""
        while not self.has_capacity:
            self._capacity_freed.clear()
            await self._capacity_freed.wait()

    # ── waiting messages
    # ────────────────────────────────────────────────────────────────────────────────
    async def begin(self, rows: Iterable[ParkedKeyRow], *, careful: bool) -> None:
        """
        Fetch the messages that wait for a retry, all of which are due now.

        Only the first call has an effect, because later messages are added by `put`.

        Args:
            rows: the parked keys of the group.
            careful: True if the previous owner ended without releasing the partition.
        """
        if self._begun:
            return
        parked_rows = [
            (row.key, *parked_row)
            for row in rows
            if isinstance(row.key, int) and row.key != RETRIED
            for parked_row in await self._fetch_rows(row.key)
        ]
        self._begun = True
        if careful and parked_rows:
            self._careful_until_ns = self._client.boot_ns() + CAREFUL_MS * 1_000_000
        for key, source, start, end in parked_rows:
            if key < 0 and careful:
                self._dead_letter_crashed(-key, source, (start, end))
            else:
                self._add(key, source, (start, end), self._client.boot_ns())

    async def _fetch_rows(self, key: int) -> list[tuple[int, int, int]]:
        rows: list[tuple[int, int, int]] = []
        while True:
            page = await self._sender.fetch_first_rows(key, MAX_I64, first=len(rows))
            if not page.rows:
                return rows
            rows += page.rows

    def _dead_letter_crashed(self, attempts: int, source: int, offset_range: Range) -> None:
        log.warning(
            "%s: %s of partition %d, from offset %d on, killed the processes of two owners, and is "
            "parked",
            self._context.log_name,
            counted(offset_range[1] - offset_range[0], "message"),
            source,
            offset_range[0],
        )
        failure = crash_failure("again", at_ms=self._client.wall_ms(), attempts=attempts)
        self._sender.reschedule(
            Shift(-attempts, None, source, (offset_range,), failure), _do_nothing
        )

    def put(self, offset: int, failure: Failure, pause_ms: int) -> None:
        """Park a message of this partition alone, and retry it in `pause_ms`."""
        due_ns = self._client.boot_ns() + pause_ms * 1_000_000
        key, offset_range = failure.attempts, (offset, offset + 1)
        source = self._context.partition_id
        self._sender.park(
            key,
            [offset],
            failure,
            lambda: self._add(key, source, offset_range, due_ns),
            next_try_ms=self._client.wall_ms() + pause_ms,
        )

    def reschedule(
        self,
        key: int,
        next_key: int | None,
        source: int,
        offset: int,
        failure: Failure,
        pause_ms: int,
    ) -> None:
        """Schedule another retry for a failed message, under number `next_key`, or make it a dead
        letter if that is None.
        """
        offset_range = offset, offset + 1
        due_ns = self._client.boot_ns() + pause_ms * 1_000_000

        def add_if_retried() -> None:
            if next_key is not None:
                self._add(next_key, source, offset_range, due_ns)

        self._sender.reschedule(
            Shift(key, next_key, source, (offset_range,), failure),
            add_if_retried,
            next_try_ms=self._client.wall_ms() + pause_ms,
        )

    def _add(self, key: int, source: int, offset_range: Range, due_ns: int) -> None:
        self._due.add(key, source, offset_range, due_ns)
        self._wake.set()
        if self._run_task is None and self._context.owner.allows_redrives:
            self._run_task = self._context.spawn(self._run, "retry")

    # ── due messages
    # ───────────────────────────────────────────────────────────────────────────────
    async def _run(self) -> None:
        while True:
            self._wake.clear()
            next_ns = self._due.next_ns
            delay_ns = None if next_ns is None else next_ns - self._client.boot_ns()
            if delay_ns is None or delay_ns > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if delay_ns is None else delay_ns / 1e9):
                        await self._wake.wait()
                continue
            careful = self.is_careful
            await self._slots.acquire()
            if self._client.acked_to_end:
                self._slots.release()
                return
            alone = self._context.owner.alone
            async with alone.acquire(LONG_S) if careful else contextlib.nullcontext():
                due_try = self._due.take(1 if careful else WINDOW, self._client.boot_ns())
                if due_try is None:
                    self._slots.release()
                    continue
                self._capacity_freed.set()
                task = self._begin_try(due_try, careful=careful)
                if task is None:
                    return
                if careful:
                    await asyncio.wait([task], timeout=LONG_S)

    def _begin_try(self, due_try: DueTry, *, careful: bool) -> asyncio.Task[None] | None:
        async def body() -> None:
            await self._try(due_try, careful=careful)

        task = self._context.spawn(body, "retry of")
        if task is None:
            self._slots.release()
            return None
        self._tries.add(task)
        task.add_done_callback(self._on_try_done)
        return task

    def _on_try_done(self, task: asyncio.Task[None]) -> None:
        self._tries.discard(task)
        self._slots.release()
        self._client.check_drained()

    async def _try(self, due_try: DueTry, *, careful: bool) -> None:
        key, source, ranges, _ = due_try
        attempt = key + 1 if key > 0 else -key
        try:
            if careful and key > 0:
                await self._sender.send_now([Shift(key, -attempt, source, tuple(ranges))])
                key = -attempt
            messages, upto = await self._redrives.read(key, source, ranges, RetryDelivery)
        except FencedError:
            raise
        except KeylaneError as error:
            self._redrives.clear_sources()
            self._context.log_failure(self._failure_log, "messages that wait for retry", error)
            failed_try = due_try._replace(key=key)
            damaged_upto = None
            if isinstance(error, CorruptLogError | CorruptBatchError):
                damaged_upto = error.end_offset
            self._due.requeue_failed(
                failed_try, self._client.boot_ns(), self._context.pause_ns, upto=damaged_upto
            )
            self._wake.set()
            return
        self._due.on_success(source)
        self._context.log_recovery(self._failure_log, "messages that wait for retry")
        self._wake.set()
        if upto == ranges[0][0]:
            await self._context.pause(1)
        self._requeue(key, source, [(max(low, upto), high) for low, high in ranges if high > upto])
        if not messages:
            return
        delivery: RetryDelivery = messages[0].delivery  # type: ignore[assignment]
        delivery.retrying = self
        for message in messages:
            message.attempt = attempt
        self._client.hand_out(messages)
        await delivery.ended

    def _requeue(self, key: int, source: int, ranges: Iterable[Range]) -> None:
        for offset_range in ranges:
            self._add(key, source, offset_range, self._client.boot_ns())


def _do_nothing() -> None:
    pass

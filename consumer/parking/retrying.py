"""Handles messages that were set aside for retry again when they are due, each separately, at the
owner of their partition.

    failed ─▶ put: Park under the number of its tries ─▶ durable ─▶ waiting, by due time
        ─▶ read, handed out ─▶ done: Unpark
                            ├─ failed: Shift to the next number ─▶ waiting
                            ╰─ failed too often: Shift to the dead letters

The tries are durable, but the due times are not: after a change of the owner everything is due at
once.

After the end of an owner that did not release, a message may have ended its process. Then for
CAREFUL_MS one message at a time is handed out, and before it a Shift to a negative number records
durably that its try has begun: if this process ends too, the next owner makes it a dead letter.

Invariants
    A message is handed out only while its Park or Shift is durable, and once at a time.
    A drained partition begins no try: its children have, or will have, the waiting messages.
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
from ...protocol.parked import RETRIED, Failure, ParkedKeyRow, Shift, crash_of
from ...protocol.text import counted
from .context import ParkContext
from .due_tries import DueTries, DueTry
from .park_sender import ParkSender
from .redrive import AT_ONCE_MAX, WINDOW, RedriveDelivery, Redrives

log = logging.getLogger("keylane.consumer")

RETRIES_MAX = 100_000
"""The number of ranges of offsets that wait for retry on a partition at which nothing more of it is
pulled.
"""
CAREFUL_MS = 30_000
LONG_S = 5.0
"""Seconds for which the careful part waits for a message."""


class RetryDelivery(RedriveDelivery):
    """Messages of one source whose next try is due."""

    __slots__ = ("retrying",)

    retrying: Retrying

    def retry(self, message: Message, failure: Failure, pause_ms: int) -> None:
        """Let a message that failed again wait for another retry."""
        self._failed_again(message, failure, failure.attempts, pause_ms)

    def bury(self, message: Message, failure: Failure) -> None:
        """Make a message that failed too often a dead letter."""
        self._failed_again(message, failure, None, 0)

    def park(self, message: Message, failure: Failure, _waiting: list[Message]) -> None:
        """Make the message a dead letter, as `bury` does: it holds nothing back."""
        self.bury(message, failure)

    def _failed_again(
        self, message: Message, failure: Failure, to: int | None, pause_ms: int
    ) -> None:
        self._fails_no_more([message.offset])
        assert isinstance(self._key, int)
        self.retrying.shift(self._key, to, self._source, message.offset, failure, pause_ms)
        self.unsaved -= 1
        self._take(1)
        self.client.forget(1)


class Retrying:
    """The messages that wait for retry on one partition under one grant."""

    def __init__(self, context: ParkContext, sender: ParkSender, redrives: Redrives) -> None:
        self._context = context
        self._client = context.client
        self._sender = sender
        self._redrives = redrives
        self._due = DueTries()
        self._troubles = LogFilter()
        self._begun = False
        self._careful_until_ns = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        """The event that is set when something was taken."""
        self._turns = asyncio.Semaphore(AT_ONCE_MAX)
        self._running: asyncio.Task[None] | None = None
        self._tries: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Return True while some message may be with a handler."""
        return bool(self._tries)

    @property
    def is_careful(self) -> bool:
        """Return True while one message at a time is handed out."""
        return self._client.boot_ns() < self._careful_until_ns

    @property
    def has_room(self) -> bool:
        """Return True if more messages may wait for retry."""
        return len(self._due) < RETRIES_MAX

    async def wait_for_room(self) -> None:
        """Wait while too many messages wait for retry."""
        while not self.has_room:
            self._room.clear()
            await self._room.wait()

    # ── what waits ────────────────────────────────────────────────────────────────────────────────
    async def begin(self, rows: Iterable[ParkedKeyRow], *, careful: bool) -> None:
        """
        Fetch the messages that wait for retry: all are due.

        Only the first call has an effect, even if nothing was parked then, because later ones were
        put here.

        Args:
            rows: the keys that the group has parked.
            careful: whether the previous owner ended without a release.
        """
        if self._begun:
            return
        places = [
            (row.key, *place)
            for row in rows
            if isinstance(row.key, int) and row.key != RETRIED
            for place in await self._places(row.key)
        ]
        self._begun = True
        if careful and places:
            self._careful_until_ns = self._client.boot_ns() + CAREFUL_MS * 1_000_000
        for key, source, start, end in places:
            if key < 0 and careful:
                self._bury_crashed(-key, source, (start, end))
            else:
                self._add(key, source, (start, end), self._client.boot_ns())

    async def _places(self, key: int) -> list[tuple[int, int, int]]:
        places: list[tuple[int, int, int]] = []
        while True:
            page = await self._sender.first_rows(key, MAX_I64, first=len(places))
            if not page.rows:
                return places
            places += page.rows

    def _bury_crashed(self, attempts: int, source: int, part: Range) -> None:
        log.warning(
            "%s: %s of partition %d, from offset %d on, ended the processes of two "
            "consumers, and is parked",
            self._context.log_name,
            counted(part[1] - part[0], "message"),
            source,
            part[0],
        )
        failure = crash_of("again", at_ms=self._client.wall_ms(), attempts=attempts)
        self._sender.shift(Shift(-attempts, None, source, (part,), failure), _nothing)

    def put(self, offset: int, failure: Failure, pause_ms: int) -> None:
        """Set a message of the partition itself aside, and let it be handled again in
        `pause_ms`.
        """
        due_ns = self._client.boot_ns() + pause_ms * 1_000_000
        key, part = failure.attempts, (offset, offset + 1)
        own = self._context.partition_id
        self._sender.park(
            *(key, [offset], failure, lambda: self._add(key, own, part, due_ns)),
            next_try_ms=self._client.wall_ms() + pause_ms,
        )

    def shift(
        self,
        key: int,
        to: int | None,
        source: int,
        offset: int,
        failure: Failure,
        pause_ms: int,
    ) -> None:
        """Let a message that failed wait for another retry, or make it a dead letter if `to` is
        None.
        """
        part = offset, offset + 1
        due_ns = self._client.boot_ns() + pause_ms * 1_000_000

        def confirmed() -> None:
            if to is not None:
                self._add(to, source, part, due_ns)

        self._sender.shift(
            Shift(key, to, source, (part,), failure),
            confirmed,
            next_try_ms=self._client.wall_ms() + pause_ms,
        )

    def _add(self, key: int, source: int, part: Range, due_ns: int) -> None:
        self._due.add(key, source, part, due_ns)
        self._changed.set()
        if self._running is None and self._context.owner.redrives:
            self._running = self._context.spawn(self._run, "retry")

    # ── what is due ───────────────────────────────────────────────────────────────────────────────
    async def _run(self) -> None:
        while True:
            self._changed.clear()
            next_ns = self._due.next_ns
            left_ns = None if next_ns is None else next_ns - self._client.boot_ns()
            if left_ns is None or left_ns > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if left_ns is None else left_ns / 1e9):
                        await self._changed.wait()
                continue
            careful = self.is_careful
            await self._turns.acquire()
            if self._client.acked_to_end:
                self._turns.release()
                return
            alone = self._context.owner.alone
            async with alone.taken(LONG_S) if careful else contextlib.nullcontext():
                taken = self._due.take(1 if careful else WINDOW, self._client.boot_ns())
                if taken is None:
                    self._turns.release()
                    continue
                self._room.set()
                task = self._begin_try(taken, careful=careful)
                if task is None:
                    return
                if careful:
                    await asyncio.wait([task], timeout=LONG_S)

    def _begin_try(self, taken: DueTry, *, careful: bool) -> asyncio.Task[None] | None:
        async def body() -> None:
            await self._try(taken, careful=careful)

        task = self._context.spawn(body, "retry of")
        if task is None:
            self._turns.release()
            return None
        self._tries.add(task)
        task.add_done_callback(self._tried)
        return task

    def _tried(self, task: asyncio.Task[None]) -> None:
        self._tries.discard(task)
        self._turns.release()
        self._client.settled()

    async def _try(self, taken: DueTry, *, careful: bool) -> None:
        key, source, ranges, _ = taken
        attempt = key + 1 if key > 0 else -key
        try:
            if careful and key > 0:
                await self._sender.send_now([Shift(key, -attempt, source, tuple(ranges))])
                key = -attempt
            messages, upto = await self._redrives.read(key, source, ranges, RetryDelivery)
        except FencedError:
            raise
        except KeylaneError as error:
            self._redrives.forget_sources()
            self._context.log_failure(self._troubles, "messages that wait for retry", error)
            again = taken._replace(key=key)
            damaged_upto = None
            if isinstance(error, CorruptLogError | CorruptBatchError):
                damaged_upto = error.end_offset
            self._due.failed(
                again, self._client.boot_ns(), self._context.pause_ns, upto=damaged_upto
            )
            self._changed.set()
            return
        self._due.answered(source)
        self._context.log_recovery(self._troubles, "messages that wait for retry")
        self._changed.set()
        if upto == ranges[0][0]:
            await self._context.pause(1)
        self._put_back(key, source, [(max(low, upto), high) for low, high in ranges if high > upto])
        if not messages:
            return
        delivery: RetryDelivery = messages[0].delivery  # type: ignore[assignment]
        delivery.retrying = self
        for message in messages:
            message.attempt = attempt
        self._client.hand_out(messages)
        await delivery.ended

    def _put_back(self, key: int, source: int, ranges: Iterable[Range]) -> None:
        for part in ranges:
            self._add(key, source, part, self._client.boot_ns())


def _nothing() -> None:
    pass

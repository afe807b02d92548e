"""Keeps scheduled messages durably, and stores each in its subject at its time. It runs on one
event loop.

    schedule, cancel ─▶ journal ─▶ schedule_index ──time──▶ "taken" in the journal
        ─▶ the subject ─▶ "delivered" in the journal

All records that wait for the disk are written as one frame with one sync. A delivery is a batch of
due messages of one subject. Its idempotency key is durable before it is stored, so a repeated
delivery after a crash is stored once.

Times are those of the calendar. If the calendar is set forward a little, that is noticed within
POLL_MS. If it is set forward by hours, it is not trusted at once (`../wall_clock.py`). If it is set
back, messages that are no longer due are delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...protocol.backoff import Backoff, Pauses
from ...protocol.clock import Clock
from ...protocol.errors import (
    Fate,
    KeylaneError,
    MessageTooLargeError,
    StorageError,
    SubjectDeletedError,
)
from ...protocol.http.posted import PostedMessage
from ...protocol.scheduled.receipt import CancelOutcome
from ...protocol.text import LISTED_MAX, counted, listed
from ...rpc.race import shield
from ..standing import Standing
from ..storage.files import Files
from ..store.group_commit import RunBlocking
from ..wall_clock import WallClock
from .journal import SEGMENT_BYTES, JournalWriter, ScheduledJournal
from .records import Canceled, Delivered, DroppedMessages, Place, Record, Taken, Waits, size_of
from .room import check_names, check_room
from .schedule_index import ScheduledAmount, ScheduledDelivery, ScheduledEntry, ScheduleIndex
from .subjects import Subjects

log = logging.getLogger("keylane.broker")

POLL_MS = 1_000
SETTLE_S = 0.02
"""The time in seconds that a segment waits for the records that settle its messages, before it is
examined again.
"""
COPIED_MAX = 1_000
COPIED_BYTES_MAX = 1 << 20
"""The number of records, and of bytes, that are written again at once before a segment is removed.
One larger record is written alone.
"""
WAITS = Backoff(first_ms=50, max_ms=30_000)
"""The pauses of a subject whose messages cannot be stored now."""
DELIVERY_S = 3.0
"""The time in seconds that a cancel waits for a delivery that is under way. It is less than a
client waits for its answer.
"""
UNREADABLE_MS = 60_000
"""The pause, in milliseconds, of a message that cannot be read from the disk."""


class _Keeping(NamedTuple):
    """A message that is being written."""

    subject: str
    done: asyncio.Future[None]


class Scheduler:
    """The scheduled messages of a broker. It is made by `open`."""

    def __init__(
        self,
        journal: ScheduledJournal,
        schedule_index: ScheduleIndex,
        *,
        clock: Clock,
        rng: random.Random,
        run_blocking: RunBlocking,
        broker_group: str,
        count_max: int,
        bytes_max: int,
    ) -> None:
        """
        Create a scheduler.

        Args:
            rng: draws idempotency keys and pauses, and gives no number a second time after a
                restart.
            run_blocking: runs one function at a time, in the order of the calls.
        """
        self._journal = journal
        self._schedule_index = schedule_index
        self._clock = clock
        self.calendar = WallClock(clock)
        self._rng = rng
        self._run_blocking = run_blocking
        self._broker_group = broker_group
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._writer = JournalWriter(journal, run_blocking, written=self._clean)
        self._writing: dict[bytes, _Keeping] = {}
        """Message id → a message that is not durable yet."""
        self._writing_shares: dict[str, ScheduledAmount] = {}
        """Subject → the amount of its messages that are not durable yet."""
        self._canceling: dict[bytes, asyncio.Future[None]] = {}
        """Message id → a cancel or a drop that is not durable yet."""
        self._wake = asyncio.Event()
        self._turn = asyncio.Event()
        """An event that is set when a delivery has ended or failed; then a new event replaces
        it.
        """
        self._pauses: dict[str, Pauses] = {}
        """Subject → its pauses, for subjects whose last delivery failed."""
        self._problems: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._cleaner: asyncio.Task[None] | None = None
        self.limits: Callable[[], Mapping[str, int]] = dict
        """A function that returns subject or pattern → the bytes allowed for all such subjects."""
        self.delivered = self.dropped = 0
        """The numbers of messages delivered, and dropped, since the start."""

    @classmethod
    def open(
        cls,
        files: Files,
        *,
        clock: Clock,
        rng: random.Random,
        run_blocking: RunBlocking,
        broker_group: str,
        count_max: int,
        bytes_max: int,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> Scheduler:
        """
        Recover the scheduled messages of a locked data folder. Blocks.

        Raises:
            DataFolderError: a newer broker wrote the journal.
            StorageError: its last write may not be durable.
        """
        schedule_index, journal = open_schedule(files, segment_bytes=segment_bytes)
        return cls(
            journal,
            schedule_index,
            clock=clock,
            rng=rng,
            run_blocking=run_blocking,
            broker_group=broker_group,
            count_max=count_max,
            bytes_max=bytes_max,
        )

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────
    @property
    def problem(self) -> str:
        """Why scheduled messages are neither accepted nor delivered; "" if they are."""
        return self._writer.problem

    def view(self) -> dict[str, object]:
        """Return the state for the broker's health."""
        return {
            "count": len(self._schedule_index.entries),
            "bytes": self._schedule_index.bytes,
            "next_ms": self._schedule_index.next_due_ms,
            "delivered": self.delivered,
            "dropped": self.dropped,
            "problem": self.problem,
            "calendar": self.calendar.problem,
            "late": dict(list(self._problems.items())[:10]),
        }

    async def soonest(
        self, limit: int, subject: str | None = None
    ) -> tuple[int, list[ScheduledEntry]]:
        """See `ScheduleIndex.soonest`; other work is done between its portions."""
        look = self._schedule_index.soonest(limit, subject)
        while True:
            try:
                next(look)
            except StopIteration as end:
                count, entries = end.value
                return count, entries
            await asyncio.sleep(0)

    def subject_of(self, scheduled_id: bytes) -> str | None:
        """Return the subject of a message that waits or is being written, or None if there is none
        with this id.
        """
        known = self._schedule_index.entries.get(scheduled_id) or self._writing.get(scheduled_id)
        return None if known is None else known.subject

    def knows_all(self, scheduled_ids: Iterable[bytes]) -> bool:
        """Return True if `schedule` would write nothing for messages with these ids."""
        return all(
            each in self._writing or self._schedule_index.knows(each) for each in scheduled_ids
        )

    async def schedule(self, messages: Sequence[Waits]) -> list[bool]:
        """
        Keep messages of one subject durably, all of them or none. A message with a known id is
        already kept.

        Returns:
            For each message, True if it was known.

        Raises:
            OverloadedError, BrokerReadOnlyError, CorruptLogError: nothing is kept.
            StorageError: see its fate.
        """
        writing = [self._writing.get(message.scheduled_id) for message in messages]
        known = [
            write is not None or self._schedule_index.knows(message.scheduled_id)
            for message, write in zip(messages, writing, strict=True)
        ]
        fresh = [message for message, old in zip(messages, known, strict=True) if not old]
        if fresh:
            self._writer.check()
            self._check_limits(fresh)
            await self._keep(fresh)
        for write in writing:
            if write is not None:
                await shield(write.done)
        return known

    def _check_limits(self, fresh: Sequence[Waits]) -> None:
        """
        Check that the broker and the subject have room for messages.

        Raises:
            OverloadedError: the broker is full, or the subject has used its share.
        """
        subject = fresh[0].subject
        size = sum(message.size for message in fresh)
        kept = ScheduledAmount(len(self._schedule_index.entries), self._schedule_index.bytes)
        for writing in self._writing_shares.values():
            kept = kept.plus(*writing)
        own = self._schedule_index.share(subject).plus(
            *self._writing_shares.get(subject, ScheduledAmount())
        )
        wanted = ScheduledAmount(len(fresh), size)
        most = ScheduledAmount(self._count_max, self._bytes_max)
        check_room(subject, wanted, kept, own, most, broker_group=self._broker_group)
        kept_of, shares = self._schedule_index.names.of, self._writing_shares
        check_names(subject, size, kept_of, shares, self.limits(), broker_group=self._broker_group)

    async def _keep(self, messages: Sequence[Waits]) -> None:
        size = sum(message.size for message in messages)
        subject, shares = messages[0].subject, self._writing_shares

        def count(number: int, size: int) -> None:
            share = shares[subject] = shares.get(subject, ScheduledAmount()).plus(number, size)
            if not share.messages:
                del shares[subject]

        def end() -> None:
            count(-len(messages), -size)
            for message in messages:
                del self._writing[message.scheduled_id]

        def kept(place: Place) -> None:
            end()
            for message in messages:
                self._schedule_index.add(message, place)
            self._wake.set()

        done = self._writer.submit(messages, then=kept, undo=end)
        count(len(messages), size)
        for message in messages:
            self._writing[message.scheduled_id] = _Keeping(subject, done)
        await shield(done)

    async def cancel(self, scheduled_id: bytes) -> CancelOutcome:
        """
        Cancel a message durably, so that it is never delivered, unless it is already delivered.

        Raises:
            NotFoundError: the message is not known, or no longer known.
            BusyError: its delivery has not ended within `DELIVERY_S`.
            BrokerReadOnlyError, CorruptLogError: nothing is done.
            StorageError: see its fate.
        """
        self._writer.check()
        if (write := self._writing.get(scheduled_id)) is not None:
            await shield(write.done)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DELIVERY_S):
                while self._schedule_index.is_taken(scheduled_id):
                    canceling = self._canceling.get(scheduled_id)
                    await (shield(canceling) if canceling else self._turn.wait())
        outcome = self._schedule_index.cancel(scheduled_id)
        if outcome is not None:
            return outcome

        def canceled(place: Place) -> None:
            del self._canceling[scheduled_id]
            self._schedule_index.canceled(scheduled_id, place.segment)

        def wait_again() -> None:
            del self._canceling[scheduled_id]
            self._schedule_index.give_back([scheduled_id])
            self._wake.set()

        done = self._writer.submit([Canceled(scheduled_id)], then=canceled, undo=wait_again)
        self._canceling[scheduled_id] = done
        await shield(done)
        return CancelOutcome.CANCELED

    # ── the journal ───────────────────────────────────────────────────────────────────────────────
    def _clean(self) -> None:
        """Begin to remove the oldest segments if most of the journal concerns settled messages."""
        most = 2 * (self._schedule_index.journal_bytes + self._journal.segment_bytes)
        many = len(self._journal.segments) > 1
        if self._cleaner is None and many and self._journal.bytes > most:
            self._cleaner = asyncio.create_task(self._remove_oldest(), name="scheduled cleaning")

    async def _remove_oldest(self) -> None:
        """Write the needed records of the oldest segment again, then remove it."""
        try:
            segment = self._journal.segments[0]
            records: list[Record] = await self._run_blocking(self._journal.read_segment, segment)
            while True:
                if await self._write_again(records, segment):
                    break
                await asyncio.sleep(SETTLE_S)
            await self._run_blocking(self._journal.remove, segment)
        except KeylaneError as error:
            log.error("cannot compact the journal of scheduled messages: %s", error.message)
        finally:
            self._cleaner = None

    async def _write_again(self, records: Sequence[Record], segment: int) -> bool:
        """
        Write the needed records of a segment again, some of them in each turn of the event loop.

        Returns:
            False if messages were being settled meanwhile: if that fails, their records are needed
            after all.
        """
        whole = True
        for start in range(0, len(records), COPIED_MAX):
            some = records[start : start + COPIED_MAX]
            while needed := self._schedule_index.needed(some, segment):
                copied = _first_of(needed)
                await self._writer.submit(copied, then=partial(self._schedule_index.move, copied))
            whole = whole and not self._schedule_index.is_settling(segment)
            await asyncio.sleep(0)
        return whole

    # ── deliveries ────────────────────────────────────────────────────────────────────────────────
    async def run(self, target: Subjects, standing: Standing) -> None:
        """Deliver messages at their times, until cancelled. None is delivered before a metaserver
        has accepted the data folder.
        """
        await standing.wait_accepted()
        if self._journal.problems:
            return  # a lost record may say that a message is delivered or canceled
        for delivery in list(self._schedule_index.deliveries.values()):
            self._start(self._resume(delivery, target, standing))
        while True:
            self._wake.clear()
            now_ms, boot_ms = self.calendar.now_ms(), self._clock.boot_ms()
            for batch in self._schedule_index.take(now_ms, boot_ms):
                self._start(self._deliver(batch, target, standing))
            due_ms, again_ms = self._schedule_index.next_due_ms, self._schedule_index.next_try_ms
            waits = [] if due_ms is None else [due_ms - now_ms]
            waits += [] if again_ms is None else [again_ms - boot_ms]
            wait_ms = min(max(min(waits), 1), POLL_MS) if waits else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                    await self._wake.wait()
            if not standing.accepted:
                await standing.wait_accepted()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="delivery of scheduled messages")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("scheduled messages could not be delivered", exc_info=task.exception())

    async def _deliver(
        self, batch: list[ScheduledEntry], target: Subjects, standing: Standing
    ) -> None:
        """Store a batch of due messages in their subject, or give them back."""
        subject = batch[0].subject
        try:
            messages = await self._read(batch)
            batch = self._without_unread(batch, messages)
            if not batch:
                self._free(subject)
                return
            name = f"scheduled-{self._rng.getrandbits(128):032x}"
            logical = await target.choose_logical_partition(subject, batch[0].subject_id)
            taken = Taken(name, subject, logical, tuple(each.scheduled_id for each in messages))
            await self._writer.submit(
                [taken], then=lambda place: self._schedule_index.begin(taken, place.segment)
            )
        except SubjectDeletedError as error:
            await self._drop(subject, [entry.scheduled_id for entry in batch], error)
            return
        except KeylaneError as error:
            self._give_back(subject, [entry.scheduled_id for entry in batch], error)
            return
        delivery = self._schedule_index.deliveries[name]
        await self._store(delivery, messages, target, standing, doubtful=False)

    async def _resume(
        self, delivery: ScheduledDelivery, target: Subjects, standing: Standing
    ) -> None:
        """Store a batch that may have been stored before a restart."""
        entries = [self._schedule_index.entries[each] for each in delivery.scheduled_ids]
        while True:
            messages = await self._read(entries)
            if len(messages) == len(entries):
                break
            await asyncio.sleep(UNREADABLE_MS / 1000)  # it may be stored, so it stays one batch
        await self._store(delivery, messages, target, standing, doubtful=True)

    def _without_unread(
        self, batch: list[ScheduledEntry], messages: Sequence[Waits]
    ) -> list[ScheduledEntry]:
        """Return the entries that were read. The other messages of a delivery that has not begun
        are given back.
        """
        read = {each.scheduled_id for each in messages}
        unread = [each.scheduled_id for each in batch if each.scheduled_id not in read]
        self._schedule_index.give_back(unread, self._clock.boot_ms() + UNREADABLE_MS)
        return [entry for entry in batch if entry.scheduled_id in read]

    async def _read(self, entries: Sequence[ScheduledEntry]) -> list[Waits]:
        """Return the messages of entries, in their order, without those that cannot be read now."""
        by_id: dict[bytes, Waits] = {}
        wanted = {entry.scheduled_id for entry in entries}
        for place in dict.fromkeys(entry.place for entry in entries):
            try:
                records = await self._run_blocking(self._journal.read, place)
            except StorageError as error:
                log.error("cannot read a scheduled message: %s", error.message)
                continue
            for record in records:
                if isinstance(record, Waits) and record.scheduled_id in wanted:
                    by_id[record.scheduled_id] = record
        return [by_id[entry.scheduled_id] for entry in entries if entry.scheduled_id in by_id]

    async def _store(
        self,
        delivery: ScheduledDelivery,
        messages: Sequence[Waits],
        target: Subjects,
        standing: Standing,
        *,
        doubtful: bool,
    ) -> None:
        """Try to store a delivery whose record is durable, until it is stored or certainly cannot
        be.
        """
        posted = [PostedMessage(b"", each.value, each.packed_properties) for each in messages]
        subject_id = self._schedule_index.entries[delivery.scheduled_ids[0]].subject_id
        pauses = WAITS.pauses(self._rng)
        while True:
            if not standing.accepted:
                await standing.wait_accepted()
            try:
                await target.store(
                    delivery.subject,
                    posted,
                    sent_at_ns=[each.sent_at_ns for each in messages],
                    key=delivery.name,
                    logical=delivery.logical,
                    subject_id=subject_id,
                    tried=doubtful,
                )
                break
            except SubjectDeletedError as error:
                await self._drop(delivery.subject, delivery.scheduled_ids, error)
                return
            except KeylaneError as error:
                large = _too_large(error, delivery, posted)
                if large:
                    others = [each for each in delivery.scheduled_ids if each not in large]
                    self._schedule_index.give_back(others)
                    await self._drop(delivery.subject, large, error)
                    return
                doubtful = doubtful or error.fate is Fate.UNKNOWN
                if not doubtful:
                    self._give_back(delivery.subject, delivery.scheduled_ids, error)
                    return
                self._tell(delivery.subject, error)
                self._free(delivery.subject)
                await asyncio.sleep(pauses.next_ms() / 1000)
        self._schedule_index.end(delivery.name)
        self.delivered += len(messages)
        self._pauses.pop(delivery.subject, None)
        self._problems.pop(delivery.subject, None)
        self._free(delivery.subject)
        done = Delivered(delivery.name, delivery.scheduled_ids)
        while True:
            try:
                await self._writer.submit(
                    [done], then=lambda place: self._schedule_index.ended(done, place.segment)
                )
                return
            except KeylaneError:  # a start stores it again, as a duplicate
                await asyncio.sleep(pauses.next_ms() / 1000)

    async def _drop(self, subject: str, scheduled_ids: Sequence[bytes], why: KeylaneError) -> None:
        """Drop messages durably that their subject never accepts. If that fails, they wait for the
        next try.
        """
        ids = tuple(scheduled_ids)

        def end() -> None:
            for scheduled_id in ids:
                del self._canceling[scheduled_id]

        def dropped(place: Place) -> None:
            end()
            self._schedule_index.dropped(ids, place.segment)

        def keep() -> None:
            end()
            self._schedule_index.give_back(ids, self._clock.boot_ms() + WAITS.max_ms)

        self._schedule_index.drop(ids)
        done = self._writer.submit([DroppedMessages(ids)], then=dropped, undo=keep)
        self._canceling |= dict.fromkeys(ids, done)
        try:
            await shield(done)
        except KeylaneError as error:
            self._tell(subject, error)
        else:
            self.dropped += len(ids)
            self._problems.pop(subject, None)
            log.error(
                "%s of %s dropped, never to be delivered: %s: %s",
                counted(len(ids), "scheduled message", "scheduled messages"),
                subject,
                why.message,
                listed([each.hex() for each in ids[:LISTED_MAX]], len(ids)),
            )
        self._free(subject)

    def _give_back(self, subject: str, scheduled_ids: Sequence[bytes], error: KeylaneError) -> None:
        """Let messages of which nothing is stored wait for a while."""
        pauses = self._pauses.get(subject)
        if pauses is None:
            pauses = self._pauses[subject] = WAITS.pauses(self._rng)
        self._schedule_index.give_back(scheduled_ids, self._clock.boot_ms() + pauses.next_ms())
        self._tell(subject, error)
        self._free(subject)

    def _free(self, subject: str) -> None:
        self._schedule_index.free(subject)
        self._wake.set()
        self._turn.set()
        self._turn = asyncio.Event()

    def _tell(self, subject: str, error: KeylaneError) -> None:
        """Log each problem of a subject once."""
        if self._problems.get(subject) != error.message:
            log.warning("scheduled messages of %s wait: %s", subject, error.message)
            self._problems[subject] = error.message

    async def close(self) -> None:
        """End deliveries, and wait until what was submitted is written."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._cleaner is not None:
            await asyncio.wait([self._cleaner])
        await self._writer.idle()
        self._journal.close()


def _first_of(records: Sequence[Record]) -> list[Record]:
    """Return the first records, as many as are written again at once."""
    first: list[Record] = []
    size_bytes = 0
    for record in records[:COPIED_MAX]:
        size_bytes += size_of(record)
        if first and size_bytes > COPIED_BYTES_MAX:
            break
        first.append(record)
    return first


def _too_large(
    error: KeylaneError, delivery: ScheduledDelivery, posted: Sequence[PostedMessage]
) -> list[bytes]:
    """Return the messages of a delivery that are over the limit of their subject, if that is the
    error.
    """
    if not isinstance(error, MessageTooLargeError) or error.limit_bytes is None:
        return []
    pairs = zip(delivery.scheduled_ids, posted, strict=True)
    return [each for each, message in pairs if message.size > error.limit_bytes]


def open_schedule(
    files: Files, *, segment_bytes: int = SEGMENT_BYTES, cut: bool = True
) -> tuple[ScheduleIndex, ScheduledJournal]:
    """
    Return the index that the journal of a data folder describes, and the journal. Blocks.

    Args:
        cut: see `ScheduledJournal.open`.

    Raises:
        DataFolderError: a newer broker wrote the journal.
        StorageError: its last write may not be durable.
    """
    schedule_index = ScheduleIndex()

    def visit(place: Place, records: list[Record]) -> None:
        for record in records:
            schedule_index.replay(record, place)

    journal = ScheduledJournal.open(files, visit, segment_bytes=segment_bytes, cut=cut)
    schedule_index.finish()
    return schedule_index, journal

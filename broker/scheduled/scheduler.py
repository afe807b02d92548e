"""Stores scheduled messages durably, and delivers each to its subject when it is due. Runs on one
event loop.

    schedule, cancel ─▶ log ─▶ schedule_index ──time──▶ "taken" in the log
        ─▶ the subject ─▶ "delivered" in the log

All changes are SCHEDULED records of the broker's log, durable with the group commit of all other
records. A delivery is a batch of due messages of one subject. Its idempotency key is durable before
the batch is sent, so a delivery that is repeated after a crash is stored once.

Delivery times are wall-clock times. If the clock is set forward a little, the scheduler follows
within POLL_MS; if it is set forward by hours, it is not trusted at first (`../wall_clock.py`). If
it is set back, messages that are no longer due wait again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from ...protocol.backoff import Backoff, Pauses
from ...protocol.clock import Clock
from ...protocol.errors import (
    CorruptLogError,
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
from ..folder_ownership import FolderOwnership
from ..storage.files import Files
from ..store.group_commit import Entry
from ..store.store import Store
from ..wall_clock import WallClock
from .agenda import ScheduledAgenda
from .old_journal import move_journal
from .records import (
    Canceled,
    Delivered,
    DroppedMessages,
    LogRecord,
    Place,
    Record,
    ScheduledMessageRecord,
    Taken,
    encode_records,
    read_changes,
)
from .room import check_name_limits, check_room
from .schedule_index import ScheduledAmount, ScheduledDelivery, ScheduledEntry
from .subjects import Subjects

log = logging.getLogger("keylane.broker")

POLL_MS = 1_000
WAITS = Backoff(first_ms=50, max_ms=30_000)
"""The delays between failed deliveries to a subject."""
DELIVERY_S = 3.0
"""How long a cancel waits for a delivery in progress, in seconds. It is shorter than the client's
timeout.
"""
UNREADABLE_MS = 60_000
"""How long to wait before a message that cannot be read from the disk is retried, in
milliseconds.
"""


_OnDurable = Callable[[Sequence[Record], Place], object]
"""A function that applies the changes of a record when it is durable at this place."""


class _PendingMessage(NamedTuple):
    """A message that is being written."""

    subject: str
    done: asyncio.Future[None]


class Scheduler:
    """Stores and delivers the scheduled messages of a broker; created with `open`."""

    def __init__(
        self,
        agenda: ScheduledAgenda,
        store: Store,
        *,
        clock: Clock,
        rng: random.Random,
        broker_group: str,
        count_max: int,
        bytes_max: int,
    ) -> None:
        """
        Args:
            agenda: that of the store.
            rng: draws idempotency keys and delays; it must not repeat its numbers after a restart.
        """
        self._agenda = agenda
        self._schedule_index = agenda.index
        self._store = store
        self._commit = store.commit
        self._clock = clock
        self.calendar = WallClock(clock)
        self._rng = rng
        self._broker_group = broker_group
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._pending_messages: dict[bytes, _PendingMessage] = {}
        """Maps the id of each message that is being written to that message."""
        self._pending_amounts: dict[str, ScheduledAmount] = {}
        """Maps subjects to the amount of their messages that are being written."""
        self._cancel_futures: dict[bytes, asyncio.Future[None]] = {}
        """Maps message ids to a cancel or drop that is being written."""
        self._wake = asyncio.Event()
        self._delivery_done = asyncio.Event()
        """Set when a delivery ends or fails, and then replaced by a new event."""
        self._pauses: dict[str, Pauses] = {}
        """Maps each subject whose last delivery failed to its backoff."""
        self._problems: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.limits: Callable[[], Mapping[str, int]] = dict
        """Returns a mapping from each subject or pattern to the limit in bytes for all matching
        subjects.
        """
        self.delivered_count = self.dropped_count = 0
        """The number of messages that have been delivered, and the number that have been dropped,
        since the broker started.
        """

    @classmethod
    def open(
        cls,
        files: Files,
        agenda: ScheduledAgenda,
        store: Store,
        *,
        clock: Clock,
        rng: random.Random,
        broker_group: str,
        count_max: int,
        bytes_max: int,
    ) -> Scheduler:
        """
        Finish the recovery of scheduled messages after that of the store, which has not been used
        yet. Blocks.

        Raises:
            DataFolderError: a newer broker wrote scheduled messages.
            StorageError: the journal of an earlier version cannot be moved.
        """
        agenda.journal_problems = move_journal(
            files, agenda.index, store.log, now_ms=clock.wall_ms()
        )
        agenda.index.finish_replay()
        return cls(
            agenda,
            store,
            clock=clock,
            rng=rng,
            broker_group=broker_group,
            count_max=count_max,
            bytes_max=bytes_max,
        )

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────
    @property
    def problem(self) -> str:
        """The reason why scheduled messages are neither accepted nor delivered; "" if they are."""
        reason = self._commit.refusal_reason if self._commit.has_failed else ""
        return self._agenda.problem or reason

    def _check(self) -> None:
        """Raise CorruptLogError, BrokerReadOnlyError or OverloadedError if a change cannot be
        written at present.
        """
        if problem := self._agenda.problem:
            raise CorruptLogError(f"scheduled messages are not served: {problem}")
        self._commit.check_room(0, is_control=True)

    def _submit(
        self,
        changes: Sequence[Record],
        *,
        on_durable: _OnDurable,
        undo: Callable[[], object] = lambda: None,
        is_control: bool = True,
    ) -> asyncio.Future[None]:
        """
        Queue changes for writing, and return a future that is done when they are durable.

        Args:
            on_durable: called for each record of the log with the changes in it and its place, when
                all of them are durable, before the future is done.
            undo: called instead of `on_durable` if they were not written or may not be durable.
            is_control: see `Entry`.
        """
        records = encode_records(changes)
        now_ms = self._clock.wall_ms()

        for record in records:
            entry = Entry(
                record.data,
                appended_at_ms=now_ms,
                is_control=is_control or len(records) > 1,  # all of them in one commit
                on_durable=partial(_call_durable, on_durable, record),
                undo=undo if record is records[-1] else None,
            )
            if record is records[-1]:
                return self._commit.submit(entry)
            self._commit.add(entry, lambda _error: None)
        raise AssertionError("no changes")

    @property
    def amount(self) -> ScheduledAmount:
        """The messages that wait."""
        return ScheduledAmount(len(self._schedule_index.entries), self._schedule_index.bytes)

    @property
    def overdue_ms(self) -> int:
        """How long ago the earliest message was due, in milliseconds; 0 if none is."""
        next_ms = self._schedule_index.next_due_ms
        return 0 if next_ms is None else max(0, self.calendar.reported_ms() - next_ms)

    def view(self) -> dict[str, object]:
        """Return the state for the broker's health report."""
        return {
            "count": len(self._schedule_index.entries),
            "bytes": self._schedule_index.bytes,
            "next_ms": self._schedule_index.next_due_ms,
            "delivered": self.delivered_count,
            "dropped": self.dropped_count,
            "problem": self.problem,
            "calendar": self.calendar.problem,
            "late": dict(list(self._problems.items())[:10]),
        }

    async def list_soonest(
        self, limit: int, subject: str | None = None
    ) -> tuple[int, list[ScheduledEntry]]:
        """Return the result of `ScheduleIndex.list_soonest`, yielding to other tasks between its
        steps.
        """
        steps = self._schedule_index.list_soonest(limit, subject)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                count, entries = end.value
                return count, entries
            await asyncio.sleep(0)

    def subject_of(self, scheduled_id: bytes) -> str | None:
        """Return the subject of a message that waits or is being written, or None if there is no
        such message.
        """
        message = self._schedule_index.entries.get(scheduled_id) or self._pending_messages.get(
            scheduled_id
        )
        return None if message is None else message.subject

    def knows_all(self, scheduled_ids: Iterable[bytes]) -> bool:
        """Return True if all these messages are stored, settled, or being written."""
        return all(
            each in self._pending_messages or self._schedule_index.knows(each)
            for each in scheduled_ids
        )

    async def schedule(self, messages: Sequence[ScheduledMessageRecord]) -> list[bool]:
        """
        Store messages of one subject durably, all of them or none. Messages with known ids are
        skipped.

        Returns:
            For each message, True if its id was already known.

        Raises:
            OverloadedError, BrokerReadOnlyError, CorruptLogError: nothing is stored.
            StorageError: the fate says whether the messages are stored.
        """
        is_repeat = self.knows_all(message.scheduled_id for message in messages)
        size = sum(message.size for message in messages)
        async with nullcontext() if is_repeat else self._commit.admission(size):
            # Nothing is awaited in this block, because another call may have the same messages.
            writes = [self._pending_messages.get(message.scheduled_id) for message in messages]
            are_known = [
                write is not None or self._schedule_index.knows(message.scheduled_id)
                for message, write in zip(messages, writes, strict=True)
            ]
            new_messages = [
                message
                for message, is_known in zip(messages, are_known, strict=True)
                if not is_known
            ]
            if new_messages:
                self._check()
                self._commit.check_room(size, is_admitted=True)
                self._check_limits(new_messages)
                writes.append(self._begin_writing(new_messages))
        for write in writes:
            if write is not None:
                await shield(write.done)
        return are_known

    def _check_limits(self, messages: Sequence[ScheduledMessageRecord]) -> None:
        """
        Check that new messages of one subject do not exceed any limit.

        Raises:
            OverloadedError: the broker is full, or the subject has used its share.
        """
        subject = messages[0].subject
        size = sum(message.size for message in messages)
        total = ScheduledAmount(len(self._schedule_index.entries), self._schedule_index.bytes)
        for amounts_being_written in self._pending_amounts.values():
            total = total.add(*amounts_being_written)
        of_subject = self._schedule_index.subject_amount(subject).add(
            *self._pending_amounts.get(subject, ScheduledAmount())
        )
        requested_amount = ScheduledAmount(len(messages), size)
        limits = ScheduledAmount(self._count_max, self._bytes_max)
        check_room(
            subject, requested_amount, total, of_subject, limits, broker_group=self._broker_group
        )
        check_name_limits(
            subject,
            size,
            self._schedule_index.names.bytes_of,
            self._pending_amounts,
            self.limits(),
            broker_group=self._broker_group,
        )

    def _begin_writing(self, messages: Sequence[ScheduledMessageRecord]) -> _PendingMessage:
        """Queue new messages of one subject for writing."""
        subject, amounts = messages[0].subject, self._pending_amounts

        def add_to_pending(count: int, size: int) -> None:
            amount = amounts[subject] = amounts.get(subject, ScheduledAmount()).add(count, size)
            if not amount.messages:
                del amounts[subject]

        def remove_pending(message: ScheduledMessageRecord) -> None:
            add_to_pending(-1, -message.size)
            del self._pending_messages[message.scheduled_id]

        def on_durable(changes: Sequence[Record], place: Place) -> None:
            for message in changes:
                assert isinstance(message, ScheduledMessageRecord)
                remove_pending(message)
                self._schedule_index.add(message, place)
            self._wake.set()

        def undo() -> None:
            for message in messages:
                remove_pending(message)

        done = self._submit(messages, on_durable=on_durable, undo=undo, is_control=False)
        pending = _PendingMessage(subject, done)
        add_to_pending(len(messages), sum(message.size for message in messages))
        for message in messages:
            self._pending_messages[message.scheduled_id] = pending
        return pending

    async def cancel(self, scheduled_id: bytes) -> CancelOutcome:
        """
        Cancel a message durably, unless it is already settled, and return its outcome.

        Raises:
            NotFoundError: the message is unknown, or no longer known.
            BusyError: its delivery did not end within `DELIVERY_S`.
            BrokerReadOnlyError, CorruptLogError: the message was not canceled.
            StorageError: the fate says whether the message was canceled.
        """
        self._check()
        if (write := self._pending_messages.get(scheduled_id)) is not None:
            await shield(write.done)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DELIVERY_S):
                while self._schedule_index.is_in_delivery(scheduled_id):
                    cancel_future = self._cancel_futures.get(scheduled_id)
                    await (shield(cancel_future) if cancel_future else self._delivery_done.wait())
        outcome = self._schedule_index.cancel(scheduled_id)
        if outcome is not None:
            return outcome

        def on_durable(_changes: Sequence[Record], place: Place) -> None:
            del self._cancel_futures[scheduled_id]
            self._schedule_index.on_canceled(scheduled_id, place.position)

        def undo() -> None:
            del self._cancel_futures[scheduled_id]
            self._schedule_index.requeue([scheduled_id])
            self._wake.set()

        done = self._submit([Canceled(scheduled_id)], on_durable=on_durable, undo=undo)
        self._cancel_futures[scheduled_id] = done
        await shield(done)
        return CancelOutcome.CANCELED

    # ── deliveries ────────────────────────────────────────────────────────────────────────────────
    async def run(self, target: Subjects, folder_ownership: FolderOwnership) -> None:
        """Deliver messages when they are due, until cancelled. Starts only after a metaserver has
        accepted the data folder.
        """
        await folder_ownership.wait_accepted()
        if self._agenda.problem:
            return  # a lost record may have settled a message
        for delivery in list(self._schedule_index.deliveries.values()):
            self._start_delivery(self._resume_delivery(delivery, target, folder_ownership))
        while True:
            self._wake.clear()
            now_ms, boot_ms = self.calendar.now_ms(), self._clock.boot_ms()
            for batch in self._schedule_index.take_due(now_ms, boot_ms):
                self._start_delivery(self._deliver(batch, target, folder_ownership))
            due_ms, retry_ms = self._schedule_index.next_due_ms, self._schedule_index.next_try_ms
            delays_ms = [] if due_ms is None else [due_ms - now_ms]
            delays_ms += [] if retry_ms is None else [retry_ms - boot_ms]
            wait_ms = min(max(min(delays_ms), 1), POLL_MS) if delays_ms else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                    await self._wake.wait()
            if not folder_ownership.accepted:
                await folder_ownership.wait_accepted()

    def _start_delivery(self, delivery: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(delivery, name="delivery of scheduled messages")
        self._tasks.add(task)
        task.add_done_callback(self._on_delivery_done)

    def _on_delivery_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("scheduled messages could not be delivered", exc_info=task.exception())

    async def _deliver(
        self, batch: list[ScheduledEntry], target: Subjects, folder_ownership: FolderOwnership
    ) -> None:
        """Store a batch of due messages in their subject, or requeue them."""
        subject = batch[0].subject
        try:
            messages = await self._read_messages(batch)
            batch = self._requeue_unread(batch, messages)
            if not batch:
                self._release_subject(subject)
                return
            name = f"scheduled-{self._rng.getrandbits(128):032x}"
            logical_partition = await target.choose_logical_partition(subject, batch[0].subject_id)
            taken_record = Taken(
                name, subject, logical_partition, tuple(each.scheduled_id for each in messages)
            )
            self._check()
            await self._submit(
                [taken_record],
                on_durable=lambda _changes, place: self._schedule_index.begin_delivery(
                    taken_record, place.position
                ),
            )
        except SubjectDeletedError as error:
            await self._drop_messages(subject, [entry.scheduled_id for entry in batch], error)
            return
        except KeylaneError as error:
            self._requeue_messages(subject, [entry.scheduled_id for entry in batch], error)
            return
        delivery = self._schedule_index.deliveries[name]
        await self._store_delivery(delivery, messages, target, folder_ownership, is_doubtful=False)

    async def _resume_delivery(
        self, delivery: ScheduledDelivery, target: Subjects, folder_ownership: FolderOwnership
    ) -> None:
        """Store the batch of a delivery that began before a restart. It may already have been
        stored.
        """
        entries = [self._schedule_index.entries[each] for each in delivery.scheduled_ids]
        while True:
            messages = await self._read_messages(entries)
            if len(messages) == len(entries):
                break
            # The batch may be stored, so it must not change.
            await asyncio.sleep(UNREADABLE_MS / 1000)
        await self._store_delivery(delivery, messages, target, folder_ownership, is_doubtful=True)

    def _requeue_unread(
        self, batch: list[ScheduledEntry], messages: Sequence[ScheduledMessageRecord]
    ) -> list[ScheduledEntry]:
        """Requeue the entries whose messages could not be read, and return the others."""
        read_ids = {each.scheduled_id for each in messages}
        unread_ids = [each.scheduled_id for each in batch if each.scheduled_id not in read_ids]
        self._schedule_index.requeue(unread_ids, self._clock.boot_ms() + UNREADABLE_MS)
        return [entry for entry in batch if entry.scheduled_id in read_ids]

    async def _read_messages(
        self, entries: Sequence[ScheduledEntry]
    ) -> list[ScheduledMessageRecord]:
        """Read the messages of entries, in order. Messages that cannot be read at present are
        omitted.
        """
        by_id: dict[bytes, ScheduledMessageRecord] = {}
        wanted = {entry.scheduled_id: entry for entry in entries}
        while wanted:
            places: dict[Place, list[bytes]] = {}
            for scheduled_id, entry in wanted.items():
                places.setdefault(entry.place, []).append(scheduled_id)
            for place, ids in places.items():
                try:
                    data = await self._store.run_read(self._store.log.read, *place)
                    changes = read_changes(data, place)
                except StorageError as error:
                    if all(wanted[each].place == place for each in ids):
                        log.error("cannot read a scheduled message: %s", error.message)
                    changes = []
                for change in changes:
                    if isinstance(change, ScheduledMessageRecord) and change.scheduled_id in wanted:
                        by_id[change.scheduled_id] = change
                for scheduled_id in ids:
                    # A record that was written again meanwhile is read at its new place.
                    if scheduled_id in by_id or wanted[scheduled_id].place == place:
                        del wanted[scheduled_id]
        return [by_id[entry.scheduled_id] for entry in entries if entry.scheduled_id in by_id]

    async def _store_delivery(
        self,
        delivery: ScheduledDelivery,
        messages: Sequence[ScheduledMessageRecord],
        target: Subjects,
        folder_ownership: FolderOwnership,
        *,
        is_doubtful: bool,
    ) -> None:
        """Store a delivery whose record is durable. Retry until it is stored; if it is certain that
        nothing was stored, requeue or drop its messages.
        """
        posted_messages = [
            PostedMessage(b"", each.value, each.packed_properties) for each in messages
        ]
        subject_id = self._schedule_index.entries[delivery.scheduled_ids[0]].subject_id
        pauses = WAITS.pauses(self._rng)
        while True:
            if not folder_ownership.accepted:
                await folder_ownership.wait_accepted()
            try:
                await target.store(
                    delivery.subject,
                    posted_messages,
                    sent_at_ns=[each.sent_at_ns for each in messages],
                    key=delivery.name,
                    logical_partition=delivery.logical_partition,
                    subject_id=subject_id,
                    tried=is_doubtful,
                )
                break
            except SubjectDeletedError as error:
                await self._drop_messages(delivery.subject, delivery.scheduled_ids, error)
                return
            except KeylaneError as error:
                too_large = _find_too_large(error, delivery, posted_messages)
                if too_large:
                    remaining_ids = [
                        each for each in delivery.scheduled_ids if each not in too_large
                    ]
                    self._schedule_index.requeue(remaining_ids)
                    await self._drop_messages(delivery.subject, too_large, error)
                    return
                is_doubtful = is_doubtful or error.fate is Fate.UNKNOWN
                if not is_doubtful:
                    self._requeue_messages(delivery.subject, delivery.scheduled_ids, error)
                    return
                self._log_problem(delivery.subject, error)
                self._release_subject(delivery.subject)
                await asyncio.sleep(pauses.next_pause_ms() / 1000)
        self._schedule_index.end_delivery(delivery.name)
        self.delivered_count += len(messages)
        self._pauses.pop(delivery.subject, None)
        self._problems.pop(delivery.subject, None)
        self._release_subject(delivery.subject)
        delivered_record = Delivered(delivery.name, delivery.scheduled_ids)
        while True:
            try:
                self._check()
                await self._submit(
                    [delivered_record],
                    on_durable=lambda _changes, place: self._schedule_index.on_delivered(
                        delivered_record, place.position
                    ),
                )
                return
            except KeylaneError:  # without the record, a start delivers it again as a duplicate
                await asyncio.sleep(pauses.next_pause_ms() / 1000)

    async def _drop_messages(
        self, subject: str, scheduled_ids: Sequence[bytes], cause: KeylaneError
    ) -> None:
        """Durably drop messages that their subject will never accept. If the write fails, requeue
        them.
        """
        ids = tuple(scheduled_ids)

        def remove_pending() -> None:
            for scheduled_id in ids:
                del self._cancel_futures[scheduled_id]

        def on_durable(_changes: Sequence[Record], place: Place) -> None:
            remove_pending()
            self._schedule_index.on_dropped(ids, place.position)

        def undo() -> None:
            remove_pending()
            self._schedule_index.requeue(ids, self._clock.boot_ms() + WAITS.max_ms)

        try:
            self._check()
        except KeylaneError as error:
            self._requeue_messages(subject, ids, error)
            return
        self._schedule_index.begin_drop(ids)
        done = self._submit([DroppedMessages(ids)], on_durable=on_durable, undo=undo)
        self._cancel_futures |= dict.fromkeys(ids, done)
        try:
            await shield(done)
        except KeylaneError as error:
            self._log_problem(subject, error)
        else:
            self.dropped_count += len(ids)
            self._problems.pop(subject, None)
            log.error(
                "%s of %s dropped, never to be delivered: %s: %s",
                counted(len(ids), "scheduled message", "scheduled messages"),
                subject,
                cause.message,
                listed([each.hex() for each in ids[:LISTED_MAX]], len(ids)),
            )
        self._release_subject(subject)

    def _requeue_messages(
        self, subject: str, scheduled_ids: Sequence[bytes], error: KeylaneError
    ) -> None:
        """Requeue messages with a backoff, because none of them was stored."""
        pauses = self._pauses.get(subject)
        if pauses is None:
            pauses = self._pauses[subject] = WAITS.pauses(self._rng)
        self._schedule_index.requeue(scheduled_ids, self._clock.boot_ms() + pauses.next_pause_ms())
        self._log_problem(subject, error)
        self._release_subject(subject)

    def _release_subject(self, subject: str) -> None:
        self._schedule_index.release_subject(subject)
        self._wake.set()
        self._delivery_done.set()
        self._delivery_done = asyncio.Event()

    def _log_problem(self, subject: str, error: KeylaneError) -> None:
        """Log each problem of a subject once."""
        if self._problems.get(subject) != error.message:
            log.warning("scheduled messages of %s wait: %s", subject, error.message)
            self._problems[subject] = error.message

    async def close(self) -> None:
        """Cancel the deliveries. What was submitted is written with the store's other records."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _call_durable(on_durable: _OnDurable, record: LogRecord, entry: Entry) -> None:
    on_durable(record.changes, Place(entry.position, entry.size_bytes))


def _find_too_large(
    error: KeylaneError, delivery: ScheduledDelivery, posted_messages: Sequence[PostedMessage]
) -> list[bytes]:
    """Return the ids of the messages that exceed the limit of their subject, if the error is a
    MessageTooLargeError.
    """
    if not isinstance(error, MessageTooLargeError) or error.limit_bytes is None:
        return []
    pairs = zip(delivery.scheduled_ids, posted_messages, strict=True)
    return [each for each, message in pairs if message.size > error.limit_bytes]

"""Tracks scheduled messages: which wait, which are due, and which are being delivered. Pure.

    waiting ──due──▶ ready ──take──▶ taken ──begin──▶ in a delivery ──end──▶ delivered
       │ ▲                             │                    │
       │ └───────── requeue ───────────┴── nothing stored ──┘
       └──cancel──▶ canceled           └──── drop ──────────┴─▶ dropped

Invariants
    A message is in at most one delivery. A delivery is always stored under the same idempotency key
    with the same messages, so they are requeued only if none of them can have been stored. A taken
    message can be canceled only after it was requeued. The wall clock decides whether a message is
    due, but delays between retries are measured with the boot clock: if the wall clock is set back,
    the delays do not become longer, and messages that are no longer due wait again. A message is
    not rewritten after the record that settles it, because it would then be restored at the next
    start. The records that settle the latest SETTLED_MAX messages are rewritten before the log is
    removed up to them, so repeated calls are recognized even after a restart. Replaying the log,
    from its beginning or from any state of the index on, leads to the same waiting messages and
    deliveries.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

import msgspec

from ...protocol.errors import BusyError, NotFoundError, Reason
from ...protocol.ids import MAX_I64
from ...protocol.scheduled.receipt import CancelOutcome
from .name_bytes import BytesByName
from .records import (
    Canceled,
    Delivered,
    DroppedMessages,
    Place,
    Record,
    ScheduledForSubject,
    ScheduledMessageRecord,
    Taken,
    overhead_of,
)

SETTLED_MAX = 10_000
"""The maximum number of settled messages that are remembered in order to recognize repeated
calls.
"""
REWRITTEN = ""
"""The delivery name of a rewritten record, which contains messages of several deliveries."""
NOT_DURABLE = MAX_I64
"""Stands for the position of the record of a settled message that is not durable yet: it will be
after all others.
"""
DUE_MAX = 1_000
"""The maximum number of messages that become due in one step. 250,000 at once would block the event
loop for seconds.
"""
STALE_TIMERS_MAX = 1_000
"""A heap is compacted when it has this many more entries than twice the number of messages."""
SEARCH_COUNT = 2_000
"""The number of messages that a search examines in one step, which takes about 1 ms. Listing
250,000 messages before the first step takes 5 ms.
"""
DELIVERY_COUNT_MAX = 1_000
DELIVERY_BYTES_MAX = 1 << 20
"""The maximum size of a batch in bytes, which only a single message may exceed."""


_Timer = tuple[int, int, bytes]
"""The time in milliseconds, a serial number, and the id of the message that waits for that time."""


@dataclass(slots=True)
class ScheduledEntry:
    """A scheduled message without its value, which stays in the log."""

    scheduled_id: bytes
    deliver_at_ms: int
    subject: str
    size: int
    place: Place
    retry_at_ms: int = 0
    """When it will be retried, in milliseconds since boot; 0 if it waits for its delivery time by
    the wall clock.
    """
    in_delivery: bool = False
    subject_id: int = 0
    """The id of the subject that must receive the message; 0 means the subject that has the name
    when the message is due.
    """

    @property
    def message_bytes(self) -> int:
        """The total size of the value and the properties in bytes, to which the subject's limit
        applies.
        """
        return self.size - overhead_of(self.subject)


@dataclass(slots=True)
class ScheduledDelivery:
    """A batch of messages that is being stored. It may already have been stored."""

    name: str
    subject: str
    logical_partition: int
    scheduled_ids: tuple[bytes, ...]
    position: int
    """The log position of the delivery's record."""


class ScheduledAmount(NamedTuple):
    """A number of scheduled messages and their size."""

    messages: int = 0
    bytes: int = 0
    """The approximate size in the log, in bytes."""

    def add(self, messages: int, size: int) -> ScheduledAmount:
        """Return the sum of this amount and the given numbers, which may be negative."""
        return ScheduledAmount(self.messages + messages, self.bytes + size)


class _Settled(NamedTuple):
    """The outcome of a message, and the log position of the record of that outcome."""

    outcome: CancelOutcome
    position: int


class ScheduleImage(msgspec.Struct, frozen=True, array_like=True):
    """A part of a copy of the index, as it is stored."""

    entries: Sequence[tuple[bytes, int, str, int, int, int, int]]
    """The id, delivery time, subject, size, position, length and subject id of each message."""
    deliveries: Sequence[tuple[str, str, int, tuple[bytes, ...], int]] = ()
    """The name, subject, logical partition, message ids and position of each delivery."""
    settled: Sequence[tuple[bytes, CancelOutcome, int]] = ()
    """The id, outcome and position of each settled message."""


class ScheduleIndex:
    """The scheduled messages of a broker."""

    def __init__(self) -> None:
        self.entries: dict[bytes, ScheduledEntry] = {}
        self.deliveries: dict[str, ScheduledDelivery] = {}
        self.bytes = 0
        """The approximate size of the entries in the log, in bytes."""
        self._subject_amounts: dict[str, ScheduledAmount] = {}
        """Maps subjects to the amount of their entries."""
        self.names = BytesByName()
        """The size of the entries in the log, by subject and by prefixes of subjects."""
        self._delivery_of: dict[bytes, str] = {}
        self._due_heap: list[_Timer] = []
        """A heap of the delivery times of waiting messages. Some entries may be stale."""
        self._retry_heap: list[_Timer] = []
        """A heap of retry times, by the boot clock. Some entries may be stale."""
        self._serial = 0
        self._ready: dict[str, deque[bytes]] = {}
        """Maps subjects to their due messages, ordered by delivery time."""
        self._busy: set[str] = set()
        """The subjects that have a delivery in progress. Their next delivery must wait."""
        self._settling: dict[bytes | str, int] = {}
        """Maps each canceled message or stored delivery whose record is not durable yet to the
        position of its earliest record that is needed if that write fails.
        """
        self._settled_messages: OrderedDict[bytes, _Settled] = OrderedDict()
        """Maps message ids to outcomes, in the order of the records in the log."""

    # ── messages ──────────────────────────────────────────────────────────────────────────────────
    def knows(self, scheduled_id: bytes) -> bool:
        """Return True if a message waits, is being delivered, or was settled recently."""
        return scheduled_id in self.entries or scheduled_id in self._settled_messages

    def add(self, record: ScheduledMessageRecord, place: Place) -> None:
        """Add a message, or update the place of its record."""
        entry = self.entries.get(record.scheduled_id)
        if entry is not None:
            entry.place = place
            return
        entry = ScheduledEntry(
            record.scheduled_id, record.deliver_at_ms, record.subject, record.size, place
        )
        if isinstance(record, ScheduledForSubject):
            entry.subject_id = record.subject_id
        self._add_entry(entry)

    def _add_entry(self, entry: ScheduledEntry) -> None:
        self._settled_messages.pop(entry.scheduled_id, None)
        self.entries[entry.scheduled_id] = entry
        self._change_amount(entry.subject, 1, entry.size)
        self._schedule_entry(entry)

    def subject_amount(self, subject: str) -> ScheduledAmount:
        """Return the number and size of a subject's entries."""
        return self._subject_amounts.get(subject, ScheduledAmount())

    def _change_amount(self, subject: str, count: int, size: int) -> None:
        self.bytes += size
        self.names.add(subject, size)
        share = self._subject_amounts[subject] = self.subject_amount(subject).add(count, size)
        if not share.messages:
            del self._subject_amounts[subject]

    def _schedule_entry(self, entry: ScheduledEntry) -> None:
        entry.in_delivery = False
        self._serial += 1
        heap, due_ms = self._due_heap, entry.deliver_at_ms
        if entry.retry_at_ms:
            heap, due_ms = self._retry_heap, entry.retry_at_ms
        heappush(heap, (due_ms, self._serial, entry.scheduled_id))
        if len(heap) > 2 * len(self.entries) + STALE_TIMERS_MAX:
            heap[:] = {timer[2]: timer for timer in heap if self._is_current(timer, heap)}.values()
            heapify(heap)

    def _is_current(self, timer: _Timer, heap: list[_Timer]) -> bool:
        """Return True if a message still waits for this entry of a heap."""
        due_ms, _, scheduled_id = timer
        entry = self.entries.get(scheduled_id)
        if entry is None or entry.in_delivery:
            return False
        return due_ms == (entry.retry_at_ms or entry.deliver_at_ms) and (
            heap is self._retry_heap
        ) == bool(entry.retry_at_ms)

    def cancel(self, scheduled_id: bytes) -> CancelOutcome | None:
        """
        Begin to cancel a message.

        Returns:
            The outcome if the message is already settled. None if it was waiting: it then counts as
            taken until `on_canceled` or `requeue` is called.

        Raises:
            NotFoundError: the message is unknown.
            BusyError: it is being delivered, and may still be requeued.
        """
        entry = self.entries.get(scheduled_id)
        if entry is not None:
            if entry.in_delivery:
                raise BusyError(Reason.SCHEDULED_TAKEN, scheduled_id=scheduled_id.hex())
            entry.in_delivery = True
            self._settling[scheduled_id] = entry.place.position
            return None
        settled_message = self._settled_messages.get(scheduled_id)
        if settled_message is None:
            raise NotFoundError(Reason.SCHEDULED_UNKNOWN, scheduled_id=scheduled_id.hex())
        return settled_message.outcome

    def is_in_delivery(self, scheduled_id: bytes) -> bool:
        """Return True if a message is neither settled nor waiting."""
        entry = self.entries.get(scheduled_id)
        return entry is not None and entry.in_delivery

    def on_canceled(self, scheduled_id: bytes, position: int) -> None:
        """Settle a message whose cancellation has become durable at this position."""
        self._settling.pop(scheduled_id, None)
        self._settle(scheduled_id, CancelOutcome.CANCELED, position)

    def _settle(self, scheduled_id: bytes, outcome: CancelOutcome, position: int) -> None:
        entry = self.entries.pop(scheduled_id, None)
        if entry is not None:
            self._change_amount(entry.subject, -1, -entry.size)
        self._settled_messages[scheduled_id] = _Settled(outcome, position)
        self._settled_messages.move_to_end(scheduled_id)
        if len(self._settled_messages) > SETTLED_MAX:
            self._settled_messages.popitem(last=False)

    # ── deliveries ────────────────────────────────────────────────────────────────────────────────
    def take_due(self, now_ms: int, boot_ms: int = 0) -> list[list[ScheduledEntry]]:
        """
        Take the next batch of due messages for each subject that is not busy, the oldest messages
        first.

        At most DUE_MAX messages become due in one call; `next_due_ms` and `next_try_ms` show
        whether there are more. The subjects of the batches are busy until `release_subject` is
        called.

        Args:
            now_ms: the wall-clock time.
            boot_ms: the time since boot, for retries.
        """
        for heap, until_ms in ((self._retry_heap, boot_ms), (self._due_heap, now_ms)):
            for _ in range(DUE_MAX):
                if not heap or heap[0][0] > until_ms:
                    break
                timer = heappop(heap)
                if self._is_current(timer, heap):
                    entry = self.entries[timer[2]]
                    self._ready.setdefault(entry.subject, deque()).append(entry.scheduled_id)
        batches = []
        for subject in [subject for subject in self._ready if subject not in self._busy]:
            batch = self._next_batch(self._ready[subject], now_ms)
            if not self._ready[subject]:
                del self._ready[subject]
            if batch:
                self._busy.add(subject)
                batches.append(batch)
        return batches

    def _next_batch(self, ready: deque[bytes], now_ms: int) -> list[ScheduledEntry]:
        batch: list[ScheduledEntry] = []
        size = 0
        while ready and len(batch) < DELIVERY_COUNT_MAX:
            entry = self.entries.get(ready[0])
            if entry is not None and not entry.in_delivery and entry.deliver_at_ms > now_ms:
                entry.retry_at_ms = 0  # the calendar was set back
                self._schedule_entry(entry)
            elif entry is not None and not entry.in_delivery:
                if batch and entry.subject_id != batch[0].subject_id:
                    break
                size += entry.size
                if batch and size > DELIVERY_BYTES_MAX:
                    break
                entry.in_delivery = True
                batch.append(entry)
            ready.popleft()
        return batch

    def release_subject(self, subject: str) -> None:
        """Allow the next delivery of a subject."""
        self._busy.discard(subject)

    def begin_delivery(self, record: Taken, position: int) -> ScheduledDelivery:
        """Add a delivery whose record is durable at this position, in place of one of its name."""
        if record.delivery in self.deliveries:
            self._remove_delivery(record.delivery)
        for scheduled_id in record.scheduled_ids:
            previous = self._delivery_of.get(scheduled_id)
            if previous is not None and previous != record.delivery:
                self._remove_delivery(previous)
            self._delivery_of[scheduled_id] = record.delivery
        delivery = ScheduledDelivery(
            record.delivery,
            record.subject,
            record.logical_partition,
            record.scheduled_ids,
            position,
        )
        self.deliveries[record.delivery] = delivery
        return delivery

    def end_delivery(self, name: str) -> None:
        """Settle the messages of a delivery as delivered. The caller must call `on_delivered` when
        the record is durable.
        """
        delivery = self.deliveries.get(name)
        if delivery is not None:
            self._remove_delivery(name)
            present_ids = [each for each in delivery.scheduled_ids if each in self.entries]
            positions = [self.entries[each].place.position for each in present_ids]
            self._settling[name] = min([delivery.position, *positions])
            for scheduled_id in delivery.scheduled_ids:
                self._settle(scheduled_id, CancelOutcome.DELIVERED, NOT_DURABLE)

    def on_delivered(self, record: Delivered, position: int) -> None:
        """Record that the outcome of a delivery is durable at this position."""
        self._settling.pop(record.delivery, None)
        self._update_settled(record.scheduled_ids, position)

    def _update_settled(self, scheduled_ids: Iterable[bytes], position: int) -> None:
        """Update the position of the outcome of settled messages. Forgotten messages are
        skipped.
        """
        for scheduled_id in scheduled_ids:
            if (settled_message := self._settled_messages.get(scheduled_id)) is not None:
                self._settled_messages[scheduled_id] = settled_message._replace(position=position)
                self._settled_messages.move_to_end(scheduled_id)

    def requeue(self, scheduled_ids: Iterable[bytes], retry_at_ms: int | None = None) -> None:
        """
        Let taken messages wait again, because none of them was stored.

        Args:
            retry_at_ms: when they will be retried, by the boot clock. None keeps their previous
                time.
        """
        for scheduled_id in scheduled_ids:
            if (name := self._delivery_of.get(scheduled_id)) is not None:
                self._remove_delivery(name)
            self._settling.pop(scheduled_id, None)
            entry = self.entries.get(scheduled_id)
            if entry is not None:
                entry.retry_at_ms = entry.retry_at_ms if retry_at_ms is None else retry_at_ms
                self._schedule_entry(entry)

    def begin_drop(self, scheduled_ids: Iterable[bytes]) -> None:
        """Begin to drop messages. They are taken until `on_dropped` or `requeue` is called."""
        for scheduled_id in scheduled_ids:
            if (name := self._delivery_of.get(scheduled_id)) is not None:
                self._remove_delivery(name)
            entry = self.entries.get(scheduled_id)
            if entry is not None:
                entry.in_delivery = True
                self._settling[scheduled_id] = entry.place.position

    def on_dropped(self, scheduled_ids: Iterable[bytes], position: int) -> None:
        """Settle messages whose drop has become durable at this position."""
        for scheduled_id in scheduled_ids:
            self._settling.pop(scheduled_id, None)
            self._settle(scheduled_id, CancelOutcome.DROPPED, position)

    def _remove_delivery(self, name: str) -> None:
        """Remove a delivery. Its messages are then not in any delivery."""
        for scheduled_id in self.deliveries.pop(name).scheduled_ids:
            self._delivery_of.pop(scheduled_id, None)

    # ── the log ───────────────────────────────────────────────────────────────────────────────────
    def replay(self, record: Record, place: Place) -> None:
        """Apply a change in the log when the broker starts. Call `finish_replay` after the last
        one.
        """
        if isinstance(record, ScheduledMessageRecord):
            self.add(record, place)
        elif isinstance(record, Canceled):
            if (name := self._delivery_of.get(record.scheduled_id)) is not None:
                self._remove_delivery(name)  # it was requeued before the cancel
            self.on_canceled(record.scheduled_id, place.position)
        elif isinstance(record, Taken):
            self.begin_delivery(record, place.position)
        elif isinstance(record, DroppedMessages):
            self.begin_drop(record.scheduled_ids)
            self.on_dropped(record.scheduled_ids, place.position)
        elif isinstance(record, Delivered):
            if record.delivery in self.deliveries:
                self._remove_delivery(record.delivery)
            for scheduled_id in record.scheduled_ids:
                self._settle(scheduled_id, CancelOutcome.DELIVERED, place.position)

    def finish_replay(self) -> None:
        """Finish a replay: mark the messages of deliveries as taken. All others wait."""
        for name, delivery in list(self.deliveries.items()):
            if not all(scheduled_id in self.entries for scheduled_id in delivery.scheduled_ids):
                self._remove_delivery(name)
        for scheduled_id in self._delivery_of:
            self.entries[scheduled_id].in_delivery = True

    def relocate(self, records: Iterable[Record], place: Place) -> None:
        """Update the places of records that were rewritten. Messages that have been settled or
        forgotten in the meantime are not affected.
        """
        for record in records:
            if isinstance(record, ScheduledMessageRecord):
                if record.scheduled_id in self.entries:
                    self.entries[record.scheduled_id].place = place
            elif isinstance(record, Taken):
                if record.delivery in self.deliveries:
                    self.deliveries[record.delivery].position = place.position
            elif isinstance(record, Canceled):
                self._update_settled([record.scheduled_id], place.position)
            else:
                self._update_settled(record.scheduled_ids, place.position)

    def list_soonest(
        self, limit: int, subject: str | None = None
    ) -> Generator[None, None, tuple[int, list[ScheduledEntry]]]:
        """
        Find the next `limit` unsettled messages by delivery time, for all subjects or for one.

        Yields:
            None after each SEARCH_COUNT messages, to let other tasks run. Messages that are settled
            in between are omitted.

        Returns:
            The total number of such messages, and the next `limit` of them.
        """
        entries = list(self.entries.values())
        soonest: list[ScheduledEntry] = []
        latest_ms = MAX_I64
        for start in range(0, len(entries), SEARCH_COUNT):
            soonest += [
                each
                for each in entries[start : start + SEARCH_COUNT]
                if each.deliver_at_ms < latest_ms and (subject is None or each.subject == subject)
            ]
            soonest = nsmallest(limit, soonest, key=attrgetter("deliver_at_ms"))
            if len(soonest) == limit:
                latest_ms = soonest[-1].deliver_at_ms
            yield
        count = len(self.entries) if subject is None else self.subject_amount(subject).messages
        return count, [each for each in soonest if each.scheduled_id in self.entries]

    # ── rewriting ─────────────────────────────────────────────────────────────────────────────────
    def is_needed(self, scheduled_id: bytes, place: Place) -> bool:
        """Return True if the record at `place` is the one that keeps a message, and the message is
        not being settled.
        """
        entry = self.entries.get(scheduled_id)
        return entry is not None and entry.place == place and scheduled_id not in self._settling

    def is_settling(self, position: int) -> bool:
        """Return True if records below `position` are of messages whose outcome is not durable
        yet.
        """
        return any(earliest < position for earliest in self._settling.values())

    def open_deliveries(self, below: int = MAX_I64) -> list[Taken]:
        """Return the deliveries whose records are below this position."""
        return [
            Taken(each.name, each.subject, each.logical_partition, each.scheduled_ids)
            for each in self.deliveries.values()
            if each.position < below
        ]

    def settled_changes(self, below: int = MAX_I64) -> list[Record]:
        """Return changes that say what became of the remembered messages whose outcomes are
        recorded below this position, in the order of their records.
        """
        changes: list[Record] = []
        settled = (
            (scheduled_id, message.outcome)
            for scheduled_id, message in self._settled_messages.items()
            if message.position < below
        )
        for outcome, group in groupby(settled, key=itemgetter(1)):
            ids = [scheduled_id for scheduled_id, _ in group]
            if outcome is CancelOutcome.CANCELED:
                changes += map(Canceled, ids)
                continue
            for start in range(0, len(ids), DELIVERY_COUNT_MAX):
                chunk = tuple(ids[start : start + DELIVERY_COUNT_MAX])
                is_delivered = outcome is CancelOutcome.DELIVERED
                changes.append(
                    Delivered(REWRITTEN, chunk) if is_delivered else DroppedMessages(chunk)
                )
        return changes

    # ── images ────────────────────────────────────────────────────────────────────────────────────
    def images(self) -> Iterator[ScheduleImage]:
        """
        Yield copies of parts of the index, which may change between the steps.

        What changes in between is in the copy in its state before or after the change, so the
        records from before the first step on have to be replayed over it.
        """
        entries = list(self.entries.values())
        # An outcome is true before its record is durable. Position 0: the record must be written
        # before any part of the log is removed.
        settled = [
            (each, message.outcome, 0 if message.position == NOT_DURABLE else message.position)
            for each, message in self._settled_messages.items()
        ]
        deliveries = [
            (each.name, each.subject, each.logical_partition, each.scheduled_ids, each.position)
            for each in self.deliveries.values()
        ]
        if deliveries or settled:
            yield ScheduleImage((), deliveries, settled)
        for start in range(0, len(entries), SEARCH_COUNT):
            yield ScheduleImage(
                [
                    (
                        each.scheduled_id,
                        each.deliver_at_ms,
                        each.subject,
                        each.size,
                        *each.place,
                        each.subject_id,
                    )
                    for each in entries[start : start + SEARCH_COUNT]
                ]
            )

    def restore(self, image: ScheduleImage) -> None:
        """Add the content of an image."""
        names: dict[str, str] = {}  # so that messages of a subject share its name
        for scheduled_id, at_ms, subject, size, position, length, subject_id in image.entries:
            self._add_entry(
                ScheduledEntry(
                    scheduled_id,
                    at_ms,
                    names.setdefault(subject, subject),
                    size,
                    Place(position, length),
                    subject_id=subject_id,
                )
            )
        for name, subject, logical_partition, scheduled_ids, position in image.deliveries:
            self.begin_delivery(Taken(name, subject, logical_partition, scheduled_ids), position)
        for scheduled_id, outcome, position in image.settled:
            self._settle(scheduled_id, outcome, position)

    @property
    def next_due_ms(self) -> int | None:
        """When the next message becomes due, in milliseconds since 1970, or None."""
        return self._next_time(self._due_heap)

    @property
    def next_try_ms(self) -> int | None:
        """When the next message will be retried, in milliseconds since boot, or None."""
        return self._next_time(self._retry_heap)

    def _next_time(self, heap: list[_Timer]) -> int | None:
        while heap:
            if self._is_current(heap[0], heap):
                return heap[0][0]
            heappop(heap)
        return None

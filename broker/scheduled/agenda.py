"""Which scheduled messages wait, which are due, and which are on their way to their subjects.
Pure.

    waiting ──due──▶ ready ──take──▶ taken ──begin──▶ in a delivery ──end──▶ delivered
       │ ▲                             │                    │
       │ └───────── give back ─────────┴── nothing stored ──┘
       └──cancel──▶ canceled           └──── drop ──────────┴─▶ dropped

Invariants
    A message is in one delivery at most.  A delivery is stored under one idempotency key with the
    same messages each time, so its messages are given back only when nothing of it can be stored. A
    message that was taken is not canceled, unless it was given back. A message is due by the
    calendar of the moment, and a pause between two tries is counted on the boot clock: a calendar
    that is set back neither lengthens a pause, nor leaves a message that is not due any more with
    those that are. A message is not written again behind the record that settles it, which would
    bring it back at a start. A message that was settled is known to a repeat of its sender, and to
    a cancel, also after a start: what settled it is written again, as long as it is among the
    SETTLED_MAX whose records are the last of the journal. The records of the journal, folded in
    their order, give the same waiting messages and deliveries.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from operator import attrgetter
from typing import NamedTuple

from ...protocol.errors import BusyError, NotFoundError, Reason
from ...protocol.ids import MAX_I64
from ...protocol.scheduled.receipt import CancelOutcome
from .name_bytes import NameBytes
from .records import (
    Canceled,
    Delivered,
    DroppedMessages,
    Place,
    Record,
    Taken,
    Waits,
    WaitsForSubject,
    overhead_of,
)

SETTLED_MAX = 10_000
"""Delivered, canceled and dropped messages that are remembered, for repeated calls."""
SETTLED_BYTES = 20
"""Bytes in the journal of what settled a message, once it was written again; about."""
WRITTEN_AGAIN = ""
"""The name of a record about messages of several stored deliveries."""
NOT_WRITTEN = 0
"""Instead of a segment: what settled a message is not durable yet."""
DUE_MAX = 1_000
"""Messages that become ready in one step; a quarter of a million at once would keep the event loop
for seconds.
"""
WITHDRAWN_MAX = 1_000
"""Times of messages that wait no more are remembered up to this number, and as many as wait."""
LOOK_COUNT = 2_000
"""Messages that a look for the soonest ones takes in one step: about 1 ms.  Before the first step
they are all noted, in 5 ms of 250,000.
"""
DELIVERY_COUNT_MAX = 1_000
DELIVERY_BYTES_MAX = 1 << 20
"""A batch has room for a message of the largest size, so the first message always fits."""


_Moment = tuple[int, int, bytes]
"""A time in milliseconds, a serial number, and the message that waits for it."""


@dataclass(slots=True)
class ScheduledEntry:
    """A scheduled message without its value, which stays in the journal."""

    scheduled_id: bytes
    deliver_at_ms: int
    subject: str
    size: int
    place: Place
    again_ms: int = 0
    """When it is tried again, by the boot clock; 0: it waits for its time, by the calendar."""
    taken: bool = False
    subject_id: int = 0
    """The only subject that gets it; 0: the one that has the name then."""

    @property
    def message_bytes(self) -> int:
        """Bytes of value and properties, which the limit of its subject is for."""
        return self.size - overhead_of(self.subject)


@dataclass(slots=True)
class ScheduledDelivery:
    """A batch of messages that may be stored already."""

    name: str
    subject: str
    logical: int
    scheduled_ids: tuple[bytes, ...]
    segment: int
    """The segment of the journal that has its record."""


class ScheduledAmount(NamedTuple):
    """An amount of scheduled messages: kept of a subject or of all, wanted, or allowed."""

    messages: int = 0
    bytes: int = 0
    """In the journal, about."""

    def plus(self, messages: int, size: int) -> ScheduledAmount:
        """The same with other messages; with fewer, if the numbers are negative."""
        return ScheduledAmount(self.messages + messages, self.bytes + size)


class _Settled(NamedTuple):
    """What became of a message, and the segment that has the record of it."""

    outcome: CancelOutcome
    segment: int


class Agenda:
    """The scheduled messages of a broker."""

    def __init__(self) -> None:
        self.entries: dict[bytes, ScheduledEntry] = {}
        self.deliveries: dict[str, ScheduledDelivery] = {}
        self.bytes = 0
        """Bytes of the entries in the journal, about."""
        self._shares: dict[str, ScheduledAmount] = {}
        """The entries by subject."""
        self.names = NameBytes()
        """Bytes of the entries in the journal, by subject and by the beginning of subjects."""
        self._delivery_of: dict[bytes, str] = {}
        self._heap: list[_Moment] = []
        """The times of messages that wait, and of some that wait no more."""
        self._again: list[_Moment] = []
        """The same of next tries, by the boot clock."""
        self._serial = 0
        self._ready: dict[str, deque[bytes]] = {}
        """Due messages by subject, in the order of their times."""
        self._busy: set[str] = set()
        """Subjects whose next delivery waits for the one before it."""
        self._settling: dict[bytes | str, set[int]] = {}
        """Canceled messages and stored deliveries whose records are not durable yet, with the
        segments that have them.
        """
        self._settled: OrderedDict[bytes, _Settled] = OrderedDict()
        """In the order of their records in the journal."""

    # ── messages ──────────────────────────────────────────────────────────────────────────────────
    def knows(self, scheduled_id: bytes) -> bool:
        """True for a message that waits, is on its way, or was settled lately."""
        return scheduled_id in self.entries or scheduled_id in self._settled

    def add(self, record: Waits, place: Place) -> None:
        """Add a message, or note the new place of its record."""
        entry = self.entries.get(record.scheduled_id)
        if entry is not None:
            entry.place = place
            return
        entry = ScheduledEntry(
            record.scheduled_id, record.deliver_at_ms, record.subject, record.size, place
        )
        if isinstance(record, WaitsForSubject):
            entry.subject_id = record.subject_id
        self._settled.pop(record.scheduled_id, None)
        self.entries[entry.scheduled_id] = entry
        self._count(entry.subject, 1, entry.size)
        self._wait(entry)

    def share(self, subject: str) -> ScheduledAmount:
        """The entries of a subject."""
        return self._shares.get(subject, ScheduledAmount())

    def _count(self, subject: str, count: int, size: int) -> None:
        self.bytes += size
        self.names.add(subject, size)
        share = self._shares[subject] = self.share(subject).plus(count, size)
        if not share.messages:
            del self._shares[subject]

    def _wait(self, entry: ScheduledEntry) -> None:
        entry.taken = False
        self._serial += 1
        heap, at_ms = self._heap, entry.deliver_at_ms
        if entry.again_ms:
            heap, at_ms = self._again, entry.again_ms
        heappush(heap, (at_ms, self._serial, entry.scheduled_id))
        if len(heap) > 2 * len(self.entries) + WITHDRAWN_MAX:
            heap[:] = {moment[2]: moment for moment in heap if self._is_of(moment, heap)}.values()
            heapify(heap)

    def _is_of(self, moment: _Moment, heap: list[_Moment]) -> bool:
        """True if a message waits for this moment of a heap still."""
        at_ms, _, scheduled_id = moment
        entry = self.entries.get(scheduled_id)
        if entry is None or entry.taken:
            return False
        return at_ms == (entry.again_ms or entry.deliver_at_ms) and (heap is self._again) == bool(
            entry.again_ms
        )

    def cancel(self, scheduled_id: bytes) -> CancelOutcome | None:
        """
        Begin to cancel a message.

        Returns:
            The outcome, if it is settled; None if it was waiting: it is taken until `canceled` or
            `give_back`.

        Raises:
            NotFoundError
            BusyError: it may be given back yet, so no outcome can be told.
        """
        entry = self.entries.get(scheduled_id)
        if entry is not None:
            if entry.taken:
                raise BusyError(Reason.SCHEDULED_TAKEN, scheduled_id=scheduled_id.hex())
            entry.taken = True
            self._settling[scheduled_id] = {entry.place.segment}
            return None
        settled = self._settled.get(scheduled_id)
        if settled is None:
            raise NotFoundError(Reason.SCHEDULED_UNKNOWN, scheduled_id=scheduled_id.hex())
        return settled.outcome

    def is_taken(self, scheduled_id: bytes) -> bool:
        """True while a message is neither settled nor waits."""
        entry = self.entries.get(scheduled_id)
        return entry is not None and entry.taken

    def canceled(self, scheduled_id: bytes, segment: int) -> None:
        """Note that a cancel is durable in this segment."""
        self._settling.pop(scheduled_id, None)
        self._settle(scheduled_id, CancelOutcome.CANCELED, segment)

    def _settle(self, scheduled_id: bytes, outcome: CancelOutcome, segment: int) -> None:
        entry = self.entries.pop(scheduled_id, None)
        if entry is not None:
            self._count(entry.subject, -1, -entry.size)
        self._settled[scheduled_id] = _Settled(outcome, segment)
        self._settled.move_to_end(scheduled_id)
        if len(self._settled) > SETTLED_MAX:
            self._settled.popitem(last=False)

    # ── deliveries ────────────────────────────────────────────────────────────────────────────────
    def take(self, now_ms: int, boot_ms: int = 0) -> list[list[ScheduledEntry]]:
        """
        Take messages whose time has come: of each subject that is not busy, the next batch, the
        oldest first.

        At most DUE_MAX become due in one call: `next_due_ms` and `next_try_ms` tell of more.  The
        subjects are busy until `free`.

        Args:
            now_ms: the calendar.
            boot_ms: the boot clock, for those that are tried again.
        """
        for heap, until_ms in ((self._again, boot_ms), (self._heap, now_ms)):
            for _ in range(DUE_MAX):
                if not heap or heap[0][0] > until_ms:
                    break
                moment = heappop(heap)
                if self._is_of(moment, heap):
                    entry = self.entries[moment[2]]
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
            if entry is not None and not entry.taken and entry.deliver_at_ms > now_ms:
                entry.again_ms = 0  # the calendar was set back
                self._wait(entry)
            elif entry is not None and not entry.taken:
                if batch and entry.subject_id != batch[0].subject_id:
                    break
                size += entry.size
                if batch and size > DELIVERY_BYTES_MAX:
                    break
                entry.taken = True
                batch.append(entry)
            ready.popleft()
        return batch

    def free(self, subject: str) -> None:
        """Let the next delivery of a subject begin."""
        self._busy.discard(subject)

    def begin(self, record: Taken, segment: int) -> ScheduledDelivery:
        """Note a delivery whose record is durable in this segment."""
        for scheduled_id in record.scheduled_ids:
            before = self._delivery_of.get(scheduled_id)
            if before is not None and before != record.delivery:
                self._dissolve(before)
            self._delivery_of[scheduled_id] = record.delivery
        delivery = ScheduledDelivery(
            record.delivery, record.subject, record.logical, record.scheduled_ids, segment
        )
        self.deliveries[record.delivery] = delivery
        return delivery

    def end(self, name: str) -> None:
        """Note that the messages of a delivery are stored; `ended` follows when its record is
        durable.
        """
        delivery = self.deliveries.get(name)
        if delivery is not None:
            self._dissolve(name)
            known = [each for each in delivery.scheduled_ids if each in self.entries]
            segments = {self.entries[each].place.segment for each in known}
            self._settling[name] = segments | {delivery.segment}
            for scheduled_id in delivery.scheduled_ids:
                self._settle(scheduled_id, CancelOutcome.DELIVERED, NOT_WRITTEN)

    def ended(self, record: Delivered, segment: int) -> None:
        """Note that the record of a stored delivery is durable in this segment."""
        self._settling.pop(record.delivery, None)
        self._place_settled(record.scheduled_ids, segment)

    def _place_settled(self, scheduled_ids: Iterable[bytes], segment: int) -> None:
        """Note the segment with the last record of messages that are settled and not forgotten."""
        for scheduled_id in scheduled_ids:
            if (settled := self._settled.get(scheduled_id)) is not None:
                self._settled[scheduled_id] = settled._replace(segment=segment)
                self._settled.move_to_end(scheduled_id)

    def give_back(self, scheduled_ids: Iterable[bytes], again_ms: int | None = None) -> None:
        """
        Have messages that were taken, and of which none is stored, wait.

        Args:
            again_ms: until when, by the boot clock; None: as before.
        """
        for scheduled_id in scheduled_ids:
            if (name := self._delivery_of.get(scheduled_id)) is not None:
                self._dissolve(name)
            self._settling.pop(scheduled_id, None)
            entry = self.entries.get(scheduled_id)
            if entry is not None:
                entry.again_ms = entry.again_ms if again_ms is None else again_ms
                self._wait(entry)

    def drop(self, scheduled_ids: Iterable[bytes]) -> None:
        """Begin to drop messages that were taken: they are taken until `dropped` or `give_back`."""
        for scheduled_id in scheduled_ids:
            if (name := self._delivery_of.get(scheduled_id)) is not None:
                self._dissolve(name)
            entry = self.entries.get(scheduled_id)
            if entry is not None:
                self._settling[scheduled_id] = {entry.place.segment}

    def dropped(self, scheduled_ids: Iterable[bytes], segment: int) -> None:
        """Note that messages are dropped, durably in this segment."""
        for scheduled_id in scheduled_ids:
            self._settling.pop(scheduled_id, None)
            self._settle(scheduled_id, CancelOutcome.DROPPED, segment)

    def _dissolve(self, name: str) -> None:
        """Forget a delivery, whose messages are in no other."""
        for scheduled_id in self.deliveries.pop(name).scheduled_ids:
            self._delivery_of.pop(scheduled_id, None)

    # ── the journal ───────────────────────────────────────────────────────────────────────────────
    def replay(self, record: Record, place: Place) -> None:
        """Fold a record of the journal, at a start; `finish` ends it."""
        if isinstance(record, Waits):
            self.add(record, place)
        elif isinstance(record, Canceled):
            if (name := self._delivery_of.get(record.scheduled_id)) is not None:
                self._dissolve(name)  # it was given back before the cancel
            self.canceled(record.scheduled_id, place.segment)
        elif isinstance(record, Taken):
            self.begin(record, place.segment)
        elif isinstance(record, DroppedMessages):
            self.drop(record.scheduled_ids)
            self.dropped(record.scheduled_ids, place.segment)
        elif isinstance(record, Delivered):
            if record.delivery in self.deliveries:
                self._dissolve(record.delivery)
            for scheduled_id in record.scheduled_ids:
                self._settle(scheduled_id, CancelOutcome.DELIVERED, place.segment)

    def finish(self) -> None:
        """End a replay: messages of deliveries are taken, all others wait."""
        for name, delivery in list(self.deliveries.items()):
            if not all(scheduled_id in self.entries for scheduled_id in delivery.scheduled_ids):
                self._dissolve(name)
        for scheduled_id in self._delivery_of:
            self.entries[scheduled_id].taken = True

    def move(self, records: Iterable[Record], place: Place) -> None:
        """Note where records were written again; those that were settled or forgotten meanwhile
        stay so.
        """
        for record in records:
            if isinstance(record, Waits):
                if record.scheduled_id in self.entries:
                    self.entries[record.scheduled_id].place = place
            elif isinstance(record, Taken):
                if record.delivery in self.deliveries:
                    self.deliveries[record.delivery].segment = place.segment
            elif isinstance(record, Canceled):
                self._place_settled([record.scheduled_id], place.segment)
            else:
                self._place_settled(record.scheduled_ids, place.segment)

    def soonest(
        self, limit: int, subject: str | None = None
    ) -> Generator[None, None, tuple[int, list[ScheduledEntry]]]:
        """
        Look for the `limit` first messages by time that wait or are on their way, of all subjects
        or one.

        Yields:
            Behind each LOOK_COUNT of them, so that other work can be done; messages that are
            settled then are left out.

        Returns:
            Their number, and the first ones.
        """
        entries = list(self.entries.values())
        first: list[ScheduledEntry] = []
        before_ms = MAX_I64
        for start in range(0, len(entries), LOOK_COUNT):
            first += [
                each
                for each in entries[start : start + LOOK_COUNT]
                if each.deliver_at_ms < before_ms and (subject is None or each.subject == subject)
            ]
            first = nsmallest(limit, first, key=attrgetter("deliver_at_ms"))
            if len(first) == limit:
                before_ms = first[-1].deliver_at_ms
            yield
        count = len(self.entries) if subject is None else self.share(subject).messages
        return count, [each for each in first if each.scheduled_id in self.entries]

    @property
    def journal_bytes(self) -> int:
        """Bytes of the journal that are needed, about."""
        return self.bytes + SETTLED_BYTES * len(self._settled)

    def needed(self, records: Iterable[Record], segment: int) -> list[Record]:
        """What must be written again of the records of this segment, before the segment is
        removed.
        """
        needed: list[Record] = []
        delivered: dict[bytes, None] = {}
        for record in records:
            if isinstance(record, Delivered):
                delivered |= dict.fromkeys(self._settled_in(record.scheduled_ids, segment))
            elif isinstance(record, DroppedMessages):
                if known := self._settled_in(record.scheduled_ids, segment):
                    needed.append(DroppedMessages(known))
            elif self._is_needed(record, segment):
                needed.append(record)
        if delivered:
            needed.append(Delivered(WRITTEN_AGAIN, tuple(delivered)))
        return needed

    def _is_needed(self, record: Waits | Taken | Canceled, segment: int) -> bool:
        if isinstance(record, Waits):
            entry = self.entries.get(record.scheduled_id)
            canceling = record.scheduled_id in self._settling
            return entry is not None and entry.place.segment == segment and not canceling
        if isinstance(record, Taken):
            delivery = self.deliveries.get(record.delivery)
            return delivery is not None and delivery.segment == segment
        return bool(self._settled_in([record.scheduled_id], segment))

    def _settled_in(self, scheduled_ids: Iterable[bytes], segment: int) -> tuple[bytes, ...]:
        """The messages whose end is in this segment; not forgotten ones, which may be sent anew and
        are not settled then.
        """
        return tuple(
            each
            for each in scheduled_ids
            if (settled := self._settled.get(each)) is not None and settled.segment == segment
        )

    def is_settling(self, segment: int) -> bool:
        """True if this segment has records of messages that are settled, durably only when what is
        written now is.
        """
        return any(segment in segments for segments in self._settling.values())

    @property
    def next_due_ms(self) -> int | None:
        """When the next message is due that is not due yet, by the calendar; None without one."""
        return self._next_of(self._heap)

    @property
    def next_try_ms(self) -> int | None:
        """When the next message is tried again, by the boot clock; None without one."""
        return self._next_of(self._again)

    def _next_of(self, heap: list[_Moment]) -> int | None:
        while heap:
            if self._is_of(heap[0], heap):
                return heap[0][0]
            heappop(heap)
        return None

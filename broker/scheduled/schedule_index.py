"""Keeps track of scheduled messages: which wait, which are due, and which are on their way to their
subjects. Pure.

    waiting ──due──▶ ready ──take──▶ taken ──begin──▶ in a delivery ──end──▶ delivered
       │ ▲                             │                    │
       │ └───────── give back ─────────┴── nothing stored ──┘
       └──cancel──▶ canceled           └──── drop ──────────┴─▶ dropped

Invariants
    A message is in at most one delivery. A delivery is stored under one idempotency key with the
    same messages each time, so its messages are given back only when nothing of it can be stored. A
    taken message is not canceled unless it was given back. A message is due by the present time of
    the calendar, and a pause between two tries is counted on the boot clock: a calendar that is set
    back does not lengthen a pause, and a message that is no longer due leaves the due ones. A
    message is not written again after the record that settles it, because that would restore it at
    a start. A repeated call of its sender, or a cancel, finds a settled message even after a start:
    the record that settled it is written again, as long as it is among the SETTLED_MAX whose
    records are the last of the journal. The records of the journal, folded in their order, give the
    same waiting messages and deliveries.
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
"""The number of delivered, canceled and dropped messages that are remembered for repeated calls."""
SETTLED_BYTES = 20
"""The approximate number of bytes that a settled message takes in the journal once its record was
written again.
"""
WRITTEN_AGAIN = ""
"""The delivery name of a record about messages of several stored deliveries."""
NOT_WRITTEN = 0
"""The segment number of a settled message whose record is not durable yet."""
DUE_MAX = 1_000
"""The number of messages that become ready in one step. A quarter of a million at once would occupy
the event loop for seconds.
"""
WITHDRAWN_MAX = 1_000
"""The number of times of messages that no longer wait that are kept, in addition to as many as
there are messages.
"""
LOOK_COUNT = 2_000
"""The number of messages that a search for the soonest ones examines in one step, which takes about
1 ms. Before the first step all of them are listed, which takes 5 ms for 250,000.
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
    """The time of the boot clock at which it is tried again, in milliseconds; 0 if it waits for its
    time by the calendar.
    """
    taken: bool = False
    subject_id: int = 0
    """The id of the only subject that receives it; 0 if the subject that has the name at that time
    receives it.
    """

    @property
    def message_bytes(self) -> int:
        """The number of bytes of value and properties, to which its subject's limit applies."""
        return self.size - overhead_of(self.subject)


@dataclass(slots=True)
class ScheduledDelivery:
    """A batch of messages that may already be stored."""

    name: str
    subject: str
    logical: int
    scheduled_ids: tuple[bytes, ...]
    segment: int
    """The number of the journal's segment that contains its record."""


class ScheduledAmount(NamedTuple):
    """An amount of scheduled messages: of a subject or of all, kept, wanted or allowed."""

    messages: int = 0
    bytes: int = 0
    """The approximate number of bytes in the journal."""

    def plus(self, messages: int, size: int) -> ScheduledAmount:
        """Return the amount with more messages, or with fewer if the numbers are negative."""
        return ScheduledAmount(self.messages + messages, self.bytes + size)


class _Settled(NamedTuple):
    """The outcome of a message, and the segment that contains the record of it."""

    outcome: CancelOutcome
    segment: int


class ScheduleIndex:
    """The scheduled messages of a broker."""

    def __init__(self) -> None:
        self.entries: dict[bytes, ScheduledEntry] = {}
        self.deliveries: dict[str, ScheduledDelivery] = {}
        self.bytes = 0
        """The approximate number of bytes that the entries take in the journal."""
        self._shares: dict[str, ScheduledAmount] = {}
        """Subject → the amount of its entries."""
        self.names = NameBytes()
        """The bytes of the entries in the journal, by subject and by the beginnings of subjects."""
        self._delivery_of: dict[bytes, str] = {}
        self._heap: list[_Moment] = []
        """The times of messages that wait, and of some that no longer wait."""
        self._again: list[_Moment] = []
        """The times of next tries, by the boot clock, in the same way."""
        self._serial = 0
        self._ready: dict[str, deque[bytes]] = {}
        """Subject → its due messages, in the order of their times."""
        self._busy: set[str] = set()
        """The subjects whose next delivery waits for the previous one."""
        self._settling: dict[bytes | str, set[int]] = {}
        """Canceled messages, and stored deliveries, whose records are not durable yet → the
        segments that contain them.
        """
        self._settled: OrderedDict[bytes, _Settled] = OrderedDict()
        """Message id → outcome, in the order of their records in the journal."""

    # ── messages ──────────────────────────────────────────────────────────────────────────────────
    def knows(self, scheduled_id: bytes) -> bool:
        """Return True for a message that waits, is on its way, or was settled lately."""
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
        """Return the amount of a subject's entries."""
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
        """Return True if a message still waits for this moment of a heap."""
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
            The outcome, if the message is settled. None if it was waiting: it then counts as taken
            until `canceled` or `give_back`.

        Raises:
            NotFoundError
            BusyError: it may still be given back, so no outcome can be reported.
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
        """Return True while a message is neither settled nor waiting."""
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
        Take messages whose time has come: for each subject that is not busy, the next batch, the
        oldest first.

        At most DUE_MAX become due in one call; `next_due_ms` and `next_try_ms` show whether there
        are more. The subjects are busy until `free`.

        Args:
            now_ms: the time of the calendar.
            boot_ms: the time of the boot clock, for messages that are tried again.
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
        Let messages wait that were taken, and of which none is stored.

        Args:
            again_ms: the time of the boot clock until which they wait; None keeps their earlier
                time.
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
        """Begin to drop messages that were taken. They stay taken until `dropped` or
        `give_back`.
        """
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
        """Forget a delivery. Its messages are in no other one."""
        for scheduled_id in self.deliveries.pop(name).scheduled_ids:
            self._delivery_of.pop(scheduled_id, None)

    # ── the journal ───────────────────────────────────────────────────────────────────────────────
    def replay(self, record: Record, place: Place) -> None:
        """Fold a record of the journal at a start; `finish` ends the replay."""
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
        """End a replay: messages of deliveries are taken, and all others wait."""
        for name, delivery in list(self.deliveries.items()):
            if not all(scheduled_id in self.entries for scheduled_id in delivery.scheduled_ids):
                self._dissolve(name)
        for scheduled_id in self._delivery_of:
            self.entries[scheduled_id].taken = True

    def move(self, records: Iterable[Record], place: Place) -> None:
        """Note where records were written again. Messages that were settled or forgotten meanwhile
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
        Find the `limit` first messages by time that wait or are on their way, of all subjects or of
        one.

        Yields:
            After each LOOK_COUNT of them, so that other work can be done. Messages that are settled
            meanwhile are left out.

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
        """The approximate number of bytes of the journal that are needed."""
        return self.bytes + SETTLED_BYTES * len(self._settled)

    def needed(self, records: Iterable[Record], segment: int) -> list[Record]:
        """Return those of the records of this segment that must be written again before the segment
        is removed.
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
        """Return the messages whose outcome is recorded in this segment, without forgotten ones:
        those may be sent again and are then not settled.
        """
        return tuple(
            each
            for each in scheduled_ids
            if (settled := self._settled.get(each)) is not None and settled.segment == segment
        )

    def is_settling(self, segment: int) -> bool:
        """Return True if this segment has records of messages that are being settled, and whose
        settling is durable only when the present write is.
        """
        return any(segment in segments for segments in self._settling.values())

    @property
    def next_due_ms(self) -> int | None:
        """The time of the calendar at which the next message becomes due that is not due yet; None
        if there is none.
        """
        return self._next_of(self._heap)

    @property
    def next_try_ms(self) -> int | None:
        """The time of the boot clock at which the next message is tried again; None if there is
        none.
        """
        return self._next_of(self._again)

    def _next_of(self, heap: list[_Moment]) -> int | None:
        while heap:
            if self._is_of(heap[0], heap):
                return heap[0][0]
            heappop(heap)
        return None

"""Which offsets of a partition are pulled, in flight, failing, handled and acked. Pure.

    PullOffsets     begin at the cursor ─▶ take: the offsets of a batch that are new ─▶ … ─▶ the end
    Flights         in a shared group: handed over by the broker for `in_flight_ms` ─▶ may begin
                    within two thirds of it ─▶ in hand: renewed every sixth ─▶ handled, or failed:
                    it waits here, and is not renewed
                      ╰─ left by a loop without an ack: not renewed ─▶ after nine tenths a
                         failed try
    FailingMessages fails, and is tried again in place; hangs in its handler ─▶ known ─▶ each ack
                    names the oldest ─▶ handled, set aside, or given to the next owner ─▶ forgotten
    HandledOffsets  add ─▶ take: the lowest ranges are in flight ─▶ confirm, or retract
    PendingAcks     what the next ack request says, and when it is due

Invariants
    The next offset only rises, and passes no message that is neither pulled, acked nor removed.
    A handled offset leaves only when the broker has confirmed it. Each request has the lowest
    handled offsets, so the cursor rises in whatever order handlers end.
    What a request reported is dropped only when the broker has stored it: offsets, failed tries,
    begun suspects. Each request names the oldest message that fails or hangs, if there is one: from
    its first failure on until its ack leaves. A redriven message, which blocks nothing but its own
    key, is named only if there is no other.
    In a shared group nothing is pulled that would wait here while another consumer may be free. No
    handler begins with a message after two thirds of its time, because another consumer may soon
    have it. What a handler has is renewed, and is not handed out here a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from ...protocol.errors import OutcomeUnknownError
from ...protocol.frames import Ack
from ...protocol.ids import MAX_I64
from ...protocol.message import Message
from ...protocol.offsets import AckedOffsets, IntervalSet, Range
from ...protocol.parked import (
    FAILING_COUNTED_MAX,
    FAILURE_TEXT_CHARS_MAX,
    OTHERS_FAILING_MAX,
    FailingMessage,
    Failure,
    failing_message,
)
from ...protocol.text import key_digest

NEVER = MAX_I64
"""A time that does not come."""
Ref = tuple[int, int]
"""The partition that stores a message, and its offset."""
SECOND_MS = 1_000


class HeldLease(NamedTuple):
    """What requests name a session by."""

    partition_id: int
    group: str
    session: str
    """The id of the consumer's session at the metaserver; "" for a broadcast consumer."""
    token: int
    """The fencing token; 0 for a broadcast consumer."""


@dataclass(slots=True, eq=False)
class PullSize:
    """The free workers of a consumer, and how fast it handles one partition's messages."""

    by_hand: bool = field(kw_only=True, default=False)
    """True if a program takes messages, which counts as handling them: it may ack many of them
    later, at once.
    """
    free: int = 0
    """How many messages free workers of the consumer can begin; negative: how many wait for a
    worker.
    """
    received: int = 0
    """How many messages were pulled."""
    _since_ms: int = 0
    """When the present second began."""
    _finished: int = 0
    """How many messages were handled by then."""
    _rate: int = 0
    """How many messages were handled in the second before."""

    def decide(self, held: int, in_hand: int, limit: int, now_ms: int) -> int:
        """
        Return how many messages to pull now; 0: none.

        Args:
            held: how many messages have not ended.
            in_hand: how many of them workers or the program have.
            limit: how many may be held.
        """
        finished = self.received - held + (in_hand if self.by_hand else 0)
        elapsed_ms = now_ms - self._since_ms
        if elapsed_ms >= SECOND_MS:
            self._rate = max(0, finished - self._finished) * SECOND_MS // elapsed_ms
            self._since_ms, self._finished = now_ms, finished
        ahead = max(self._rate, finished - self._finished)
        size = min(limit - held, self.free + ahead)
        is_worth_it = self.free > 0 or 0 < ahead // 2 <= size
        return max(0, size) if is_worth_it else 0


RENEWALS_PER_FLIGHT = 6
ALONE_FROM = 2
"""After this many ended processes the broker hands a message out alone."""
SHARED_CRASHES_MAX = 3
"""After this many ended processes, of which the last had it alone, a message is set aside."""
EXPIRED_MAX = 100_000
"""The number of messages whose late acks count."""


@dataclass(slots=True, eq=False)
class Flights:
    """The messages of one partition of a shared group that are in flight at this session."""

    in_flight_ms: int
    is_shared: bool = field(kw_only=True)
    pull_size: PullSize = field(default_factory=PullSize)
    begin_until_ms: dict[int, int] = field(default_factory=dict)
    """Until when a message that is in hand or waits for a retry may begin again, by offset."""
    crashes: dict[int, int] = field(default_factory=dict)
    """How many processes ended with a message in flight, by offset."""
    left: set[int] = field(default_factory=set)
    """The offsets in hand whose program goes on without an ack."""
    expired: dict[int, None] = field(default_factory=dict)
    """The offsets that were not acked in time, of which a late ack still counts."""

    def begin_limit_ms(self, sent_ms: int) -> int:
        """Return until when messages of a pull that was sent at `sent_ms` may begin."""
        return sent_ms + self.in_flight_ms * 2 // 3 if self.is_shared else MAX_I64

    def expiry_ms(self, offset: int) -> int:
        """Return when a message that is not renewed counts as failed."""
        return self.begin_until_ms[offset] + self.in_flight_ms * 7 // 30  # 2/3 to 9/10

    def expire(self, offset: int) -> None:
        """Note that a message was not acked in time."""
        self.end(offset)
        self.expired[offset] = None
        if len(self.expired) > EXPIRED_MAX:
            del self.expired[next(iter(self.expired))]

    @property
    def renewal_ms(self) -> int:
        """The time between two renewals."""
        return self.in_flight_ms // RENEWALS_PER_FLIGHT

    def renew(self, offsets: list[int], sent_ms: int) -> None:
        """Restart the time in flight of messages that a request sent at `sent_ms` has renewed."""
        until_ms = self.begin_limit_ms(sent_ms)
        for offset in offsets:
            if offset in self.begin_until_ms:
                self.begin_until_ms[offset] = max(until_ms, self.begin_until_ms[offset])

    def end(self, offset: int) -> None:
        """Forget a message."""
        self.begin_until_ms.pop(offset, None)
        self.crashes.pop(offset, None)
        self.left.discard(offset)


RANGES_PER_ACK = 1_000


@dataclass(slots=True, eq=False)
class PullOffsets:
    """The offsets that are pulled next, and those that the broker has acks of."""

    acked: AckedOffsets = field(default_factory=AckedOffsets)
    """What is acked, as far as it decides what is handed out."""
    _acked_end: int = 0
    next_offset: int = -1
    """The first offset that is not pulled; -1 before `begin`."""
    cursor: int = 0
    """The group's cursor, as the broker last reported it."""
    end_offset: int | None = None
    """The offset after the last message, once the partition is sealed."""
    missed: int = 0
    """The number of messages that retention removed before they were pulled."""

    @property
    def is_exhausted(self) -> bool:
        """True once the partition is sealed and pulled to its end."""
        return self.end_offset is not None and self.next_offset >= self.end_offset

    @property
    def is_acked_to_end(self) -> bool:
        """True once the partition is sealed, and the broker has acks of everything."""
        return self.end_offset is not None and self.cursor >= self.end_offset

    def begin(self, cursor: int, ranges: tuple[Range, ...]) -> None:
        """Begin at `cursor`; the `ranges` above it are acked."""
        self.begin_with(AckedOffsets(cursor, list(ranges)))
        self.next_offset = self.cursor = cursor

    def begin_with(self, acked: AckedOffsets) -> None:
        """Begin with the first offset that is not acked."""
        self.acked = acked
        self._acked_end = max((acked.cursor, *(end for _, end in acked.ranges)))
        self.next_offset = self.cursor = acked.cursor

    def take(self, start: int, end: int) -> list[Range]:
        """
        Return the offsets of `[start, end)` that were neither pulled nor acked, and pass `end`.

        Raises:
            OutcomeUnknownError: messages before `start` are missing.
        """
        if start == self.next_offset and start >= self._acked_end:  # the usual case
            self.next_offset = end
            return [(start, end)] if start < end else []
        if start > self.next_offset:
            raise OutcomeUnknownError.of_read(
                f"the broker has left out messages [{self.next_offset}, {start}) of an answer"
            )
        ranges: list[Range] = []
        low = self.acked.next_unacked(max(start, self.next_offset))
        while low < end:
            high = min(end, self.acked.next_acked(low))
            ranges.append((low, high))
            low = self.acked.next_unacked(high)
        self.next_offset = max(end, self.next_offset)
        return ranges

    def ack(self, start: int, end: int) -> None:
        """Ack `[start, end)` here, because no broker keeps a cursor."""
        self.acked.add(start, end)
        self.cursor = self.acked.cursor

    def mark_acked(self, offset: int) -> None:
        """Record that a message of a shared group was handled here: it is not begun again, even if
        the broker hands it out before it has the ack.
        """
        self.acked.add(offset, offset + 1)

    def is_acked(self, offset: int) -> bool:
        """Return True if a message is known to be handled."""
        return offset in self.acked

    def skip_removed(self, first_offset: int) -> int:
        """Continue at `first_offset`, because older messages are removed. Return how many of them
        were not acked.
        """
        missed = self.acked.count_unacked(self.next_offset, first_offset)
        self.next_offset = first_offset
        self.missed += missed
        return missed


@dataclass(slots=True, eq=False)
class HandledOffsets:
    """The handled offsets that the broker has not confirmed."""

    _ranges: IntervalSet = field(default_factory=IntervalSet)
    _start: int = 0
    _end: int = 0
    """The range that grows while handlers end in order."""
    _ranges_max: int = RANGES_PER_ACK
    in_flight: tuple[Range, ...] = ()
    is_refused: bool = False
    """True from a refusal of the broker, which keeps a limited number of ranges, until it has
    everything.
    """

    def __bool__(self) -> bool:
        """Return True if an offset is not in flight to the broker."""
        return self._start < self._end or bool(len(self._ranges))

    def __contains__(self, offset: int) -> bool:
        """Return True if the broker has not confirmed the offset, which is handled."""
        return (
            self._start <= offset < self._end
            or offset in self._ranges
            or any(start <= offset < end for start, end in self.in_flight)
        )

    def add(self, start: int, end: int) -> None:
        """Add `[start, end)`, which is handled."""
        if start != self._end:
            self._fold()
            self._start = start
        self._end = end

    def _fold(self) -> None:
        if self._start < self._end:
            self._ranges.add(self._start, self._end)
        self._start = self._end

    def take(self) -> tuple[Range, ...]:
        """Return the lowest ranges, which are then in flight."""
        self._fold()
        ranges = list(self._ranges)
        self.in_flight = tuple(ranges[: self._ranges_max])
        self._ranges = IntervalSet(ranges[self._ranges_max :])
        return self.in_flight

    def confirm(self) -> tuple[Range, ...]:
        """Drop and return the ranges in flight, which the broker has stored."""
        confirmed = self.in_flight
        self.in_flight = ()
        self._ranges_max = min(2 * self._ranges_max, RANGES_PER_ACK)
        if not self:
            self.is_refused = False
        return confirmed

    def retract(self, *, is_refused: bool = False) -> bool:
        """
        Take back the ranges in flight, because their request failed.

        Args:
            is_refused: the broker keeps no more ranges: the next request has half as many.

        Returns:
            True if a request with fewer ranges may succeed now.
        """
        self._fold()
        count = len(self.in_flight)
        for start, end in self.in_flight:
            self._ranges.add(start, end)
        self.in_flight = ()
        if is_refused:
            self.is_refused = True
            self._ranges_max = max(1, count // 2)
        return count > 1


def ranges_of(messages: list[Message]) -> list[Range]:
    """Return the ranges of the messages' offsets; they are sorted by offset. A part without a gap
    costs nothing by message.
    """
    ranges: list[Range] = []
    parts = [(0, len(messages))]
    while parts:
        low, high = parts.pop()
        if low == high:
            continue
        start, end = messages[low].offset, messages[high - 1].offset + 1
        if end - start != high - low:
            middle = (low + high) // 2
            parts += ((middle, high), (low, middle))
        elif ranges and ranges[-1][1] == start:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((start, end))
    return ranges


class LastFailure(NamedTuple):
    """The last failure of a message, and since when it has been failing."""

    key: bytes
    since_ms: int
    failure: Failure
    running_ms: int | None
    """For how long its handler has been hanging; None if it is not."""


@dataclass(slots=True, eq=False)
class FailingMessages:
    """The failing and hanging messages, by the partition that stores them and their offset."""

    _own: dict[Ref, LastFailure] = field(default_factory=dict)
    _redriven: dict[Ref, LastFailure] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._own or self._redriven)

    def record(
        self, message: Message, failure: Failure, *, is_own: bool, running_ms: int | None = None
    ) -> bool:
        """
        Record the last failure of a message.

        Args:
            is_own: False for a redriven message.
            running_ms: for how long it has been hanging; None: it failed.

        Returns:
            True if it was not known to hang before.
        """
        known = self._own if is_own else self._redriven
        ref = message.partition_id, message.offset
        before = known.get(ref)
        if before is None and len(known) >= FAILING_COUNTED_MAX:
            return False
        since_ms = failure.at_ms - (running_ms or 0) if before is None else before.since_ms
        known[ref] = LastFailure(message.key, since_ms, failure, running_ms)
        return before is None or before.running_ms is None

    def forget(self, ref: Ref) -> None:
        """Forget a message that is handled, set aside, or given to the next owner."""
        self._own.pop(ref, None)
        self._redriven.pop(ref, None)

    def forget_acked(self, ranges: tuple[Range, ...]) -> None:
        """Forget messages of this partition whose acks leave."""
        if self._own and ranges:
            acked = IntervalSet(ranges)
            self._own = {ref: last for ref, last in self._own.items() if ref[1] not in acked}

    def oldest(self, handled: HandledOffsets) -> FailingMessage | None:
        """Return the oldest message of this partition that is not among the `handled` offsets; if
        there is none, the oldest redriven one. It has the others that failed last.
        """
        found = [
            (is_redriven, ref, last)
            for is_redriven, known in ((False, self._own), (True, self._redriven))
            for ref, last in known.items()
            if is_redriven or ref[1] not in handled
        ]
        if not found:
            return None
        first = min(found, key=lambda each: each[:2])
        others = nlargest(
            OTHERS_FAILING_MAX,
            (each for each in found if each is not first),
            key=lambda each: each[2].failure.at_ms,
        )
        return replace(
            _report(*first),
            others=tuple(_report(*each, text_max=OTHER_TEXT_CHARS_MAX) for each in others),
            others_count=min(len(found), FAILING_COUNTED_MAX) - 1,
        )


OTHER_TEXT_CHARS_MAX = 200


def _report(
    is_redriven: bool, ref: Ref, last: LastFailure, *, text_max: int = FAILURE_TEXT_CHARS_MAX
) -> FailingMessage:
    report = failing_message(
        ref[1],
        last.failure,
        key_digest=key_digest(last.key),
        since_ms=last.since_ms,
        source=ref[0] if is_redriven else None,
        running_ms=last.running_ms,
    )
    return report if len(report.text) <= text_max else replace(report, text=report.text[:text_max])


TRIES_PER_ACK = 1_000


@dataclass(slots=True, eq=False)
class PendingAcks:
    """The acks of one session."""

    handled: HandledOffsets = field(default_factory=HandledOffsets)
    due_ms: int = NEVER
    """When a request is due."""
    sent_ms: int = 0
    """When the last request was sent."""
    tries: dict[int, int] = field(default_factory=dict)
    """The failed tries by offset that are not stored."""
    begun: dict[int, int] = field(default_factory=dict)
    """The crash counts of suspects that begin, by offset, until they are stored."""
    failing: FailingMessages = field(default_factory=FailingMessages)
    sent: Ack | None = None
    """The request in flight."""
    awaited: dict[tuple[int, int], Message] = field(default_factory=dict)
    """Messages that wait for their ack: the key of a handled one (ack "each"), or the handler of
    one that was taken (ack "before").
    """

    @property
    def is_flushed(self) -> bool:
        """True if the broker has stored everything, or can store no more ranges."""
        if self.sent is not None or self.awaited:
            return False
        return self.handled.is_refused or not (self.handled or self.tries)

    def request(
        self,
        lease: HeldLease,
        now_ms: int,
        held: tuple[Range, ...],
        in_flight_ms: int,
        promise_ms: int = 0,
    ) -> Ack:
        """Return the next request, which is then in flight."""
        self.due_ms = NEVER
        self.sent_ms = now_ms
        tries = tuple(islice(self.tries.items(), TRIES_PER_ACK)) if self.tries else ()
        begun = tuple(self.begun.items()) if self.begun else ()
        ranges = self.handled.take()
        failing = None
        if self.failing:
            self.failing.forget_acked(ranges)
            failing = self.failing.oldest(self.handled)
        in_flight_ms = in_flight_ms if held else 0
        self.sent = Ack(*lease, ranges, tries, failing, begun, held, in_flight_ms, promise_ms)
        return self.sent

    def confirm(self) -> None:
        """Drop what the request in flight has reported: the broker has stored it."""
        sent = self.sent
        assert sent is not None
        self.sent = None
        for offset, attempt in sent.failed:
            if self.tries.get(offset) == attempt:
                del self.tries[offset]
        for offset, _ in sent.begun:
            self.begun.pop(offset, None)
        self.handled.confirm()

    def retract(self, *, is_refused: bool = False) -> bool:
        """Take back the request in flight; see `HandledOffsets.retract`."""
        self.sent = None
        return self.handled.retract(is_refused=is_refused)

"""One hosted partition: a fold over its records, the same in recovery and in service.  Pure.

    decide_… (raises, or says what to write)  ──▶  apply_… (at once)  ──▶  the record in the log  ──▶  durable_…

Between decision and durability the state runs ahead of the disk: `next_offset` is the next to give, `readable_offset`
the end of what readers may see.  If the disk refuses, `undo_…` brings the state back to what is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from ...protocol.control import GroupStatus, HostPartition, PartitionStatus
from ...protocol.errors import (
    CorruptLogError,
    OverloadedError,
    PartitionInUseError,
    SequenceReusedError,
    StaleRouteError,
)
from ...protocol.ids import MAX_I64, check_name
from ...protocol.limits import (
    GROUPS_PER_SUBJECT_MAX,
    PARTITION_MESSAGES_MAX,
    PRODUCERS_PER_PARTITION_MAX,
)
from ...protocol.offsets import AckedOffsets, IntervalSet, Range
from ...protocol.record import Header
from ...protocol.routing import PartitionState
from .appends import Duplicate, ProducerState, after_append, decide_append
from .in_flight import InFlight
from .pull_lock import PullLock, raise_fence
from .records import CursorBody, FenceBody

END_UNKNOWN = -1
"""The end of lost offsets of which only the first is known."""
LOST_MAX = 1_000
"""Ranges of lost offsets that are kept; a read finds further ones anew, because the index leads it there."""


class Group:
    """One consumer group on one partition."""

    __slots__ = (
        "_saved_version", "_version", "acked", "durable_cursor", "durable_fence", "durable_ranges", "in_flight", "kept",
        "lock", "name", "removed_unread",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = PullLock()
        self.durable_fence = 0
        """The highest fence that is on the disk."""
        self.acked = AckedOffsets()
        self._version = 0
        """Rises whenever the progress changes."""
        self._saved_version = 0
        """The version that is on the disk."""
        self.durable_cursor = 0
        """The cursor that is on the disk; no answer has a higher one."""
        self.durable_ranges: Sequence[Range] = ()
        """The acked ranges above it that are on the disk."""
        self.kept = False
        """A record of the group is on the disk: a restart finds it."""
        self.removed_unread = 0
        """Messages that retention removed before the group had acked them."""
        self.in_flight: InFlight | None = None
        """The messages that sessions of a shared group are handling; in memory only."""

    def handed_out(self) -> InFlight:
        """The messages in flight under the present token, which is a shared one."""
        if self.in_flight is None or self.in_flight.token != self.lock.fence:
            self.in_flight = InFlight(self.lock.fence)
        return self.in_flight

    def quiet(self, now_ms: int) -> bool:
        """True if its fence and progress are on the disk, and no session holds the lock."""
        return (
            self.durable_fence == self.lock.fence
            and not self.unsaved
            and self.lock.expires_at_ms <= now_ms
            and (self.in_flight is None or self.in_flight.empty(now_ms))
        )

    def skip_to(self, first_offset: int) -> None:
        """Count the offsets below `first_offset`, which retention has removed, as acked."""
        if self.acked.cursor < first_offset:
            self.acked.add(self.acked.cursor, first_offset)
            self.changed()

    def changed(self) -> None:
        """Its progress differs from what is on the disk until it is saved again."""
        self._version += 1

    @property
    def unsaved(self) -> bool:
        """True if its progress has changed since the newest record of it that is on the disk."""
        return self._version > self._saved_version

    def begin_save(self) -> tuple[CursorBody, Callable[[], None]]:
        """The record of its progress now, and what to call when that record is on the disk."""
        body = self.cursor_body()
        return body, partial(self._saved, body, self._version)

    def _saved(self, body: CursorBody, version: int) -> None:
        self.kept = True
        if version >= self._saved_version:
            self._saved_version = version
            self.durable_cursor, self.durable_ranges = body.cursor, body.ranges

    def cursor_body(self) -> CursorBody:
        """The record of its progress now."""
        acked = self.acked
        return CursorBody(
            self.name, self.lock.fence, acked.cursor, acked.ranges, self.removed_unread
        )

    def drained(self, end_offset: int) -> bool:
        """Is it acked up to `end_offset`, on the disk."""
        return self.durable_cursor >= end_offset


class Lost(NamedTuple):
    """Offsets `[start, end)` whose bytes the log has lost, at `position`; the end may be END_UNKNOWN."""

    start: int
    end: int
    position: int


AppendUndo = tuple[int, int, int, ProducerState | None, tuple[int, ProducerState] | None]


class HostedPartition:
    """The state of one partition; `facts` never change."""

    __slots__ = (
        "__weakref__", "appended_at_ms", "clashed", "ended", "facts", "fences_lost", "first_offset", "groups", "groups_told",
        "lost", "next_offset", "partition_id", "producers", "readable_offset", "sealed",
    )  # fmt: skip

    def __init__(self, facts: HostPartition) -> None:
        self.facts = facts
        self.partition_id: int = facts.partition.partition_id
        self.first_offset = 0
        self.next_offset = 0
        self.readable_offset = 0
        self.appended_at_ms = 0
        """Of the newest batch: times within a partition never fall."""
        self.sealed = False
        """No append is taken, from the decision to seal on."""
        self.ended = False
        """The seal, and every record before it, is on the disk: readers are told of an end only then."""
        self.producers: dict[int, ProducerState] = {}
        """By producer id, the one that appended longest ago first."""
        self.clashed: set[int] = set()
        """Producer ids whose epoch two producers use: it stores nothing more.  In memory only."""
        self.groups: dict[str, Group] = {}
        self.groups_told = False
        """The metaserver has told every group of the subject, and that is on the disk."""
        self.lost: tuple[Lost, ...] = ()
        """Lost offsets, in order: with any, it takes no appends, and reads stop before them."""
        self.fences_lost = False
        """A fence may have been lost: no consumer is let in, because its owner is not known."""

    # ── damage ────────────────────────────────────────────────────────────────────────────────────────
    def lose(self, start: int, end: int, *, position: int) -> None:
        """Note that offsets `[start, end)` are lost by damage at `position`; END_UNKNOWN: all from `start` on."""
        if len(self.lost) == LOST_MAX and self._is_left_out(start, end):
            return
        ranges = IntervalSet((one.start, _end_of(one.end)) for one in self.lost)
        ranges.add(start, _end_of(end))
        positions = {one.start: one.position for one in self.lost}
        lost = [
            Lost(start, END_UNKNOWN if end == MAX_I64 else end, positions.get(start, position))
            for start, end in ranges
        ]
        if len(lost) > LOST_MAX:
            lost[LOST_MAX - 1 :] = (
                lost[-1:] if lost[-1].end == END_UNKNOWN else lost[LOST_MAX - 1 : LOST_MAX]
            )
        self.lost = tuple(lost)

    def _is_left_out(self, start: int, end: int) -> bool:
        """True if the range lies behind the LOST_MAX ranges that are kept; a range without a known end is kept."""
        last = self.lost[-1]
        known = self.lost[-2] if last.end == END_UNKNOWN else last
        limit = last.start if last.end == END_UNKNOWN else MAX_I64
        return known.end < start and _end_of(end) < limit

    def check_whole(self) -> None:
        """Raises CorruptLogError if the log has lost messages or a fence of it."""
        if self.lost or self.fences_lost:
            position = self.lost[0].position if self.lost else -1
            raise self._damaged(position, "takes no messages")

    def check_end_known(self) -> None:
        """Raises CorruptLogError if its number of messages is not known."""
        if self.lost and self.lost[-1].end == END_UNKNOWN:
            raise self._damaged(self.lost[-1].position, "cannot be sealed")

    def check_owners(self) -> None:
        """Raises CorruptLogError if a fence may have been lost."""
        if self.fences_lost:
            position = self.lost[0].position if self.lost else -1
            raise self._damaged(position, "cannot tell who owns it")

    def readable_end(self, offset: int) -> int:
        """
        The offset at which a read from `offset` has to stop.

        Raises:
            CorruptLogError: `offset` itself is lost.
        """
        for one in self.lost:
            if offset < one.start:
                return one.start
            if one.end == END_UNKNOWN or offset < one.end:
                raise self._damaged(one.position, f"has lost offset {offset}")
        return self.readable_offset

    def _damaged(self, position: int, what: str) -> CorruptLogError:
        return CorruptLogError(
            f"partition {self.partition_id} {what}: the log is damaged at position {position}",
            partition_id=self.partition_id,
            position=position,
        )

    def quiet(self, now_ms: int) -> bool:
        """Nothing is under way: a restart would find it as it is."""
        return (
            not self.clashed
            and self.next_offset == self.readable_offset
            and self.sealed == self.ended
            and all(group.quiet(now_ms) for group in self.groups.values())
        )

    # ── appends ───────────────────────────────────────────────────────────────────────────────────────
    def decide_append(self, header: Header) -> Duplicate | None:
        """
        None to store the batch, Duplicate if it was stored before.

        Raises:
            CorruptLogError: the partition has lost messages or a fence; it takes none.
            StaleRouteError: it is sealed, and the batch is not a duplicate.
            OverloadedError: it has PARTITION_MESSAGES_MAX messages, and the batch is not a duplicate.
            SequenceGapError, SequenceReusedError, ProducerFencedError, InvalidRequestError: see `appends.decide_append`.
        """
        if self.lost or self.fences_lost:
            self.check_whole()
        producer_id = header.producer_id
        try:
            found = decide_append(
                self.producers.get(producer_id), header, clashed=producer_id in self.clashed
            )
        except SequenceReusedError:
            # The batches sent behind this one may have the sequence that is expected: they are refused too.
            self.clashed.add(producer_id)
            raise
        if found is None and self.sealed:
            raise StaleRouteError(partition_id=self.partition_id, end_offset=self.next_offset)
        if found is None and self.next_offset + header.count > PARTITION_MESSAGES_MAX:
            raise OverloadedError(
                f"partition {self.partition_id} has as many messages as a partition takes: move it, or resize its subject",
                limit=PARTITION_MESSAGES_MAX,
            )
        return found

    def apply_append(self, header: Header, *, base_offset: int, appended_at_ms: int) -> AppendUndo:
        """Store a batch; returns what `undo_append` needs."""
        assert base_offset == self.next_offset
        producers = self.producers
        before = producers.pop(header.producer_id, None)
        undo_time = self.appended_at_ms
        producers[header.producer_id] = after_append(before, header, base_offset=base_offset)
        self.clashed.discard(header.producer_id)
        forgotten = None
        if len(producers) > PRODUCERS_PER_PARTITION_MAX:
            oldest = next(iter(producers))
            forgotten = (oldest, producers.pop(oldest))
            self.clashed.discard(oldest)
        self.next_offset = base_offset + header.count
        self.appended_at_ms = max(appended_at_ms, undo_time)
        return base_offset, undo_time, header.producer_id, before, forgotten

    def undo_append(self, undo: AppendUndo) -> None:
        """Take back the newest append."""
        self.next_offset, self.appended_at_ms, producer_id, before, forgotten = undo
        del self.producers[producer_id]
        if forgotten is not None:
            self.producers = {forgotten[0]: forgotten[1], **self.producers}
        if before is not None:
            self.producers[producer_id] = before
        else:
            self.clashed.discard(producer_id)

    # ── groups ────────────────────────────────────────────────────────────────────────────────────────
    def group_for_acquire(self, name: str) -> Group:
        """
        The group, or a new one that is not kept yet.

        Raises:
            InvalidNameError, OverloadedError: an illegal name, or too many groups.
        """
        found = self.groups.get(name)
        if found is not None:
            return found
        check_name("consumer group", name)
        if len(self.groups) >= GROUPS_PER_SUBJECT_MAX:
            raise OverloadedError(f"a partition has at most {GROUPS_PER_SUBJECT_MAX} groups")
        return Group(name)

    def apply_fence(self, body: FenceBody) -> None:
        """A fence rose."""
        group = self.groups.get(body.group)
        if group is None:
            group = self.groups[body.group] = Group(body.group)
        raise_fence(group.lock, token=body.token, session=body.session)

    def undo_fence(self, name: str, before: PullLock | None) -> None:
        """Take back the newest fence of a group; None if the group was new with it."""
        if before is None:
            del self.groups[name]
        else:
            self.groups[name].lock = before

    def apply_cursor(self, body: CursorBody) -> None:
        """A group's progress, read from the log."""
        group = self.groups.get(body.group)
        if group is None:
            group = self.groups[body.group] = Group(body.group)
        group.acked = AckedOffsets(body.cursor, body.ranges)
        group.durable_cursor, group.durable_ranges = body.cursor, body.ranges
        group.removed_unread = max(group.removed_unread, body.removed_unread)
        group.kept = True

    # ── views ─────────────────────────────────────────────────────────────────────────────────────────
    def check_same_facts(self, facts: HostPartition) -> None:
        """Raises PartitionInUseError if `facts` differ in what never changes."""
        if not _same_facts(stored_facts(facts), self.facts):
            raise PartitionInUseError(
                f"partition {self.partition_id} is hosted with other facts, "
                f"as {self.facts.partition.name!r} of {self.facts.subject!r}",
                partition_id=self.partition_id,
            )

    def check_unused(self) -> None:
        """Raises PartitionInUseError if it is not new: it is sealed or has messages."""
        if self.sealed or self.next_offset:
            raise self._in_use()

    def check_empty(self) -> None:
        """Raises PartitionInUseError if it has, or had, messages."""
        if self.next_offset:
            raise self._in_use()

    def _in_use(self) -> PartitionInUseError:
        state = "sealed" if self.sealed else "open"
        return PartitionInUseError(
            f"partition {self.partition_id} is not new: it is {state} and has "
            f"{self.next_offset} messages",
            partition_id=self.partition_id,
            next_offset=self.next_offset,
        )

    def status(self, *, now_ms: int, group: str | None = None) -> PartitionStatus:
        """Its status as far as it is on the disk; with `group`, of that consumer group only."""
        groups = (
            GroupStatus(
                group=one.name,
                token=one.lock.fence,
                cursor=one.durable_cursor,
                acked_above=(above := sum(end - start for start, end in one.durable_ranges)),
                lag=self.readable_offset - max(one.durable_cursor, self.first_offset) - above,
                holder=one.lock.holder(now_ms),
                strategy=one.lock.strategy,
                by_operator=one.lock.by_operator,
                ttl_ms=one.lock.known_ttl_ms,
                removed_unread=one.removed_unread,
            )
            for name, one in sorted(self.groups.items())
            if one.kept and group in {None, name}
        )
        return PartitionStatus(
            partition_id=self.partition_id,
            subject=self.facts.subject,
            name=self.facts.partition.name,
            state=PartitionState.SEALED if self.ended else PartitionState.OPEN,
            first_offset=self.first_offset,
            next_offset=self.readable_offset,
            groups=tuple(groups),
            facts=self.facts,
            groups_told=self.groups_told,
        )


def _end_of(end: int) -> int:
    """The end of a lost range as a number; MAX_I64 for an unknown one."""
    return MAX_I64 if end == END_UNKNOWN else end


def stored_facts(facts: HostPartition) -> HostPartition:
    """The facts without those that change or that a broker does not need: address, state, logic start, groups."""
    partition = msgspec.structs.replace(
        facts.partition, address=None, state=PartitionState.OPEN, logic_start=0
    )
    return msgspec.structs.replace(facts, partition=partition, groups=None)


def _same_facts(one: HostPartition, other: HostPartition) -> bool:
    """True if they agree where both say something: the first to host it may have known less of the subject."""
    said = {one.order_strategy, other.order_strategy} - {None}
    counts = {one.partitions_wanted, other.partitions_wanted} - {0}
    same = (one.subject, one.partition, one.static) == (
        other.subject,
        other.partition,
        other.static,
    )
    kept = {one.retention, other.retention} - {None}
    return same and len(said) <= 1 and len(counts) <= 1 and len(kept) <= 1

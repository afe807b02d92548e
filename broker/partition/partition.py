"""The state of a hosted partition: a fold over its records, the same in recovery and in service.
Pure.

    decide_… (raises, or returns what to write)  ──▶  apply_… (at once)  ──▶  the record in the log
        ──▶  durable_…

Until the record is durable, the state is ahead of the disk: `next_offset` is the offset of the next
append, `readable_offset` the end of the messages that may be read. If the write fails, `undo_…`
restores the durable state.

Checks the facts of a new partition: names, ids, ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ...protocol.batch import largest_message
from ...protocol.control import GroupStatus, HostPartition, PartitionStatus
from ...protocol.errors import (
    CorruptLogError,
    FencedError,
    InvalidRequestError,
    OverloadedError,
    Reason,
    SequenceReusedError,
    StaleRouteError,
)
from ...protocol.errors.refusals import too_many_groups
from ...protocol.ids import MAX_I64, NO_PRODUCER, check_name, check_partition_name
from ...protocol.limits import (
    GROUPS_PER_SUBJECT_MAX,
    LOGICAL_PARTITIONS,
    MESSAGE_BYTES_MAX,
    PARTITION_MESSAGES_MAX,
    PRODUCERS_PER_PARTITION_MAX,
)
from ...protocol.message import message_too_large
from ...protocol.offsets import AckedOffsets, IntervalSet, Range
from ...protocol.parked import FailingMessage
from ...protocol.record import Header
from ...protocol.routing import PartitionState
from .appends import Duplicate, Producers, ProducerState, after_append, decide_append
from .in_flight import InFlight
from .parked import Parked
from .pull_lock import PullLock, raise_fence
from .records import CursorBody, FenceBody, ForgetBody, HoldBody, ParkedBody
from .suspects import Begun, Suspects

ATTEMPTS_MAX = 1_000
"""The number of messages of a group on a partition whose failed tries are kept: those with the
lowest offsets.
"""
END_UNKNOWN = -1
"""The end of a lost range of which only the start is known."""
FORGOTTEN_MAX = 1_000
"""The number of deleted groups whose tokens are refused. Earlier deletions are left out, because
none of their calls can still be on its way.
"""
LOST_MAX = 1_000
"""The number of lost ranges that are kept. A read detects further ones by itself, because the index
leads it to the damage.
"""


class Group:
    """A consumer group's fence, lock and progress on a partition."""

    __slots__ = (
        "_failing",
        "_saved_version",
        "acked",
        "attempts",
        "changing",
        "durable_cursor",
        "durable_fence",
        "durable_ranges",
        "in_flight",
        "kept",
        "lock",
        "name",
        "parked",
        "removed_unread",
        "suspects",
        "version",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = PullLock()
        self.durable_fence = 0
        """The highest durable fence."""
        self.acked = AckedOffsets()
        self.version = 0
        """The version of the progress, which rises whenever the progress changes."""
        self._saved_version = 0
        """The durable version."""
        self.durable_cursor = 0
        """The durable cursor. Answers never contain a higher one."""
        self.durable_ranges: Sequence[Range] = ()
        """The durable acked ranges above that cursor."""
        self.kept = False
        """True if a record of the group is durable, so that a restart finds the group."""
        self.removed_unread = 0
        """The number of messages that retention removed before the group had acked them."""
        self.in_flight: InFlight | None = None
        """The messages in flight of a shared group; in memory only."""
        self.attempts: dict[int, int] = {}
        """Offset → the number of failed tries, for messages that are not acked."""
        self.suspects = Suspects()
        """The messages that may have ended the process of an owner."""
        self.parked: Parked | None = None
        """The messages that the group has set aside, or None if it never did."""
        self._failing: FailingMessage | None = None
        """The oldest message that fails or hangs, as the owner has last reported. It may have been
        acked meanwhile.
        """
        self.changing = 0
        """The number of changes of `parked` that are not durable yet."""

    def parked_on(self, partition_id: int) -> Parked:
        """Return what the group has set aside on this partition, which must be its own."""
        if self.parked is None:
            self.parked = Parked(partition_id)
        return self.parked

    @property
    def parked_version(self) -> int:
        """See `Parked.seen_version`."""
        return 0 if self.parked is None else self.parked.seen_version

    @property
    def parked_messages(self) -> int:
        """The number of messages that are set aside here. Those that the children have adopted are
        counted there.
        """
        return 0 if self.parked is None or self.parked.frozen else self.parked.messages

    @property
    def left_to_children(self) -> bool:
        """See `Parked.left_to_children`."""
        return self.parked is not None and self.parked.left_to_children

    @property
    def retrying(self) -> int:
        """The number of messages set aside here that wait for retry."""
        return 0 if self.parked is None or self.parked.frozen else self.parked.retrying

    @property
    def needed_from(self) -> int:
        """The lowest offset whose message the group still needs."""
        first = None if self.parked is None else self.parked.first_own()
        return self.acked.cursor if first is None else min(first, self.acked.cursor)

    def failed(self, attempts: Sequence[tuple[int, int]]) -> None:
        """Note the failed tries of messages. Only those of the lowest ATTEMPTS_MAX offsets that are
        not acked are kept.
        """
        self.attempts.update(attempts)
        self.suspects.failed(offset for offset, _ in attempts)
        kept = sorted(offset for offset in self.attempts if offset not in self.acked)
        self.attempts = {offset: self.attempts[offset] for offset in kept[:ATTEMPTS_MAX]}
        self.changed()

    def note_failing(self, failing: FailingMessage | None) -> None:
        """Note the oldest message that fails, if there is one. The earlier start of its failure is
        kept, because a new owner does not know it.
        """
        known = self._failing
        if known is not None and failing is not None and _same_message(known, failing):
            failing = replace(failing, since_ms=min(known.since_ms, failing.since_ms))
        self._failing = failing

    def hangs_no_more(self) -> None:
        """Note that the owner has no messages any more: a message that hung with it no longer
        hangs.
        """
        if self._failing is not None and self._failing.running_ms is not None:
            self._failing = None

    @property
    def failing(self) -> FailingMessage | None:
        """The oldest message that fails or hangs and is not acked. A parked message counts while it
        is being redriven and fails again.
        """
        known = self._failing
        if known is None or known.source is None:
            return None if known is None or known.offset in self.acked else known
        redriven = self.parked is not None and self.parked.redrives((known.source, known.offset))
        return known if redriven else None

    def begins(self, begun: Sequence[Begun]) -> None:
        """Note suspects that their owner begins to handle."""
        self.suspects.begin(begun, self.acked)
        self.changed()

    def handed_out(self) -> InFlight:
        """Return the messages in flight under the present token, which a shared group has
        acquired.
        """
        if self.in_flight is None or self.in_flight.token != self.lock.fence:
            self.in_flight = InFlight(self.lock.fence)
        return self.in_flight

    def quiet(self, now_ms: int) -> bool:
        """Return True if fence and progress are durable, no session holds the lock, and no message
        is in flight.
        """
        return (
            self.durable_fence == self.lock.fence
            and not self.unsaved
            and not self.changing
            and self.lock.expires_at_ms <= now_ms
            and (self.in_flight is None or self.in_flight.is_empty(now_ms))
        )

    def skip_to(self, first_offset: int) -> None:
        """Mark the offsets below `first_offset`, which retention has removed, as acked."""
        if self.acked.cursor < first_offset:
            self.acked.add(self.acked.cursor, first_offset)
            self.changed()

    def changed(self) -> None:
        """Note that the progress has changed and has to be saved."""
        self.version += 1

    @property
    def unsaved(self) -> bool:
        """True if the progress has changed since its latest durable record."""
        return self.version > self._saved_version

    def saved(self, body: CursorBody, version: int) -> None:
        """Note that a record of the progress is durable; the record was made of this `version`."""
        self.kept = True
        if version >= self._saved_version:
            self._saved_version = version
            self.durable_cursor = body.cursor
            self.durable_ranges = body.ranges

    def cursor_body(self) -> CursorBody:
        """Return a record of the present progress."""
        acked = self.acked
        tries = self.attempts
        attempts = [pair for pair in tries.items() if pair[0] not in acked] if tries else []
        return CursorBody(
            self.name,
            self.lock.fence,
            acked.cursor,
            acked.ranges,
            removed_unread=self.removed_unread,
            attempts=attempts,
            begun=self.suspects.left(acked) if self.suspects.begun else [],
        )

    def drained(self, end_offset: int) -> bool:
        """Return True if every offset below `end_offset` is durably acked."""
        return self.durable_cursor >= end_offset


class Lost(NamedTuple):
    """Offsets `[start, end)` that are lost by damage of the log at `position`; `end` may be
    END_UNKNOWN.
    """

    start: int
    end: int
    position: int


AppendUndo = tuple[int, int, int, ProducerState | None, tuple[int, ProducerState] | None]


class HostedPartition:
    """The state of a partition; its `facts` never change."""

    __slots__ = (
        "__weakref__",
        "appended_at_ms",
        "clashed",
        "ended",
        "facts",
        "fences_lost",
        "first_offset",
        "forgotten",
        "groups",
        "groups_told",
        "holds",
        "lost",
        "next_offset",
        "partition_id",
        "producers",
        "readable_offset",
        "sealed",
    )

    def __init__(self, facts: HostPartition) -> None:
        self.facts = facts
        self.partition_id: int = facts.partition.partition_id
        self.first_offset = 0
        self.next_offset = 0
        self.readable_offset = 0
        self.appended_at_ms = 0
        """The time of the newest batch, or the time at which times begin, in milliseconds since
        1970. Times never fall within a partition.
        """
        self.sealed = False
        """True if the partition takes no more appends. It is set when the seal is decided."""
        self.ended = False
        """True if the seal is durable, and so is every record before it. Only then do readers see
        the end.
        """
        self.producers = Producers()
        self.clashed: set[int] = set()
        """Producers whose epoch is used by two clients. They store nothing more in this epoch. In
        memory only.
        """
        self.groups: dict[str, Group] = {}
        self.groups_told = False
        """True if the metaserver has sent every consumer group of the subject, and this is durable.
        """
        self.forgotten: dict[str, int] = {}
        """Deleted group → the highest of its tokens, all of which are refused. The latest deletion
        is last.
        """
        self.holds: dict[str, HoldBody] = {}
        """Job → the messages that it holds against retention. `store/holds.py` knows which holds
        have expired.
        """
        self.lost: tuple[Lost, ...] = ()
        """The lost ranges, in order. A partition that has any takes no appends, and reads stop
        before them.
        """
        self.fences_lost = False
        """True if a fence may be lost. The owner is then unknown, and no consumer may acquire the
        partition.
        """

    # ── damage ────────────────────────────────────────────────────────────────────────────────────
    def lose(self, start: int, end: int, *, position: int) -> None:
        """Note that damage at `position` has lost offsets `[start, end)`. END_UNKNOWN means all
        from `start` on.
        """
        if len(self.lost) == LOST_MAX and self._is_left_out(start, end):
            return
        ranges = IntervalSet((lost.start, _end_of(lost.end)) for lost in self.lost)
        ranges.add(start, _end_of(end))
        positions = {lost.start: lost.position for lost in self.lost}
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
        """Return True if the range lies after the LOST_MAX kept ranges. A range without a known end
        is always kept.
        """
        last = self.lost[-1]
        known = self.lost[-2] if last.end == END_UNKNOWN else last
        limit = last.start if last.end == END_UNKNOWN else MAX_I64
        return known.end < start and _end_of(end) < limit

    def check_whole(self) -> None:
        """Raise CorruptLogError if the log has lost messages or a fence of the partition."""
        if self.lost or self.fences_lost:
            position = self.lost[0].position if self.lost else -1
            raise self._damaged(position, "takes no messages")

    def check_end_known(self) -> None:
        """Raise CorruptLogError if the end of the partition is unknown."""
        if self.lost and self.lost[-1].end == END_UNKNOWN:
            raise self._damaged(self.lost[-1].position, "cannot be sealed")

    def check_owners(self) -> None:
        """Raise CorruptLogError if a fence may be lost."""
        if self.fences_lost:
            position = self.lost[0].position if self.lost else -1
            raise self._damaged(position, "cannot tell who owns it")

    def readable_end(self, offset: int) -> int:
        """
        Return the offset before which a read from `offset` has to stop.

        Raises:
            CorruptLogError: `offset` is lost.
        """
        for lost in self.lost:
            if offset < lost.start:
                return lost.start
            if lost.end == END_UNKNOWN or offset < lost.end:
                known = {} if lost.end == END_UNKNOWN else {"end_offset": lost.end}
                raise self._damaged(lost.position, f"has lost offset {offset}", **known)
        return self.readable_offset

    def _damaged(self, position: int, what: str, **more: int) -> CorruptLogError:
        return CorruptLogError(
            f"partition {self.partition_id} {what}: the log is damaged at position {position}",
            partition_id=self.partition_id,
            position=position,
            **more,
        )

    def quiet(self, now_ms: int) -> bool:
        """Return True if a restart would find the partition in this state."""
        return (
            not self.clashed
            and self.next_offset == self.readable_offset
            and self.sealed == self.ended
            and all(group.quiet(now_ms) for group in self.groups.values())
        )

    # ── appends ───────────────────────────────────────────────────────────────────────────────────
    def decide_append(self, header: Header) -> Duplicate | None:
        """
        Decide whether a batch is stored.

        Returns:
            None if the batch is to be stored, Duplicate if it was stored before.

        Raises:
            CorruptLogError: the partition has lost messages or a fence, and takes no messages.
            StaleRouteError: the partition is sealed, and the batch is no duplicate.
            OverloadedError: the partition has PARTITION_MESSAGES_MAX messages, and the batch is no
                duplicate.
            SequenceGapError, SequenceReusedError, ProducerFencedError, InvalidRequestError: see
                `appends.decide_append`.
        """
        if self.lost or self.fences_lost:
            self.check_whole()
        producer_id = header.producer_id
        try:
            duplicate = decide_append(
                self.producers.get(producer_id), header, clashed=producer_id in self.clashed
            )
        except SequenceReusedError:
            # A batch after the refused one may have the expected sequence; it must be refused too.
            self.clashed.add(producer_id)
            raise
        if duplicate is None and self.sealed:
            raise StaleRouteError(partition_id=self.partition_id, end_offset=self.next_offset)
        if duplicate is None and self.next_offset + header.count > PARTITION_MESSAGES_MAX:
            raise OverloadedError(
                f"partition {self.partition_id} is full: move it, or resize its subject",
                limit=PARTITION_MESSAGES_MAX,
            )
        return duplicate

    def check_message_sizes(self, record: memoryview, header: Header) -> None:
        """
        Check the messages of a batch that is to be stored, and that is larger than the limit when
        it is unpacked.

        Raises:
            MessageTooLargeError: a message is over the limit of the subject.
        """
        limit = self.facts.message_bytes_max or MESSAGE_BYTES_MAX
        size = largest_message(record, header)
        if size > limit:
            raise message_too_large(size, limit)

    def apply_append(self, header: Header, *, base_offset: int, appended_at_ms: int) -> AppendUndo:
        """Add a batch to the state, and return the argument of `undo_append`."""
        assert base_offset == self.next_offset
        producers, producer_id = self.producers, header.producer_id
        before = producers.remove(producer_id)
        undo_time = self.appended_at_ms
        forgotten = None
        if producer_id != NO_PRODUCER:
            if len(producers) >= PRODUCERS_PER_PARTITION_MAX:
                forgotten = producers.evict_oldest()
                self.clashed.discard(forgotten[0])
            producers[producer_id] = after_append(before, header, base_offset=base_offset)
            self.clashed.discard(producer_id)
        self.next_offset = base_offset + header.count
        self.appended_at_ms = max(undo_time, appended_at_ms)
        return base_offset, undo_time, producer_id, before, forgotten

    def undo_append(self, undo: AppendUndo) -> None:
        """Undo the newest append."""
        self.next_offset, self.appended_at_ms, producer_id, before, forgotten = undo
        self.producers.remove(producer_id)
        if forgotten is not None:
            self.producers = Producers({forgotten[0]: forgotten[1], **self.producers})
        if before is not None:
            self.producers[producer_id] = before
        else:
            self.clashed.discard(producer_id)

    # ── groups ────────────────────────────────────────────────────────────────────────────────────
    def group_for_acquire(self, name: str) -> Group:
        """
        Return the group of this name or, if there is none, a new group that is not added to the
        partition.

        Raises:
            InvalidRequestError: the name is illegal.
            OverloadedError: the partition has GROUPS_PER_SUBJECT_MAX groups.
        """
        group = self.groups.get(name)
        if group is not None:
            return group
        check_name("consumer group", name)
        if len(self.groups) >= GROUPS_PER_SUBJECT_MAX:
            raise too_many_groups(f"partition {self.partition_id}", GROUPS_PER_SUBJECT_MAX)
        return Group(name)

    def check_not_forgotten(self, name: str, token: int) -> None:
        """Raise FencedError if the token belongs to a deleted group of this name."""
        if token <= self.forgotten.get(name, 0):
            raise FencedError(
                f"consumer group {name!r} of this token was deleted",
                token=token,
                current_token=self.forgotten[name],
            )

    def apply_forget(self, body: ForgetBody) -> Callable[[], None]:
        """Forget a deleted group. Return a function that undoes it."""
        group, forgotten = self.groups.pop(body.group, None), self.forgotten
        kept = {name: token for name, token in forgotten.items() if name != body.group}
        kept[body.group] = max(body.token, forgotten.get(body.group, 0))
        self.forgotten = dict(list(kept.items())[-FORGOTTEN_MAX:])

        def undo() -> None:
            self.forgotten = forgotten
            if group is not None:
                self.groups[group.name] = group

        return undo

    def apply_fence(self, body: FenceBody) -> Callable[[], None]:
        """Raise the fence of a group, which may be new. Return a function that undoes it if the
        group existed.
        """
        group = self.groups.get(body.group)
        if group is None:
            group = self.groups[body.group] = Group(body.group)
        before, restore_tries = copy(group.lock), None
        if group.parked is not None and body.token > group.lock.fence:
            restore_tries = group.parked.forget_next_tries()
        raise_fence(group.lock, token=body.token, session=body.session)

        def undo() -> None:
            group.lock = before
            if restore_tries is not None:
                restore_tries()

        return undo

    def apply_cursor(self, body: CursorBody) -> None:
        """Set a group's progress to that of a record that was read from the log."""
        group = self.groups.get(body.group)
        if group is None:
            group = self.groups[body.group] = Group(body.group)
        group.acked = AckedOffsets(body.cursor, body.ranges)
        group.durable_cursor = body.cursor
        group.durable_ranges = body.ranges
        group.removed_unread = max(group.removed_unread, body.removed_unread)
        group.attempts = dict(body.attempts)
        group.suspects.begun = dict(body.begun)
        group.kept = True

    def apply_parked(self, body: ParkedBody) -> None:
        """Make changes of a group's parked messages that were read from the log."""
        group = self.groups.get(body.group)
        if group is None:
            group = self.groups[body.group] = Group(body.group)
        parked = group.parked_on(self.partition_id)
        for change in body.changes:
            parked.apply(change, at_ms=body.at_ms, acked=group.acked, token=body.token)
        parked.note_next_tries(body.next_tries)
        group.durable_cursor = group.acked.cursor
        group.durable_ranges = group.acked.ranges
        group.kept = True

    def apply_hold(self, body: HoldBody) -> Callable[[], None]:
        """Set or end a job's hold. Return a function that undoes it."""
        before = self.holds
        others = {job: hold for job, hold in before.items() if job != body.job}
        self.holds = {**others, body.job: body} if body.ttl_ms else others
        return partial(setattr, self, "holds", before)

    # ── views ─────────────────────────────────────────────────────────────────────────────────────
    def check_same_facts(self, facts: HostPartition) -> None:
        """Raise InvalidRequestError if `facts` contradict the facts of this partition."""
        if stored_facts(facts) != self.facts:
            raise InvalidRequestError(
                Reason.PARTITION_IN_USE,
                f"partition {self.partition_id} is hosted with other facts, "
                f"as {self.facts.partition.name!r} of {self.facts.subject!r}",
                partition_id=self.partition_id,
            )

    def check_unused(self) -> None:
        """Raise InvalidRequestError if the partition is sealed, or has or had messages."""
        if self.sealed or self.next_offset:
            raise self._in_use()

    def check_empty(self) -> None:
        """Raise InvalidRequestError if the partition has or had messages."""
        if self.next_offset:
            raise self._in_use()

    def _in_use(self) -> InvalidRequestError:
        state = "sealed" if self.sealed else "open"
        return InvalidRequestError(
            Reason.PARTITION_IN_USE,
            f"partition {self.partition_id} is not new: it is {state} and has "
            f"{self.next_offset} messages",
            partition_id=self.partition_id,
            next_offset=self.next_offset,
        )

    def status(self, *, now_ms: int, group: str | None = None) -> PartitionStatus:
        """Return the durable status. With `group`, it contains only that consumer group."""
        groups = (
            GroupStatus(
                group=progress.name,
                token=progress.lock.fence,
                cursor=progress.durable_cursor,
                acked_above=(above := sum(end - start for start, end in progress.durable_ranges)),
                lag=self.readable_offset - max(progress.durable_cursor, self.first_offset) - above,
                holder=progress.lock.holder(now_ms),
                strategy=progress.lock.strategy,
                by_operator=progress.lock.by_operator,
                ttl_ms=progress.lock.known_ttl_ms,
                removed_unread=progress.removed_unread,
                parked=progress.parked_messages,
                retrying=progress.retrying,
                failing=progress.failing,
                suspects=progress.acked.unacked(self.first_offset, progress.suspects.upto),
                left_to_children=progress.left_to_children,
                frozen=progress.parked is not None and progress.parked.frozen,
            )
            for name, progress in sorted(self.groups.items())
            if progress.kept and group in {None, name}
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
            forgotten_token=max(self.forgotten.values(), default=0),
        )


def _same_message(known: FailingMessage, other: FailingMessage) -> bool:
    return (known.source, known.offset) == (other.source, other.offset)


def _end_of(end: int) -> int:
    """Return the end of a lost range as a number; MAX_I64 stands for END_UNKNOWN."""
    return MAX_I64 if end == END_UNKNOWN else end


def stored_facts(facts: HostPartition) -> HostPartition:
    """Return the facts that a broker stores. They lack address, state, logic start, groups and
    times, which change or are unknown.
    """
    partition = msgspec.structs.replace(
        facts.partition, address=None, state=PartitionState.OPEN, logic_start=0
    )
    return msgspec.structs.replace(
        facts, partition=partition, groups=None, tokens_above=0, times_from_ms=0
    )


def check_facts(facts: HostPartition) -> None:
    """
    Check the facts of a partition.

    Raises:
        InvalidRequestError: an id, a range, the queue or the parents are impossible.
        InvalidRequestError: the subject's or the partition's name is illegal.
    """
    partition = facts.partition
    check_name("subject", facts.subject)
    check_partition_name(partition.name)
    if not 1 <= partition.partition_id < 1 << 63:
        raise InvalidRequestError(f"not a partition id: {partition.partition_id}")
    if not 0 <= partition.range_start < partition.range_end <= LOGICAL_PARTITIONS:
        raise InvalidRequestError(
            f"not a range of logical partitions: [{partition.range_start}, {partition.range_end})"
        )
    if partition.queue < 0 or len(partition.parents) > LOGICAL_PARTITIONS:
        raise InvalidRequestError("impossible queue or parents")

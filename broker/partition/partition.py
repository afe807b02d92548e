"""Holds the state of a hosted partition. The same records are applied during recovery and in
operation. Pure.

    decide_… (raises, or returns what to write)  ──▶  apply_… (immediately)  ──▶  the record in the
        log  ──▶  durable_…

Until the record is durable, the state is ahead of the disk: `next_offset` is the offset of the next
append, `readable_offset` `readable_offset` is the end of the messages that may be read. If the
write fails, `undo_…` restores the durable state.
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
from ...protocol.routing import Partition, PartitionState
from .appends import Duplicate, Producers, ProducerState, after_append, decide_append
from .in_flight import InFlight
from .parked import Parked
from .pull_lock import PullLock, raise_fence
from .records import CursorBody, FenceBody, ForgetBody, HoldBody, ParkedBody
from .suspects import Begun, Suspects

ATTEMPTS_MAX = 1_000
"""The maximum number of messages, per group and partition, whose failed tries are counted. The ones
with the lowest offsets are kept.
"""
END_UNKNOWN = -1
"""The end of a lost range if only its start is known."""
FORGOTTEN_MAX = 1_000
"""The maximum number of deleted groups whose tokens are refused. Calls from groups that were
deleted earlier can no longer be in progress.
"""
LOST_MAX = 1_000
"""The maximum number of lost ranges that are remembered. Reads detect any others themselves,
because the index leads them to the damage.
"""


class Group:
    """A consumer group's fence, lock and progress on a partition."""

    __slots__ = (
        "_failing",
        "_saved_version",
        "acked",
        "attempts",
        "pending_park_changes",
        "durable_cursor",
        "durable_fence",
        "durable_ranges",
        "in_flight",
        "is_durable",
        "lock",
        "name",
        "parked",
        "removed_unread",
        "suspects",
        "timed",
        "version",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = PullLock()
        self.durable_fence = 0
        """The highest durable fence."""
        self.acked = AckedOffsets()
        self.version = 0
        """Incremented whenever the progress changes."""
        self._saved_version = 0
        """The latest version that is durable."""
        self.durable_cursor = 0
        """The durable cursor. Answers never contain a higher one."""
        self.durable_ranges: Sequence[Range] = ()
        """The durable acked ranges above the durable cursor."""
        self.is_durable = False
        """True if a record of the group is durable, so that the group survives a restart."""
        self.removed_unread = 0
        """The number of messages that retention removed before the group acked them."""
        self.in_flight: InFlight | None = None
        """The messages in flight of a shared group; in memory only."""
        self.attempts: dict[int, int] = {}
        """Maps the offset of each unacked message that has failed to its number of failed tries."""
        self.suspects = Suspects()
        """The messages that may have crashed the process of an owner."""
        self.parked: Parked | None = None
        """The messages that the group has parked, or None if it never parked any."""
        self._failing: FailingMessage | None = None
        """The oldest message that fails or hangs, as last reported by the owner. It may have been
        acked in the meantime.
        """
        self.timed: tuple[int, int] | None = None
        """An unacked message whose time from send to ack is measured: its offset, and when it was
        sent, in nanoseconds since 1970.
        """
        self.pending_park_changes = 0
        """The number of changes to `parked` that are not durable yet."""

    def get_or_create_parked(self, partition: Partition) -> Parked:
        """Return `parked`, after creating it if needed. The partition must be the group's own."""
        if self.parked is None:
            range_ = partition.range_start, partition.range_end
            self.parked = Parked(partition.partition_id, range_)
        return self.parked

    @property
    def parked_version(self) -> int:
        """See `Parked.owner_version`."""
        return 0 if self.parked is None else self.parked.owner_version

    @property
    def parked_messages(self) -> int:
        """The number of messages parked here, not counting those that the children have adopted."""
        return 0 if self.parked is None or self.parked.frozen else self.parked.messages

    @property
    def left_to_children(self) -> bool:
        """See `Parked.left_to_children`."""
        return self.parked is not None and self.parked.left_to_children

    @property
    def retrying(self) -> int:
        """The number of messages parked here that wait for a retry."""
        return 0 if self.parked is None or self.parked.frozen else self.parked.retrying_messages

    @property
    def first_needed_offset(self) -> int:
        """The lowest offset that the group still needs."""
        first = None if self.parked is None else self.parked.lowest_own_offset()
        return self.acked.cursor if first is None else min(first, self.acked.cursor)

    def record_failures(self, attempts: Sequence[tuple[int, int]]) -> int:
        """Record the failed tries of messages, but only for the ATTEMPTS_MAX lowest unacked
        offsets. Return the number of tries that are new.
        """
        known_attempts = self.attempts
        new_tries = sum(max(0, tries - known_attempts.get(offset, 0)) for offset, tries in attempts)
        self.attempts.update(attempts)
        self.suspects.remove_failed(offset for offset, _ in attempts)
        unacked = sorted(offset for offset in self.attempts if offset not in self.acked)
        self.attempts = {offset: self.attempts[offset] for offset in unacked[:ATTEMPTS_MAX]}
        self.mark_changed()
        return new_tries

    def set_failing(self, failing: FailingMessage | None) -> None:
        """Record the oldest failing message, or None. The time of its first failure is kept,
        because a new owner does not know it.
        """
        previous = self._failing
        if previous is not None and failing is not None and _same_message(previous, failing):
            failing = replace(failing, since_ms=min(previous.since_ms, failing.since_ms))
        self._failing = failing

    def clear_hanging(self) -> None:
        """Clear the failing message if it hangs, because the owner no longer handles anything, and
        what is known of others.
        """
        if self._failing is not None and self._failing.running_ms is not None:
            self._failing = None
        elif self._failing is not None:
            self._failing = replace(self._failing, others=(), others_count=None)

    @property
    def failing(self) -> FailingMessage | None:
        """The oldest unacked message that fails or hangs. A parked message counts if it fails again
        while it is being redriven.
        """
        failing = self._failing
        if failing is None or failing.source is None:
            return None if failing is None or failing.offset in self.acked else failing
        message = failing.source, failing.offset
        is_redriven = self.parked is not None and self.parked.is_redriving_message(message)
        return failing if is_redriven else None

    def begin_suspects(self, begun: Sequence[Begun]) -> None:
        """Record suspects whose handling is about to begin."""
        self.suspects.begin(begun, self.acked)
        self.mark_changed()

    def current_in_flight(self) -> InFlight:
        """Return the messages in flight under the current token of a shared group."""
        if self.in_flight is None or self.in_flight.token != self.lock.fence:
            self.in_flight = InFlight(self.lock.fence)
        return self.in_flight

    def is_quiet(self, now_ms: int) -> bool:
        """Return True if everything is durable, no session holds the lock, and no message is in
        flight.
        """
        return (
            self.durable_fence == self.lock.fence
            and not self.has_unsaved_progress
            and not self.pending_park_changes
            and self.lock.expires_at_ms <= now_ms
            and (self.in_flight is None or self.in_flight.is_empty(now_ms))
        )

    def ack_removed(self, first_offset: int) -> None:
        """Mark the offsets below `first_offset`, which retention has removed, as acked."""
        if self.acked.cursor < first_offset:
            self.acked.add(self.acked.cursor, first_offset)
            self.mark_changed()

    def mark_changed(self) -> None:
        """Mark the progress as changed, so that it will be saved."""
        self.version += 1

    @property
    def has_unsaved_progress(self) -> bool:
        """True if the progress has changed since the latest durable record."""
        return self.version > self._saved_version

    def record_saved(self, body: CursorBody, version: int) -> None:
        """Record that a record of the progress as of `version` is durable."""
        self.is_durable = True
        if version >= self._saved_version:
            self._saved_version = version
            self.durable_cursor = body.cursor
            self.durable_ranges = body.ranges

    def cursor_body(self) -> CursorBody:
        """Return a record body with the current progress."""
        acked = self.acked
        attempts = [pair for pair in self.attempts.items() if pair[0] not in acked]
        return CursorBody(
            self.name,
            self.lock.fence,
            acked.cursor,
            acked.ranges,
            removed_unread=self.removed_unread,
            attempts=attempts,
            begun=self.suspects.unacked(acked),
        )

    def has_drained(self, end_offset: int) -> bool:
        """Return True if every offset below `end_offset` is durably acked."""
        return self.durable_cursor >= end_offset


class LostOffsets(NamedTuple):
    """The offsets `[start, end)`, which were lost by damage to the log at `position`; `end` may be
    END_UNKNOWN.
    """

    start: int
    end: int
    position: int


AppendUndo = tuple[int, int, int, ProducerState | None, tuple[int, ProducerState] | None]


class HostedPartition:
    """The state of a partition. Its `facts` never change."""

    __slots__ = (
        "__weakref__",
        "appended_at_ms",
        "clashed_ids",
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
        """When the newest batch was appended or, if there is none, the earliest time for the first
        one, in milliseconds since 1970. The times of a partition never decrease.
        """
        self.sealed = False
        """True if the partition no longer accepts appends. This is set as soon as the seal is
        accepted.
        """
        self.ended = False
        """True once the seal and all earlier records are durable. Only then do readers see the
        end.
        """
        self.producers = Producers()
        self.clashed_ids: set[int] = set()
        """The producers whose current epoch is used by two clients. Nothing more is stored in that
        epoch. In memory only.
        """
        self.groups: dict[str, Group] = {}
        self.groups_told = False
        """True once all consumer groups of the subject, as sent by the metaserver, are durable."""
        self.forgotten: dict[str, int] = {}
        """Maps each deleted group to its highest token. Lower tokens are refused, too. The latest
        deletion is last.
        """
        self.holds: dict[str, HoldBody] = {}
        """Maps each job to its hold against retention. `store/holds.py` knows which holds have
        expired.
        """
        self.lost: tuple[LostOffsets, ...] = ()
        """The lost ranges, in order. If there are any, the partition accepts no appends, and reads
        end before them.
        """
        self.fences_lost = False
        """True if a fence may have been lost. The owner is then unknown, so no consumer may acquire
        the partition.
        """

    # ── damage ────────────────────────────────────────────────────────────────────────────────────
    def add_lost_range(self, start: int, end: int, *, position: int) -> None:
        """Record that damage at `position` has lost the offsets `[start, end)`; END_UNKNOWN means
        all offsets from `start` on.
        """
        if len(self.lost) == LOST_MAX and self._exceeds_limit(start, end):
            return
        ranges = IntervalSet((lost.start, _end_bound(lost.end)) for lost in self.lost)
        ranges.add(start, _end_bound(end))
        positions = {lost.start: lost.position for lost in self.lost}
        lost = [
            LostOffsets(
                start, END_UNKNOWN if end == MAX_I64 else end, positions.get(start, position)
            )
            for start, end in ranges
        ]
        if len(lost) > LOST_MAX:
            lost[LOST_MAX - 1 :] = (
                lost[-1:] if lost[-1].end == END_UNKNOWN else lost[LOST_MAX - 1 : LOST_MAX]
            )
        self.lost = tuple(lost)

    def _exceeds_limit(self, start: int, end: int) -> bool:
        """Return True if a range lies after the first LOST_MAX ranges. A range whose end is unknown
        is always remembered.
        """
        last = self.lost[-1]
        last_known = self.lost[-2] if last.end == END_UNKNOWN else last
        limit = last.start if last.end == END_UNKNOWN else MAX_I64
        return last_known.end < start and _end_bound(end) < limit

    def check_undamaged(self) -> None:
        """Raise CorruptLogError if the log has lost messages or a fence of the partition."""
        if self.lost or self.fences_lost:
            position = self.lost[0].position if self.lost else -1
            raise self._damaged_error(position, "takes no messages")

    def check_end_known(self) -> None:
        """Raise CorruptLogError if the end of the partition is unknown."""
        if self.lost and self.lost[-1].end == END_UNKNOWN:
            raise self._damaged_error(self.lost[-1].position, "cannot be sealed")

    def check_fences_known(self) -> None:
        """Raise CorruptLogError if a fence may have been lost."""
        if self.fences_lost:
            position = self.lost[0].position if self.lost else -1
            raise self._damaged_error(position, "cannot tell who owns it")

    def readable_end(self, offset: int) -> int:
        """
        Return the offset at which a read from `offset` must end.

        Raises:
            CorruptLogError: `offset` is lost.
        """
        for lost in self.lost:
            if offset < lost.start:
                return lost.start
            if lost.end == END_UNKNOWN or offset < lost.end:
                details = {} if lost.end == END_UNKNOWN else {"end_offset": lost.end}
                raise self._damaged_error(lost.position, f"has lost offset {offset}", **details)
        return self.readable_offset

    def _damaged_error(self, position: int, effect: str, **details: int) -> CorruptLogError:
        return CorruptLogError(
            f"partition {self.partition_id} {effect}: the log is damaged at position {position}",
            partition_id=self.partition_id,
            position=position,
            **details,
        )

    def is_quiet(self, now_ms: int) -> bool:
        """Return True if a restart would restore exactly the present state."""
        return (
            not self.clashed_ids
            and self.next_offset == self.readable_offset
            and self.sealed == self.ended
            and all(group.is_quiet(now_ms) for group in self.groups.values())
        )

    # ── appends ───────────────────────────────────────────────────────────────────────────────────
    def decide_append(self, header: Header) -> Duplicate | None:
        """
        Decide whether a batch is stored.

        Returns:
            None if the batch must be stored, Duplicate if it is already stored.

        Raises:
            CorruptLogError: the partition is damaged, so it accepts no messages.
            StaleRouteError: the partition is sealed, and the batch is not a duplicate.
            OverloadedError: the partition has PARTITION_MESSAGES_MAX messages, and the batch is not
                a duplicate.
            SequenceGapError, SequenceReusedError, ProducerFencedError, InvalidRequestError: see
                `appends.decide_append`.
        """
        if self.lost or self.fences_lost:
            self.check_undamaged()
        producer_id = header.producer_id
        try:
            duplicate = decide_append(
                self.producers.get(producer_id),
                header,
                is_clashed=producer_id in self.clashed_ids,
            )
        except SequenceReusedError:
            # A later batch may have the expected sequence, but must be refused as well.
            self.clashed_ids.add(producer_id)
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
        Check the message sizes of a batch whose unpacked size exceeds the subject's limit.

        Raises:
            MessageTooLargeError: a single message exceeds the limit.
        """
        limit = self.facts.message_bytes_max or MESSAGE_BYTES_MAX
        size = largest_message(record, header)
        if size > limit:
            raise message_too_large(size, limit)

    def apply_append(self, header: Header, *, base_offset: int, appended_at_ms: int) -> AppendUndo:
        """Apply an append, and return the argument for `undo_append`."""
        assert base_offset == self.next_offset
        producers, producer_id = self.producers, header.producer_id
        previous = producers.remove_state(producer_id)
        previous_at_ms = self.appended_at_ms
        evicted = None
        if producer_id != NO_PRODUCER:
            if len(producers) >= PRODUCERS_PER_PARTITION_MAX:
                evicted = producers.remove_oldest()
                self.clashed_ids.discard(evicted[0])
            producers[producer_id] = after_append(previous, header, base_offset=base_offset)
            self.clashed_ids.discard(producer_id)
        self.next_offset = base_offset + header.count
        self.appended_at_ms = max(previous_at_ms, appended_at_ms)
        return base_offset, previous_at_ms, producer_id, previous, evicted

    def undo_append(self, undo: AppendUndo) -> None:
        """Undo the newest append."""
        self.next_offset, self.appended_at_ms, producer_id, previous, evicted = undo
        self.producers.remove_state(producer_id)
        if evicted is not None:
            self.producers = Producers({evicted[0]: evicted[1], **self.producers})
        if previous is not None:
            self.producers[producer_id] = previous
        else:
            self.clashed_ids.discard(producer_id)

    # ── groups ────────────────────────────────────────────────────────────────────────────────────
    def group_for_acquire(self, name: str) -> Group:
        """
        Return the group with this name, or a new group that has not been added to the partition
        yet.

        Raises:
            InvalidRequestError: the name is invalid.
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
        """Raise FencedError if the token was granted to a deleted group with this name."""
        if token <= self.forgotten.get(name, 0):
            raise FencedError(
                f"consumer group {name!r} with this token was deleted",
                token=token,
                current_token=self.forgotten[name],
            )

    def apply_forget(self, body: ForgetBody) -> Callable[[], None]:
        """Forget a deleted group. Return a function that undoes this."""
        group, forgotten = self.groups.pop(body.group, None), self.forgotten
        tokens = {name: token for name, token in forgotten.items() if name != body.group}
        tokens[body.group] = max(body.token, forgotten.get(body.group, 0))
        self.forgotten = dict(list(tokens.items())[-FORGOTTEN_MAX:])

        def undo() -> None:
            self.forgotten = forgotten
            if group is not None:
                self.groups[group.name] = group

        return undo

    def apply_fence(self, body: FenceBody) -> Callable[[], None]:
        """Raise the fence of a group, creating the group if needed. Return a function that restores
        the previous fence.
        """
        group = self.groups.get(body.group)
        if group is None:
            group = self.groups[body.group] = Group(body.group)
        previous_lock, restore_tries = copy(group.lock), None
        if group.parked is not None and body.token > group.lock.fence:
            restore_tries = group.parked.clear_retry_times()
        raise_fence(group.lock, token=body.token, session=body.session)
        group.lock.promise_ms = body.promise_ms

        def undo() -> None:
            group.lock = previous_lock
            if restore_tries is not None:
                restore_tries()

        return undo

    def apply_cursor(self, body: CursorBody) -> None:
        """Set a group's progress from a record in the log."""
        group = self.groups.get(body.group)
        if group is None:
            group = self.groups[body.group] = Group(body.group)
        group.acked = AckedOffsets(body.cursor, body.ranges)
        group.durable_cursor = body.cursor
        group.durable_ranges = body.ranges
        group.removed_unread = max(group.removed_unread, body.removed_unread)
        group.attempts = dict(body.attempts)
        group.suspects.begun = dict(body.begun)
        group.is_durable = True

    def apply_parked(self, body: ParkedBody) -> None:
        """Apply changes to a group's parked messages from a record in the log."""
        group = self.groups.get(body.group)
        if group is None:
            group = self.groups[body.group] = Group(body.group)
        parked = group.get_or_create_parked(self.facts.partition)
        for change in body.changes:
            parked.apply(change, at_ms=body.at_ms, acked=group.acked, token=body.token)
        parked.set_retry_times(body.next_tries)
        group.durable_cursor = group.acked.cursor
        group.durable_ranges = group.acked.ranges
        group.is_durable = True

    def apply_hold(self, body: HoldBody) -> Callable[[], None]:
        """Set or end a job's hold. Return a function that undoes this."""
        previous = self.holds
        other_holds = {job: hold for job, hold in previous.items() if job != body.job}
        self.holds = {**other_holds, body.job: body} if body.ttl_ms else other_holds
        return partial(setattr, self, "holds", previous)

    # ── views ─────────────────────────────────────────────────────────────────────────────────────
    def check_same_facts(self, facts: HostPartition) -> None:
        """Raise InvalidRequestError if the partition's facts differ from these."""
        if strip_volatile_facts(facts) != self.facts:
            raise InvalidRequestError(
                Reason.PARTITION_IN_USE,
                f"partition {self.partition_id} is hosted with other facts, "
                f"as {self.facts.partition.name!r} of {self.facts.subject!r}",
                partition_id=self.partition_id,
            )

    def check_unused(self) -> None:
        """Raise InvalidRequestError if the partition is sealed, or has ever had messages."""
        if self.sealed or self.next_offset:
            raise self._in_use_error()

    def check_empty(self) -> None:
        """Raise InvalidRequestError if the partition has ever had messages."""
        if self.next_offset:
            raise self._in_use_error()

    def _in_use_error(self) -> InvalidRequestError:
        state = "sealed" if self.sealed else "open"
        return InvalidRequestError(
            Reason.PARTITION_IN_USE,
            f"partition {self.partition_id} is not new: it is {state} and has "
            f"{self.next_offset} messages",
            partition_id=self.partition_id,
            next_offset=self.next_offset,
        )

    def status(self, *, now_ms: int, group: str | None = None) -> PartitionStatus:
        """Return the durable status, with all groups or, if `group` is given, with only that
        one.
        """
        groups = (
            GroupStatus(
                group=progress.name,
                token=progress.lock.fence,
                cursor=progress.durable_cursor,
                acked_above=(above := sum(end - start for start, end in progress.durable_ranges)),
                lag=self.readable_offset - max(progress.durable_cursor, self.first_offset) - above,
                holder=progress.lock.holder_at(now_ms),
                strategy=progress.lock.strategy,
                by_operator=progress.lock.is_operators,
                ttl_ms=progress.lock.known_ttl_ms,
                removed_unread=progress.removed_unread,
                parked=progress.parked_messages,
                retrying=progress.retrying,
                failing=progress.failing,
                suspects=progress.acked.count_unacked(self.first_offset, progress.suspects.upto),
                left_to_children=progress.left_to_children,
                frozen=progress.parked is not None and progress.parked.frozen,
            )
            for name, progress in sorted(self.groups.items())
            if progress.is_durable and group in {None, name}
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


def _end_bound(end: int) -> int:
    """Return the end of a lost range as an upper bound: MAX_I64 for END_UNKNOWN."""
    return MAX_I64 if end == END_UNKNOWN else end


def strip_volatile_facts(facts: HostPartition) -> HostPartition:
    """Return the facts that a broker stores. The address, state, logic start, groups and times are
    removed, because they change or are unknown.
    """
    partition = msgspec.structs.replace(
        facts.partition, address=None, state=PartitionState.OPEN, logic_start=0
    )
    return msgspec.structs.replace(
        facts, partition=partition, groups=None, tokens_above=0, times_from_ms=0
    )


def validate_facts(facts: HostPartition) -> None:
    """
    Check the facts of a new partition.

    Raises:
        InvalidRequestError: a name, an id, the range, the queue or the parents are invalid.
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

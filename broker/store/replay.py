"""Replays the log when the broker starts: applies its records and holes to the state, and adds its
batches to the index. Pure.

    base offset == next     apply
    base offset <  next     skip: the snapshot has it
    base offset >  next     offsets [next, base) are lost: the partition takes no appends,
                            later batches are kept

Terms of damage recovery
    hole          positions of the log whose durable records are damaged or missing
    explained     a hole whose lost records are all known: those that are not batches are restored
                  from the trail, and the offsets of batches are marked as lost
    unexplained   a hole with unknown records: any partition may have lost its end in it, and
                  any group a fence
    complete      a partition that did not lose its end in the newest unexplained hole, as a later
                  record shows
    known fence   the fence of a group that has a record after that hole
    lost          offsets of a partition without their batches; if the end is END_UNKNOWN, an
                  unknown number of further offsets is lost
    orphan        a partition that has records but whose facts are lost
    damaged       a partition with lost offsets
    stopped       a damaged partition: it takes no appends, and reads end before the lost offsets

Invariants
    Without damage, replaying from any snapshot gives the same state.
    A partition that is not known to be complete is stopped, and a problem reports the position.
    Other partitions are served.

The index has no gaps, because offsets have none. A lost batch has a unit of its own if its header
is known; otherwise a unit that points to the damage covers its offsets. Reading such a unit fails
with the position of the damage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from ...protocol.control import HostPartition
from ...protocol.errors import CorruptLogError, DataFolderError, KeylaneError
from ...protocol.limits import PRODUCERS_PER_PARTITION_MAX
from ...protocol.record import HEADER_BYTES, Header, Kind
from ..partition.image import ProducerRange, decode_partition_part
from ..partition.partition import END_UNKNOWN, HostedPartition
from ..partition.records import (
    WITHOUT_BODY,
    CursorBody,
    DroppedBody,
    FenceBody,
    ForgetBody,
    HoldBody,
    ParkedBody,
    decode_body,
)
from ..partition.state import PROBLEMS_MAX, BrokerState
from ..storage.index.interface import Unit, unit_of
from ..storage.log.holes import Hole

HOLES_MAX = PROBLEMS_MAX // 2
"""The maximum number of holes that are reported as problems. It leaves room for other problems."""


class Replay:
    """A `Visitor` that replays the log from position `start` into a state that already contains all
    earlier records.
    """

    def __init__(self, state: BrokerState, *, start: int = 0) -> None:
        self._state = state
        self._start = start
        self._hole_position = -1
        """The start of the newest hole."""
        self._unexplained_hole: Hole | None = None
        """The newest hole that contains unknown records."""
        self._complete_ids: set[int] = set()
        """The ids of the partitions that did not lose their ends in that hole."""
        self._known_fences: set[tuple[int, str]] = set()
        """The groups, as (partition id, group), whose fence is recorded after that hole."""
        self._producers_read: dict[int, int] = {}
        """Maps each partition that is being restored from several STATE records to the number of
        producers read so far.
        """

    # ── records ───────────────────────────────────────────────────────────────────────────────────
    def on_record(self, header: Header, body: memoryview) -> None:
        """
        Apply an intact record.

        Raises:
            DataFolderError: a newer broker wrote the record.
        """
        if header.position < self._start:
            return
        if header.kind not in _KINDS:
            raise DataFolderError(
                f"the record at position {header.position} has kind {header.kind}: "
                "a newer broker wrote this log"
            )
        if header.kind == Kind.SCHEDULED:
            return  # not of a partition: see `agenda.py`
        if header.kind == Kind.DROPPED:
            self._apply_dropped(header, body)
            return
        partition = self._state.partitions.get(header.partition_id)
        if header.kind in {Kind.PARTITION, Kind.STATE}:
            self._apply_facts(header, body, partition)
        elif partition is None:
            self._state.orphans.setdefault(header.partition_id, header.position)
        elif header.kind == Kind.MESSAGES:
            self._advance_end(partition, header)
            if header.base_offset == partition.next_offset:
                self._apply_append(partition, header)
            elif header.next_offset > partition.next_offset:
                self._report_contradiction(
                    header, f"its offsets begin below {partition.next_offset}"
                )
        else:
            self._apply_control(header, body, partition)

    def _advance_end(self, partition: HostedPartition, header: Header) -> None:
        """Advance the partition's end to a record's base offset, marking offsets in between as
        lost.
        """
        self._state.mark_dirty(partition)
        if header.base_offset > partition.next_offset:
            hole = self._hole_position
            position = hole if 0 <= hole < header.position else header.position
            self._state.add_lost_range(
                partition, partition.next_offset, header.base_offset, position=position
            )
            partition.next_offset = partition.readable_offset = header.base_offset
        self._complete_ids.add(partition.partition_id)

    def _apply_append(self, partition: HostedPartition, header: Header) -> None:
        partition.apply_append(
            header, base_offset=header.base_offset, appended_at_ms=header.appended_at_ms
        )
        partition.readable_offset = partition.next_offset

    def _apply_facts(
        self, header: Header, body: memoryview, known_partition: HostedPartition | None
    ) -> None:
        """Apply a PARTITION or STATE record."""
        try:
            if header.kind == Kind.STATE:
                restored, producer_range = decode_partition_part(header.partition_id, body)
                if known_partition is not None:
                    self._restore_partition(header, restored, known_partition)
                elif producer_range.before:
                    # Earlier parts are lost, or retention has removed them after rewriting all
                    # parts.
                    self._state.orphans.setdefault(header.partition_id, header.position)
                else:
                    self._add_partition(header, restored)
                    self._producers_read[header.partition_id] = 0
                self._count_producers(header, producer_range, len(restored.producers))
                return
            facts = decode_body(header, body)
            assert isinstance(facts, HostPartition)
            if known_partition is None:
                known_partition = self._state.host(replace(facts, times_from_ms=0))
                self._state.orphans.pop(header.partition_id, None)
            else:
                known_partition.check_same_facts(facts)
            if facts.times_from_ms > known_partition.appended_at_ms:
                self._state.mark_dirty(known_partition)
                known_partition.appended_at_ms = facts.times_from_ms
        except KeylaneError as error:
            self._report_contradiction(header, error.message)

    def _add_partition(self, header: Header, restored_partition: HostedPartition) -> None:
        """Apply the first or only STATE record of an unknown partition."""
        self._state.partitions.add(restored_partition)
        if restored_partition.lost:
            self._state.damaged.add(header.partition_id)
        self._state.orphans.pop(header.partition_id, None)
        self._complete_ids.add(header.partition_id)

    def _count_producers(self, header: Header, producer_range: ProducerRange, count: int) -> None:
        """Count the producers of a partition that is being restored from STATE records, and forget
        the count once all of them have been read.
        """
        read = self._producers_read.get(header.partition_id)
        if read is None or producer_range.before not in {0, read}:
            return
        self._producers_read[header.partition_id] = producer_range.before + count
        if producer_range.before + count >= producer_range.total:
            del self._producers_read[header.partition_id]

    def _restore_partition(
        self, header: Header, restored_partition: HostedPartition, known_partition: HostedPartition
    ) -> None:
        """Apply a STATE record of a known partition."""
        if header.base_offset >= known_partition.next_offset:
            _merge_producers(
                restored_partition,
                known_partition,
                sorted_producers=header.partition_id in self._producers_read,
            )
        self._advance_end(known_partition, header)
        for lost in restored_partition.lost:
            self._state.add_lost_range(
                known_partition, lost.start, lost.end, position=lost.position
            )
        known_partition.fences_lost |= restored_partition.fences_lost
        known_partition.groups_told |= restored_partition.groups_told
        for name, token in restored_partition.forgotten.items():
            known_partition.forgotten[name] = max(token, known_partition.forgotten.get(name, 0))
        known_partition.holds = restored_partition.holds
        known_partition.first_offset = max(
            known_partition.first_offset, restored_partition.first_offset
        )
        for name, group in restored_partition.groups.items():
            lock = group.lock
            self._apply_fence(
                known_partition, FenceBody(name, lock.fence, lock.session, lock.promise_ms)
            )
            known_partition.apply_cursor(group.cursor_body())
            known_partition.groups[name].parked = group.parked

    def _apply_dropped(self, header: Header, body: memoryview) -> None:
        """Apply a DROPPED record by forgetting its partitions."""
        try:
            dropped_body = decode_body(header, body)
        except CorruptLogError as error:
            self._state.add_problem(error.message)
            return
        assert isinstance(dropped_body, DroppedBody)
        self._state.apply_dropped(dropped_body)
        for partition_id in list(self._producers_read):
            if partition_id in self._state.dropped:
                del self._producers_read[partition_id]

    def _apply_control(self, header: Header, body: memoryview, partition: HostedPartition) -> None:
        """Apply a record of a known partition other than a batch or the partition's facts."""
        if header.kind == Kind.TOLD:
            self._state.mark_dirty(partition)
            partition.groups_told = True
            return
        try:
            control = decode_body(header, body)
        except CorruptLogError as error:
            self._report_contradiction(header, error.message)
            return
        self._state.mark_dirty(partition)
        match control:
            case FenceBody():
                self._apply_fence(partition, control)
            case ForgetBody():
                partition.apply_forget(control)
            case HoldBody():
                partition.apply_hold(control)
            case ParkedBody():
                partition.apply_parked(control)
            case CursorBody():
                partition.apply_cursor(control)
                self._known_fences.add((partition.partition_id, control.group))
            case None:  # a seal
                self._advance_end(partition, header)
                partition.sealed = partition.ended = True

    def _apply_fence(self, partition: HostedPartition, fence: FenceBody) -> None:
        """Raise a group's fence, unless a higher one was already applied."""
        self._known_fences.add((partition.partition_id, fence.group))
        group = partition.groups.get(fence.group)
        if group is None or fence.token > group.lock.fence:
            partition.apply_fence(fence)
            partition.groups[fence.group].durable_fence = fence.token
            partition.groups[fence.group].is_durable = True
        elif fence.token == group.lock.fence:
            group.lock.promise_ms = max(group.lock.promise_ms, fence.promise_ms)

    # ── holes ─────────────────────────────────────────────────────────────────────────────────────
    def on_hole(self, hole: Hole) -> None:
        """Apply a hole: restore known records, and mark lost offsets."""
        self._hole_position = hole.start
        start, end = hole.damage or (hole.start, hole.end)
        text = f"the log is damaged at positions [{start}, {end}): {hole.reason}"
        if not hole.explained:
            text += "; its records are unknown"
            if (start, end) != (hole.start, hole.end):
                text += f" of [{hole.start}, {hole.end})"
        if not hole.explained or start == hole.start:
            self._state.add_problem(text, count_max=HOLES_MAX)
        if not hole.explained and hole.end > self._start:
            self._unexplained_hole = hole
            self._complete_ids.clear()
            self._known_fences.clear()
        for header, body in hole.lost_records:
            if header.kind == Kind.MESSAGES:
                self._apply_lost_batch(header)
            elif body is not None or header.kind in WITHOUT_BODY:
                self.on_record(header, memoryview(body or b""))
            else:
                self._apply_lost_control(header)

    def _apply_lost_batch(self, header: Header) -> None:
        """Advance the partition beyond a lost batch, and mark the batch's offsets as lost."""
        partition = self._state.partitions.get(header.partition_id)
        if partition is None:
            self._state.orphans.setdefault(header.partition_id, header.position)
            return
        self._advance_end(partition, header)
        if header.base_offset == partition.next_offset:
            self._apply_append(partition, header)
        self._state.add_lost_range(
            partition, header.base_offset, header.next_offset, position=header.position
        )

    def _apply_lost_control(self, header: Header) -> None:
        """Apply a lost record that is not a batch and of which only the header is known."""
        partition = self._state.partitions.get(header.partition_id)
        if header.position < self._start or header.kind in {Kind.DROPPED, Kind.SCHEDULED}:
            return
        if partition is None:
            self._state.orphans.setdefault(header.partition_id, header.position)
        elif header.kind == Kind.FENCE:
            partition.fences_lost = True
            self._state.mark_dirty(partition)
            self._state.add_problem(
                f"a fence of partition {header.partition_id} is lost: no consumer may acquire it"
            )
        elif header.kind == Kind.PARKED:
            # The parked messages may count as acked, in which case a consumer would silently skip
            # them.
            partition.fences_lost = True
            self._state.mark_dirty(partition)
            self._state.add_problem(
                f"the parked messages of partition {header.partition_id} are not known: no "
                f"consumer may acquire it"
            )
        elif header.kind == Kind.CURSOR:
            # It may be the group's only record, so the metaserver must send the groups again.
            partition.groups_told = False
            self._state.mark_dirty(partition)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    def finish(self) -> None:
        """Finish the replay: stop the partitions that are not known to be complete."""
        for partition_id, position in self._state.orphans.items():
            self._state.add_problem(
                f"the facts of partition {partition_id} are lost (position {position})"
            )
        for partition_id in self._producers_read:
            partition = self._state.partitions[partition_id]
            position = max(self._hole_position, 0)
            self._state.add_lost_range(
                partition, partition.next_offset, END_UNKNOWN, position=position
            )
            self._state.add_problem(f"some producers of partition {partition_id} are lost")
        if self._unexplained_hole is None:
            return
        for partition_id, partition in self._state.partitions.items():
            if partition_id not in self._complete_ids and not partition.sealed:
                position = self._unexplained_hole.start
                self._state.add_lost_range(
                    partition, partition.next_offset, END_UNKNOWN, position=position
                )
            if partition.groups_told:
                # A group's only record may be in the hole, so the metaserver must send the groups
                # again.
                partition.groups_told = False
                self._state.mark_dirty(partition)
            for name, group in partition.groups.items():
                if (partition_id, name) not in self._known_fences:
                    # The fence of a newer owner may be in the hole, so the session of this token
                    # must not be trusted.
                    group.lock.session = ""
                    self._state.mark_dirty(partition)

    def _report_contradiction(self, header: Header, reason: str) -> None:
        """Stop the partition whose intact record contradicts the records before it."""
        self._state.add_problem(
            f"the record at position {header.position} contradicts the log before it: {reason}"
        )
        partition = self._state.partitions.get(header.partition_id)
        if partition is None:
            self._state.orphans.setdefault(header.partition_id, header.position)
        else:
            partition.fences_lost = True
            self._state.add_lost_range(
                partition, partition.next_offset, END_UNKNOWN, position=header.position
            )


def _merge_producers(
    restored_partition: HostedPartition, known_partition: HostedPartition, *, sorted_producers: bool
) -> None:
    """
    Copy the producers of a STATE record to the known partition. The record must not be older than
    the partition, because its producers would lack batches that have already been applied.

    Args:
        sorted_producers: True to copy the order of the producers as well, which is that of their
            last appends.
    """
    for number, state in restored_partition.producers.items():
        if sorted_producers or known_partition.producers.get(number) != state:
            known_partition.producers.remove_state(number)
            known_partition.producers[number] = state
    while len(known_partition.producers) > PRODUCERS_PER_PARTITION_MAX:
        known_partition.producers.remove_oldest()


_KINDS = frozenset(Kind)


DISPATCH_UNITS = 4096
"""The number of units that are passed to the index at once."""
CACHED_ENDS_MAX = 200_000


class DispatchTarget(Protocol):
    """The part of an index that `Dispatch` needs."""

    def bounds(self, partition_id: int) -> tuple[int, int] | None:
        """See `ConsumeQueues.bounds`."""
        ...

    def dispatch(self, units: Sequence[tuple[int, Unit]]) -> None:
        """See `ConsumeQueues.dispatch`."""
        ...


class Dispatch:
    """Dispatches those batches, from position `start` on, that the index does not have."""

    def __init__(self, queues: DispatchTarget, *, start: int) -> None:
        self._queues = queues
        self._start = start
        self._units: list[tuple[int, Unit]] = []
        self._ends: dict[int, tuple[int, int]] = {}
        """A cache of the ends of partitions. Maps partition ids to (next offset, position)."""
        self._hole_position = 0

    def on_record(self, header: Header) -> None:
        """Add the batch with this header to the index, even if the batch itself is lost. Other
        records are ignored.
        """
        if header.kind != Kind.MESSAGES or header.position < self._start:
            return
        unit = unit_of(header)
        partition_id = header.partition_id
        expected_offset, position = self._end_before(partition_id, unit)
        if unit.base_offset < expected_offset:
            return
        if unit.base_offset > expected_offset:
            filler_position = max(position, min(self._hole_position, unit.position))
            missing_count = unit.base_offset - expected_offset
            filler = Unit(
                expected_offset, missing_count, filler_position, HEADER_BYTES, unit.appended_at_ms
            )
            self._units.append((partition_id, filler))
        self._units.append((partition_id, unit))
        self._ends[partition_id] = unit.next_offset, unit.end_position
        if len(self._units) >= DISPATCH_UNITS:
            self.flush()

    def _end_before(self, partition_id: int, unit: Unit) -> tuple[int, int]:
        """Return a partition's next offset and position before this unit is dispatched."""
        end = self._ends.get(partition_id)
        if end is None:
            bounds = self._queues.bounds(partition_id)
            end = (unit.base_offset if bounds is None else bounds[1]), self._start
        return end

    def on_hole(self, hole: Hole) -> None:
        """Dispatch a hole's lost batches, as far as they are known."""
        self._hole_position = hole.start
        for header, _body in hole.lost_records:
            self.on_record(header)

    def flush(self) -> None:
        """Pass all remaining units to the index."""
        self._queues.dispatch(self._units)
        self._units = []
        if len(self._ends) > CACHED_ENDS_MAX:
            self._ends.clear()

"""Manages holds, which protect messages from retention on behalf of a job, and raises first
offsets. A hold is durable, but its expiry is only in memory.

    POST /v1/partitions/{id}/holds ─▶ HOLD [job, from, ttl_ms]    ttl_ms 0: the hold has ended
    a renewal                      ─▶ no record, only a later expiry

Invariants
    Until a hold expires, retention removes no message at or after its `from_offset`, regardless of
    the subject's retention. A hold expires when its ttl has passed since it was set or renewed or,
    if it was read from the log, since the broker started: expiries are measured with the boot
    clock. A hold can be set only on stored messages, so a first offset that has already been
    decided is raised first.

First offsets are raised when retention removes messages, both in operation and when the broker
starts.

    decided ─▶ pending: partition → first offset ─▶ raised, some at a time ─▶ segments removed
                       ▲                                                      ─▶ index forgets
           acquiring the partition before that raises its first offset immediately

With retention by time, messages may be removed that a group has not acked. They are counted for
each group, and the count is durable before the segments are removed.

Invariants
    Segments are removed only when the acks that allow it are durable. A group that registers before
    the decision is taken into account; a group that registers later begins at the decided first
    offset. The beginning of the log determines which messages are removed. When the broker starts,
    it corrects first offsets and the index accordingly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...protocol.clock import Clock
from ...protocol.errors import OffsetOutOfRangeError, OverloadedError
from ...protocol.ids import check_name
from ...protocol.reprocess.holds import HOLDS_PER_PARTITION_MAX, Held, HoldView, SetHold
from ..partition.partition import Group, HostedPartition
from ..partition.records import HoldBody, encode_body
from ..partition.state import BrokerState
from ..storage.index.interface import ConsumeQueues
from .group_commit import Entry, GroupCommit


class FirstOffsets:
    """Raises the first offsets of partitions. `save` makes a group's progress durable."""

    def __init__(
        self, state: BrokerState, *, save: Callable[[HostedPartition, Group], Awaitable[None]]
    ) -> None:
        self._state = state
        self._save = save
        self.changed_ids: set[int] = set()
        """The ids of partitions that may need older messages since this set was last emptied,
        because a group was registered or reset or a hold was set.
        """
        self.pending_offsets: dict[int, int] = {}
        """Maps partition ids to first offsets that have been decided but not set yet."""
        self.removed_unread: dict[tuple[str, str], tuple[int, int]] = {}
        """Maps (subject, group) to the number of messages removed unread and the number of their
        partitions, since this dict was last emptied.
        """
        self._unsaved_groups: dict[tuple[int, str], tuple[HostedPartition, Group]] = {}
        """The groups whose progress, or count of messages removed unread, may not be durable."""

    def raise_pending(self, partition_id: int) -> None:
        """Raise a partition's first offset to the pending one, if there is one."""
        first = self.pending_offsets.pop(partition_id, 0)
        partition = self._state.partitions.get(partition_id) if first else None
        if partition is None or first <= partition.first_offset:
            return
        self._state.mark_dirty(partition)
        previous, partition.first_offset = partition.first_offset, first
        for group in partition.groups.values():
            unread_count = group.acked.count_unacked(previous, first)
            group.ack_removed(first)
            if group.has_unsaved_progress:
                self._unsaved_groups[partition_id, group.name] = partition, group
            if unread_count:
                group.removed_unread += unread_count
                key = partition.facts.subject, group.name
                messages, partitions = self.removed_unread.get(key, (0, 0))
                self.removed_unread[key] = messages + unread_count, partitions + 1

    async def flush(self) -> None:
        """
        Make the progress of all groups durable that was changed by raising first offsets.

        Raises:
            StorageError, BrokerReadOnlyError: some progress is not durable; the next call will try
            again.
        """
        unsaved_groups = list(self._unsaved_groups.items())
        await asyncio.gather(
            *(
                self._save(partition, group)
                for _, (partition, group) in unsaved_groups
                if group.has_unsaved_progress
            )
        )
        for key, _ in unsaved_groups:
            del self._unsaved_groups[key]


def correct_first_offsets(
    state: BrokerState, queues: ConsumeQueues, *, first_position: int
) -> None:
    """Raise all first offsets to those of the partitions' first messages in the log, which begins
    at `first_position`. The index must be complete. Blocks.
    """
    for _ in queues.retain(first_position, dropped=state.dropped.copy_durable()):
        pass
    for partition_id in list(state.partitions):
        partition = state.partitions[partition_id]
        bounds = queues.bounds(partition_id)
        first = partition.next_offset if bounds is None else bounds[0]
        if partition.first_offset < first <= partition.next_offset:
            partition.first_offset = first
            state.mark_dirty(partition)
    state.retained = first_position


class MessageHolds:
    """The holds of a store's partitions."""

    def __init__(
        self, state: BrokerState, commit: GroupCommit, firsts: FirstOffsets, *, clock: Clock
    ) -> None:
        self._state = state
        self._commit = commit
        self._first_offsets = firsts
        self._clock = clock
        self._started_ms = clock.boot_ms()
        self._expiries_ms: dict[int, dict[str, int]] = {}
        """
        Maps each partition id to a dict from jobs to the times at which their holds expire, in
        milliseconds since boot. Only holds that were set or renewed since the broker started are
        included.

        The expiries are not a part of the hosted partition, because a cold partition is reduced to
        its image, which has no expiries. The hold would then expire too early.
        """

    def apply_request(self, partition: HostedPartition, request: SetHold) -> asyncio.Future[None]:
        """
        Set, renew or end a hold.

        Returns:
            A future that is resolved when the hold or its end is durable.

        Raises:
            OffsetOutOfRangeError: retention has removed the message at this offset, or the offset
                is beyond the end.
            OverloadedError: the partition has HOLDS_PER_PARTITION_MAX holds.
            InvalidRequestError, BrokerReadOnlyError: nothing was changed.
        """
        check_name("job", request.job)
        self._first_offsets.raise_pending(partition.partition_id)
        if not request.ttl_ms:
            return self._end_hold(partition, request.job)
        if not partition.first_offset <= request.from_offset <= partition.readable_offset:
            raise OffsetOutOfRangeError(
                f"offset {request.from_offset} of partition {partition.partition_id} cannot be "
                f"held: [{partition.first_offset}, {partition.readable_offset}) is stored",
                partition_id=partition.partition_id,
                offset=request.from_offset,
                first_offset=partition.first_offset,
                next_offset=partition.readable_offset,
            )
        other_holds = [view for view in self.list_views(partition) if view.job != request.job]
        if len(other_holds) >= HOLDS_PER_PARTITION_MAX:
            raise OverloadedError(
                f"partition {partition.partition_id} is held by {len(other_holds)} jobs already",
                limit=HOLDS_PER_PARTITION_MAX,
            )
        body = HoldBody(request.job, request.from_offset, request.ttl_ms)
        if partition.holds.get(request.job) == body:
            self._renew_hold(partition, body)
            return self._commit.wait_flushed()
        self._end_expired(partition)
        write_future = self._write_hold(partition, body)
        # Retention may be deciding without taking this hold into account.
        self._first_offsets.changed_ids.add(partition.partition_id)
        self._renew_hold(partition, body)
        return write_future

    def build_reply(self, partition: HostedPartition) -> Held:
        """Return the reply to a request for holds."""
        return Held(
            partition_id=partition.partition_id,
            first_offset=partition.first_offset,
            next_offset=partition.readable_offset,
            holds=self.list_views(partition),
        )

    def list_views(self, partition: HostedPartition) -> tuple[HoldView, ...]:
        """Return the holds that have not expired, sorted by job."""
        return tuple(
            HoldView(
                job=body.job, from_offset=body.from_offset, ttl_ms=body.ttl_ms, left_ms=left_ms
            )
            for body in sorted(partition.holds.values())
            if (left_ms := self._remaining_ms(partition, body)) > 0
        )

    def first_held_offset(self, partition: HostedPartition) -> int | None:
        """Return the lowest held offset, or None. Expired holds are ended durably, so that they do
        not reappear after a restart.
        """
        if not partition.holds:
            return None
        self._end_expired(partition)
        return min((view.from_offset for view in self.list_views(partition)), default=None)

    def forget(self, partition_id: int) -> None:
        """Forget the holds of a partition whose drop is durable."""
        self._expiries_ms.pop(partition_id, None)

    @property
    def partition_count(self) -> int:
        """The number of partitions that have expiries in memory."""
        return len(self._expiries_ms)

    def _remaining_ms(self, partition: HostedPartition, body: HoldBody) -> int:
        expiry_ms = self._expiries_ms.get(partition.partition_id, {}).get(body.job)
        if expiry_ms is None:
            expiry_ms = self._started_ms + body.ttl_ms
        return expiry_ms - self._clock.boot_ms()

    def _renew_hold(self, partition: HostedPartition, body: HoldBody) -> None:
        expiries_ms = self._expiries_ms.setdefault(partition.partition_id, {})
        expiries_ms[body.job] = self._clock.boot_ms() + body.ttl_ms

    def _end_hold(self, partition: HostedPartition, job: str) -> asyncio.Future[None]:
        """The end a hold durably, if the job has one."""
        if job not in partition.holds:
            return self._commit.wait_flushed()
        end_future = self._write_hold(partition, HoldBody(job, 0, 0))
        expiries_ms = self._expiries_ms.get(partition.partition_id, {})
        if expiries_ms.pop(job, None) is not None and not expiries_ms:
            del self._expiries_ms[partition.partition_id]
        return end_future

    def _end_expired(self, partition: HostedPartition) -> None:
        live = {view.job for view in self.list_views(partition)}
        for job in [job for job in partition.holds if job not in live]:
            # The record is not awaited. Without it, the hold reappears after a restart for the
            # duration of its ttl.
            self._end_hold(partition, job).add_done_callback(_ignore_outcome)

    def _write_hold(self, partition: HostedPartition, body: HoldBody) -> asyncio.Future[None]:
        """Apply a HOLD record to the partition, and make it durable."""
        record = encode_body(partition.partition_id, body)
        self._commit.check_room(len(record), is_control=True)
        self._state.mark_dirty(partition)
        undo = partition.apply_hold(body)
        entry = Entry(record, partition_id=partition.partition_id, undo=undo)
        return self._commit.submit(entry)


def _ignore_outcome(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()

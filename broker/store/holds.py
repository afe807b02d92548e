"""Holds of jobs on partitions: they are durable without a time, and their ends are in memory.

    POST /v1/partitions/{id}/holds ─▶ HOLD [job, from, ttl_ms]    ttl_ms 0: ended
    a renewal                      ─▶ no record, only a later end

Invariants
    While a hold has not expired, retention removes no message from `from_offset` on, whatever the
    subject's retention is. A hold ends at most its ttl after it was set or renewed, and at most its
    ttl after the broker's start: ends are times of the boot clock, and a hold that was read from
    the log is counted from the start of the broker. A hold can be set only on stored messages:
    first offsets that are already decided are raised first.

Raises first offsets when retention removes messages, in service and at a start.

    decided ─▶ pending: partition → first offset ─▶ rise, some at a time ─▶ segments removed ─▶ the
        index forgets
                       ▲
           an acquire of the partition meanwhile raises its first offset at once

If a subject's retention is TIME, messages may be removed that a group has not acked. They are
counted for the group, and the count is durable before the segments are removed.

Invariants
    Segments are removed only when the acks that allow it are durable. A group that is registered
    before the decision is taken into account; a group that is registered later begins at the first
    offset that was decided. The beginning of the log determines which messages are removed. A start
    corrects first offsets and the index accordingly.
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
    """The first offsets of a store; `save` makes a group's progress durable."""

    def __init__(
        self, state: BrokerState, *, save: Callable[[HostedPartition, Group], Awaitable[None]]
    ) -> None:
        self._state = state
        self._save = save
        self.grouped: set[int] = set()
        """The partitions that a consumer group has joined, or was reset in, since this set was last
        emptied.
        """
        self.pending: dict[int, int] = {}
        """Partition id → the first offset that is decided and not raised yet."""
        self.removed: dict[tuple[str, str], tuple[int, int]] = {}
        """(subject, group) → the number of messages removed unread and the number of partitions,
        since this dictionary was last emptied.
        """
        self._unsaved: dict[tuple[int, str], tuple[HostedPartition, Group]] = {}
        """The groups whose progress, or whose count of messages removed unread, may not be durable.
        """

    def rise(self, partition_id: int) -> None:
        """Raise the partition's first offset if a higher one is decided."""
        first = self.pending.pop(partition_id, 0)
        partition = self._state.partitions.get(partition_id) if first else None
        if partition is None or first <= partition.first_offset:
            return
        self._state.touch(partition)
        before, partition.first_offset = partition.first_offset, first
        for group in partition.groups.values():
            unread = group.acked.unacked(before, first)
            group.skip_to(first)
            if group.unsaved:
                self._unsaved[partition_id, group.name] = partition, group
            if unread:
                group.removed_unread += unread
                key = partition.facts.subject, group.name
                messages, partitions = self.removed.get(key, (0, 0))
                self.removed[key] = messages + unread, partitions + 1

    async def saved(self) -> None:
        """
        Wait until the progress of the groups whose messages are removed is durable.

        Raises:
            StorageError, BrokerReadOnlyError: some progress is not durable; the next call tries
                again.
        """
        unsaved = list(self._unsaved.items())
        await asyncio.gather(
            *(self._save(partition, group) for _, (partition, group) in unsaved if group.unsaved)
        )
        for key, _ in unsaved:
            del self._unsaved[key]


def correct_first_offsets(
    state: BrokerState, queues: ConsumeQueues, *, first_position: int
) -> None:
    """
    Raise every first offset to the partition's first message in the log, which begins at
    `first_position`.

    The index must be complete. Blocks.
    """
    for _ in queues.retain(first_position, dropped=state.dropped.durable()):
        pass
    for partition_id in list(state.partitions):
        partition = state.partitions[partition_id]
        bounds = queues.bounds(partition_id)
        first = partition.next_offset if bounds is None else bounds[0]
        if partition.first_offset < first <= partition.next_offset:
            partition.first_offset = first
            state.touch(partition)
    state.retained = first_position


class MessageHolds:
    """The holds of a store's partitions."""

    def __init__(
        self, state: BrokerState, commit: GroupCommit, firsts: FirstOffsets, *, clock: Clock
    ) -> None:
        self._state = state
        self._commit = commit
        self._firsts = firsts
        self._clock = clock
        self._opened_ms = clock.boot_ms()
        self._ends_ms: dict[int, dict[str, int]] = {}
        """
        Partition id → job → time of the boot clock, in milliseconds, at which the hold expires. It
        has only the holds that were set since the start.

        This is not kept in the hosted partition, which is reduced to its image when it is cold: a
        hold that is counted from the start would then end too early.
        """

    def set(self, partition: HostedPartition, ask: SetHold) -> asyncio.Future[None]:
        """
        Set, renew or end a hold.

        Returns:
            A future that is resolved when the hold, or its end, is durable.

        Raises:
            OffsetOutOfRangeError: retention has removed messages from the offset on, or it is after
                the end.
            OverloadedError: the partition has HOLDS_PER_PARTITION_MAX holds.
            InvalidRequestError, BrokerReadOnlyError: nothing was changed.
        """
        check_name("job", ask.job)
        self._firsts.rise(partition.partition_id)
        if not ask.ttl_ms:
            return self._end(partition, ask.job)
        if not partition.first_offset <= ask.from_offset <= partition.readable_offset:
            raise OffsetOutOfRangeError(
                f"offset {ask.from_offset} of partition {partition.partition_id} cannot be held: "
                f"[{partition.first_offset}, {partition.readable_offset}) is stored",
                partition_id=partition.partition_id,
                offset=ask.from_offset,
                first_offset=partition.first_offset,
                next_offset=partition.readable_offset,
            )
        others = [view for view in self.views(partition) if view.job != ask.job]
        if len(others) >= HOLDS_PER_PARTITION_MAX:
            raise OverloadedError(
                f"partition {partition.partition_id} is held by {len(others)} jobs already",
                limit=HOLDS_PER_PARTITION_MAX,
            )
        body = HoldBody(ask.job, ask.from_offset, ask.ttl_ms)
        if partition.holds.get(ask.job) == body:
            self._begin(partition, body)
            return self._commit.flushed()
        self._end_expired(partition)
        written = self._write(partition, body)
        # Retention may be about to decide without this hold.
        self._firsts.grouped.add(partition.partition_id)
        self._begin(partition, body)
        return written

    def answer(self, partition: HostedPartition) -> Held:
        """Return the answer to the call."""
        return Held(
            partition_id=partition.partition_id,
            first_offset=partition.first_offset,
            next_offset=partition.readable_offset,
            holds=self.views(partition),
        )

    def views(self, partition: HostedPartition) -> tuple[HoldView, ...]:
        """Return the holds that have not expired, sorted by job."""
        return tuple(
            HoldView(
                job=body.job, from_offset=body.from_offset, ttl_ms=body.ttl_ms, left_ms=left_ms
            )
            for body in sorted(partition.holds.values())
            if (left_ms := self._left_ms(partition, body)) > 0
        )

    def needed_from(self, partition: HostedPartition) -> int | None:
        """Return the first offset that is held, or None. Expired holds are ended, so that a restart
        finds none.
        """
        if not partition.holds:
            return None
        self._end_expired(partition)
        return min((view.from_offset for view in self.views(partition)), default=None)

    def forget(self, partition_id: int) -> None:
        """Forget the holds of a partition whose drop is durable."""
        self._ends_ms.pop(partition_id, None)

    @property
    def partitions(self) -> int:
        """The number of partitions whose ends of holds are kept here."""
        return len(self._ends_ms)

    def _left_ms(self, partition: HostedPartition, body: HoldBody) -> int:
        ends_ms = self._ends_ms.get(partition.partition_id, {}).get(body.job)
        if ends_ms is None:
            ends_ms = self._opened_ms + body.ttl_ms
        return ends_ms - self._clock.boot_ms()

    def _begin(self, partition: HostedPartition, body: HoldBody) -> None:
        ends_ms = self._ends_ms.setdefault(partition.partition_id, {})
        ends_ms[body.job] = self._clock.boot_ms() + body.ttl_ms

    def _end(self, partition: HostedPartition, job: str) -> asyncio.Future[None]:
        if job not in partition.holds:
            return self._commit.flushed()
        ended = self._write(partition, HoldBody(job, 0, 0))
        ends_ms = self._ends_ms.get(partition.partition_id, {})
        if ends_ms.pop(job, None) is not None and not ends_ms:
            del self._ends_ms[partition.partition_id]
        return ended

    def _end_expired(self, partition: HostedPartition) -> None:
        live = {view.job for view in self.views(partition)}
        for job in [job for job in partition.holds if job not in live]:
            # The record is not awaited: without it, a restart finds the hold again, for its ttl.
            self._end(partition, job).add_done_callback(_heard)

    def _write(self, partition: HostedPartition, body: HoldBody) -> asyncio.Future[None]:
        record = encode_body(partition.partition_id, body)
        self._commit.check_room(len(record), own=True)
        self._state.touch(partition)
        undo = partition.apply_hold(body)
        entry = Entry(record, partition_id=partition.partition_id, undo=undo)
        return self._commit.submit(entry)


def _heard(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()

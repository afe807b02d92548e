"""Removes the oldest segments after rewriting the state of the partitions that they describe.

    partitions with a PARTITION or STATE record in the segments
        ─▶ a STATE record for each (several for a large one), durable
    dropped partitions, which only DROPPED records describe
        ─▶ DROPPED records of all of them, durable
    scheduled messages whose records are in the segments
        ─▶ SCHEDULED records, durable
      ─▶ a snapshot at a position after the segments ─▶ the segments are removed

Invariants
    The log alone, from its first segment on, has the complete state of every partition, except
    removed messages. A crash in the middle may leave duplicate records, but replaying them leads to
    the same state. A partition's records are queued together, with no other record between them. If
    damage may hide records of unknown partitions, all partitions are rewritten.
"""

from __future__ import annotations

import asyncio

from ...protocol.errors import StorageError
from ...protocol.record import Kind, encode_record
from ..partition.image import encode_partition, encode_partition_parts
from ..partition.park_views import changes_to_rebuild
from ..partition.partition import HostedPartition
from ..partition.records import DroppedBody, FenceBody, ParkedBody, encode_body
from ..partition.state import BrokerState
from ..storage.files import Files
from ..storage.log.commit_log import CommitLog
from ..storage.log.log_reader import list_described_partitions
from .agenda import Agenda
from .group_commit import Entry, GroupCommit, RunBlocking
from .snapshotter import Snapshotter

STATE_BYTES_MAX = 1 << 19
"""The maximum size, in bytes, of an image that is written as one STATE record. A larger partition
is written as several STATE records, each with some of its producers, and as a FENCE and a CURSOR
for each of its consumer groups.
"""
PRODUCERS_PER_RECORD = 1_000
"""The number of producers in a STATE record of a large partition. Each producer takes at most 295
bytes, and the other fields take about 10,000.
"""
FLUSH_PARTITIONS = 200
FLUSH_BYTES = 4 << 20
"""The number of partitions and the number of bytes after which the records are awaited, so that
appends are served in the meantime.
"""


class CarryOver:
    """Removes the first segments of a log. Calls must not overlap."""

    def __init__(
        self,
        files: Files,
        *,
        state: BrokerState,
        log: CommitLog,
        commit: GroupCommit,
        snapshotter: Snapshotter,
        agenda: Agenda,
        run_read: RunBlocking,
        run_commit: RunBlocking,
    ) -> None:
        self._files = files
        self._agenda = agenda
        self._state = state
        self._log = log
        self._commit = commit
        self._snapshotter = snapshotter
        self._run_read = run_read
        self._run_commit = run_commit

    async def rewrite_described(self, position: int) -> None:
        """
        Durably rewrite the partitions that are described by segments below `position`, and the
        scheduled messages in them.

        Raises:
            BrokerReadOnlyError, OverloadedError, StorageError: the segments must not be removed.
        """
        bases = [base for base in self._log.bases if base < position]
        partition_ids = await self._run_read(self._find_described, bases)
        if partition_ids is None:
            partition_ids = sorted(self._state.partitions.ids())
        futures: list[asyncio.Future[None]] = []
        count = size = 0
        for partition_id in partition_ids:
            partition = self._state.partitions.get(partition_id)
            if partition is None:
                continue
            records = self._records_of(partition)
            futures += [self._submit(partition, record) for record in records]
            count += 1
            size += sum(map(len, records))
            if count >= FLUSH_PARTITIONS or size >= FLUSH_BYTES:
                await asyncio.gather(*futures)
                futures, count, size = [], 0, 0
        futures += [self._submit_dropped(body) for body in self._state.dropped.record_bodies()]
        await asyncio.gather(*futures)
        await self._agenda.rewrite_below(position, self._log, self._commit, self._run_read)
        if self._snapshotter.position < position and not await self._snapshotter.write():
            raise StorageError(f"no snapshot: {self._snapshotter.problem}")

    async def remove_segments(self, position: int) -> int:
        """
        Remove the segments below `position`, for which `rewrite_described` was called.

        Before this call, all first offsets must have been raised above `position`. The active
        segment must not be among the removed ones.

        Returns:
            The number of removed segments.
        """
        removed_count = 0
        while self._log.first_position < position:
            await self._run_commit(self._log.remove_first_segment)
            removed_count += 1
        return removed_count

    async def remove_oldest_segment(self) -> int:
        """Rewrite the partitions that are described by the oldest segment, then remove the segment.
        Return the log's new first position.
        """
        next_base = self._log.bases[1]
        await self.rewrite_described(next_base)
        await self.remove_segments(next_base)
        return self._log.first_position

    def _find_described(self, segment_bases: list[int]) -> list[int] | None:
        """Return the ids of the partitions that are described by segments, or None if damage may
        hide some.
        """
        partition_ids: set[int] = set()
        for base in segment_bases:
            segment_ids = list_described_partitions(
                self._files, base, end=self._log.segment_end(base)
            )
            if segment_ids is None:
                return None
            partition_ids |= segment_ids
        return sorted(partition_ids)

    def _records_of(self, partition: HostedPartition) -> list[bytes]:
        """Return records of a partition's state. They must be queued before anything else is
        decided about the partition.
        """
        self._commit.check_room(0, is_control=True)
        image = encode_partition(partition)
        if len(image) <= STATE_BYTES_MAX:
            return [_state_record(partition, image)]
        parts = encode_partition_parts(partition, producers_max=PRODUCERS_PER_RECORD)
        records = [_state_record(partition, part) for part in parts]
        for group in partition.groups.values():
            lock = group.lock
            bodies = (
                FenceBody(group.name, lock.fence, lock.session, lock.promise_ms),
                group.cursor_body(),
            )
            records += [encode_body(partition.partition_id, body) for body in bodies]
            if group.parked is not None:
                records += [
                    encode_body(
                        partition.partition_id,
                        ParkedBody(
                            group.name,
                            group.parked.token_for_rewrite(change, lock.fence),
                            0,
                            (change,),
                        ),
                    )
                    for change in changes_to_rebuild(group.parked)
                ]
        return records

    def _submit_dropped(self, body: DroppedBody) -> asyncio.Future[None]:
        return self._commit.submit(Entry(encode_body(0, body)))

    def _submit(self, partition: HostedPartition, record: bytes) -> asyncio.Future[None]:
        # The record is built and queued without an await in between, so everything that was decided
        # earlier precedes it in the log.
        entry = Entry(
            record,
            partition_id=partition.partition_id,
            base_offset=partition.next_offset,
        )
        return self._commit.submit(entry)


def _state_record(partition: HostedPartition, image: bytes) -> bytes:
    return encode_record(image, kind=Kind.STATE, partition_id=partition.partition_id)

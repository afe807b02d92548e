"""Removing the oldest segments without forgetting a partition: what only it says is written again first.

    partitions whose PARTITION or STATE record lies in the segments ─▶ a STATE record each, durable
      ─▶ a snapshot that stands for what follows the segments ─▶ the segments are removed

Invariants
    The log alone, from its first segment on, always says everything about every partition but what retention removed.
    A crash in between leaves records twice, which fold without a difference.
"""

from __future__ import annotations

import asyncio

from ..protocol.errors import StorageError
from ..protocol.record import Kind, encode_record
from .group_commit import Entry, GroupCommit, RunBlocking
from .partition import HostedPartition
from .partition_image import image_of
from .records import CursorBody, FenceBody, encode_body
from .snapshotter import Snapshotter
from .state import BrokerState
from .storage.commit_log import CommitLog
from .storage.files import Files
from .storage.headers import segment_headers

STATE_BYTES_MAX = 1 << 19
"""A larger partition is written as its STATE without consumer groups, and a fence and a cursor for each of these."""
TOGETHER = 200
"""Partitions submitted before the next wait, so that appends come between them."""
_FULL = (Kind.PARTITION, Kind.STATE)


class CarryOver:
    """Drops first segments of a log; one call at a time."""

    def __init__(
        self,
        files: Files,
        *,
        state: BrokerState,
        log: CommitLog,
        commit: GroupCommit,
        snapshotter: Snapshotter,
        run_read: RunBlocking,
        run_commit: RunBlocking,
    ) -> None:
        self._files = files
        self._state = state
        self._log = log
        self._commit = commit
        self._snapshotter = snapshotter
        self._run_read = run_read
        self._run_commit = run_commit

    async def prepare(self, position: int) -> None:
        """
        Write again what only the segments below `position` say, durably; nothing is removed yet.

        Raises:
            BrokerReadOnlyError, OverloadedError, StorageError: they have to stay.
        """
        bases = [base for base in self._log.bases if base < position]
        numbers = await self._run_read(self._described, bases)
        for start in range(0, len(numbers), TOGETHER):
            written = [
                future
                for number in numbers[start : start + TOGETHER]
                if (partition := self._state.partitions.get(number)) is not None
                for future in self._write_again(partition)
            ]
            await asyncio.gather(*written)
        if self._snapshotter.position < position and not await self._snapshotter.write():
            raise StorageError(f"no snapshot: {self._snapshotter.problem}")

    async def drop(self, position: int) -> int:
        """
        Remove the segments below `position`, prepared before, for ever; the one that is written to stays.

        Readers have to be kept off what lies below it before this call.

        Returns:
            How many went.
        """
        gone = 0
        while self._log.first_position < position:
            await self._run_commit(self._log.drop_first)
            gone += 1
        return gone

    async def drop_first_segment(self) -> int:
        """As `prepare` and `drop` of the oldest segment; the first position of the log then."""
        following = self._log.bases[1]
        await self.prepare(following)
        await self.drop(following)
        return self._log.first_position

    def _described(self, bases: list[int]) -> list[int]:
        """Partitions of which these segments say what they are."""
        return sorted(
            {
                one.partition_id
                for base in bases
                for one in segment_headers(self._files, base)
                if one.kind in _FULL
            }
        )

    def _write_again(self, partition: HostedPartition) -> list[asyncio.Future[None]]:
        self._commit.check_room(0, though_held=True)
        image = image_of(partition)
        if len(image) <= STATE_BYTES_MAX:
            return [self._submit(partition, _state_record(partition, image))]
        records = [_state_record(partition, image_of(partition, groups=False))]
        for group in partition.groups.values():
            lock, acked = group.lock, group.acked
            bodies = (
                FenceBody(group.name, lock.fence, lock.session),
                CursorBody(group.name, lock.fence, acked.cursor, acked.ranges),
            )
            records += [encode_body(partition.partition_id, body) for body in bodies]
        return [self._submit(partition, record) for record in records]

    def _submit(self, partition: HostedPartition, record: bytes) -> asyncio.Future[None]:
        # Decided now and queued now: what was decided before is before it in the log, or lost with it.
        entry = Entry(
            record,
            partition_id=partition.partition_id,
            base_offset=partition.next_offset,
            durable=True,
        )
        return self._commit.submit(entry)


def _state_record(partition: HostedPartition, image: bytes) -> bytes:
    return encode_record(image, kind=Kind.STATE, partition_id=partition.partition_id)

"""Writes snapshots of the state when they are due. Images are encoded in slices, between which
requests are served.

    position := end of the log ─▶ images of changed partitions, in slices
        ─▶ wait until that state is durable ─▶ images of scheduled messages
        ─▶ index checkpoint, scheduled messages, then the file, off the event loop ─▶ done

A partition that changes in the meantime is in this snapshot, in its state before or after the
change, and also in the next snapshot. When the broker starts, it replays the log after `position`
into either of them.

Invariants
    A snapshot contains the effects of durable records only: if the wait fails, the snapshot is
    discarded.
"""

from __future__ import annotations

import asyncio
import logging

from ...protocol.errors import KeylaneError, StorageError
from ...rpc.race import shield
from ..partition.state import BrokerState
from ..storage.index.interface import ConsumeQueues
from ..storage.log.commit_log import CommitLog
from ..storage.snapshot import Extra, Snapshots, encode_chunk
from .agenda import Agenda
from .group_commit import GroupCommit, RunBlocking

log = logging.getLogger("keylane.broker")

PARTITIONS_PER_SLICE = 1_000
"""The number of partitions that are encoded between two pauses, which takes about 5 ms."""
IDS_PER_SLICE = 10_000
"""The number of hosted partitions that are compared with dropped ones between two pauses, which
takes about 5 ms.
"""
DIRTY_MAX = 100_000
"""The number of changed partitions at which a snapshot is due, even if the log has not grown by
`snapshot_bytes`.
"""


class Snapshotter:
    """Writes a snapshot of a state for every `snapshot_bytes` of the log."""

    def __init__(
        self,
        state: BrokerState,
        log: CommitLog,
        queues: ConsumeQueues,
        commit: GroupCommit,
        snapshots: Snapshots,
        agenda: Agenda,
        *,
        position: int,
        snapshot_bytes: int,
        run_blocking: RunBlocking,
    ) -> None:
        self._state = state
        self._log = log
        self._queues = queues
        self._commit = commit
        self._snapshots = snapshots
        self._agenda = agenda
        self._snapshot_bytes = snapshot_bytes
        self._run_blocking = run_blocking
        self._task: asyncio.Task[bool] | None = None
        self._last_attempt_end = position
        self.position = position
        """The log position of the newest snapshot, from which the log is replayed when the broker
        starts.
        """
        self.problem = ""
        """The reason why the last snapshot failed; "" if it succeeded."""
        commit.on_commit.append(self._start_if_due)

    def _start_if_due(self) -> None:
        grown = self._log.end - self._last_attempt_end
        is_dirty = len(self._state.partitions.dirty) >= DIRTY_MAX and grown >= DIRTY_MAX
        if self._task is None and (is_dirty or grown >= self._snapshot_bytes):
            self._start(clean=False)

    def _start(self, *, clean: bool) -> asyncio.Task[bool]:
        self._last_attempt_end = self._log.end
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._write(clean=clean), name="snapshot")
        self._task.add_done_callback(self._on_done)
        return self._task

    def _on_done(self, _task: asyncio.Task[bool]) -> None:
        self._task = None

    async def write(self, *, clean: bool = False) -> bool:
        """
        Write a snapshot, after waiting for any snapshot in progress. Return False if it failed.

        Args:
            clean: True if the broker has stopped, so that the snapshot is at the end of the log.
        """
        await self.wait()
        # If the caller is cancelled, the snapshot is still written, and the next one waits for it.
        return await shield(self._start(clean=clean))

    async def wait(self) -> None:
        """Wait for the snapshot in progress, if there is one."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _write(self, *, clean: bool) -> bool:
        """Encode the state, wait until it is durable, and write the files. Return False on
        failure.
        """
        table = self._state.partitions
        position = self._log.end
        dirty, table.dirty = table.dirty, set()
        full = self._snapshots.is_full_due()
        failures = self._commit.failures
        # Read this before the images are encoded: first offsets that rise later are in the next
        # snapshot.
        retained_position = self._state.retained
        try:
            chunks = await self._encode_chunks(table.ids() if full else list(dirty))
            state = self._state
            problems = [text for text in state.problems if text not in state.repaired_by_restart]
            if state.dropped.needs_merge:
                await self._merge_dropped()
            dropped = [(body.ranges, body.subjects) for body in state.dropped.record_bodies()]
            extra = Extra(
                dict(state.orphans), problems, retained_position, sorted(state.damaged), dropped
            )
            await self._commit.wait_flushed()
            # Scheduled messages change when a record is durable, which those below `position` are
            # since the wait.
            scheduled = await self._agenda.images()
            extra.has_scheduled = bool(scheduled)
            if self._commit.failures != failures:
                raise StorageError("a commit failed while the snapshot was being written")
            await self._run_blocking(self._save, chunks, scheduled, full, clean, position, extra)
        except Exception as error:
            table.dirty |= dirty
            if isinstance(error, KeylaneError):
                self.problem = error.message
                log.warning("cannot write a snapshot: %s", error.message)
            else:
                self.problem = f"a bug in the broker: {error!r}"
                log.exception("cannot write a snapshot")
            return False
        self.position = position
        self.problem = ""
        return True

    async def _merge_dropped(self) -> None:
        """
        Merge ranges of dropped ids that no hosted id separates, checking the hosted partitions in
        slices.

        A partition that is added in the meantime counts as changed, because changes are collected
        from the beginning of this snapshot.
        """
        state = self._state
        range_merge = state.dropped.begin_merge()
        ids = state.partitions.ids()
        for first in range(0, len(ids), IDS_PER_SLICE):
            range_merge.keep_apart(ids[first : first + IDS_PER_SLICE])
            await asyncio.sleep(0)
        state.dropped.merge_ranges(
            range_merge, [*state.partitions.dirty, *state.orphans, *state.damaged]
        )

    async def _encode_chunks(self, partition_ids: list[int]) -> list[bytes]:
        """Encode the images of partitions in slices, skipping partitions that no longer exist."""
        table = self._state.partitions
        chunks = []
        for first in range(0, len(partition_ids), PARTITIONS_PER_SLICE):
            if first:
                await asyncio.sleep(0)
            images = [
                (partition_id, table.image(partition_id))
                for partition_id in partition_ids[first : first + PARTITIONS_PER_SLICE]
            ]
            chunks.append(
                encode_chunk([(number, image) for number, image in images if image is not None])
            )
        return chunks

    def _save(
        self,
        chunks: list[bytes],
        scheduled: list[bytes],
        full: bool,
        clean: bool,
        position: int,
        extra: Extra,
    ) -> None:
        self._queues.checkpoint(position)
        self._agenda.save(scheduled, position=position)
        self._snapshots.write(chunks, full=full, clean=clean, position=position, extra=extra)

"""Writes snapshots of the state when they are due, in slices, so that requests do not wait for
them.

    position := end of the log ─▶ images of changed partitions, in slices ─▶ wait until that state
        is durable
                                       ─▶ index, then file, off the event loop ─▶ done

A partition that changes while the slices are made is in this snapshot, as it was before or after
the change, and also in the next one. A start folds the log's records after `position` into either.

Invariants
    A snapshot has the effects of durable records only: if the wait fails, the snapshot is dropped.
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
from .group_commit import GroupCommit, RunBlocking

log = logging.getLogger("keylane.broker")

SLICE = 1_000
"""The number of partitions whose images are made without a pause, which takes about five
milliseconds.
"""
IDS_AT_ONCE = 10_000
"""The number of hosted partitions that are checked against the dropped ones without a pause, which
takes about five milliseconds.
"""
DIRTY_MAX = 100_000
"""The number of changed partitions at which a snapshot is written, even if the log has not grown by
`snapshot_bytes`.
"""


class Snapshotter:
    """Writes snapshots of a state every `snapshot_bytes` of log."""

    def __init__(
        self,
        state: BrokerState,
        log: CommitLog,
        queues: ConsumeQueues,
        commit: GroupCommit,
        snapshots: Snapshots,
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
        self._snapshot_bytes = snapshot_bytes
        self._run_blocking = run_blocking
        self._task: asyncio.Task[bool] | None = None
        self._tried_at = position
        self.position = position
        """The log position of the newest snapshot; a start reads the log from here on."""
        self.problem = ""
        """Why the last snapshot failed; "" if it did not."""
        commit.on_commit = self._check

    def _check(self) -> None:
        grown = self._log.end - self._tried_at
        many = len(self._state.partitions.dirty) >= DIRTY_MAX and grown >= DIRTY_MAX
        if self._task is None and (many or grown >= self._snapshot_bytes):
            self._start(clean=False)

    def _start(self, *, clean: bool) -> asyncio.Task[bool]:
        self._tried_at = self._log.end
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._write(clean=clean), name="snapshot")
        self._task.add_done_callback(self._done)
        return self._task

    def _done(self, _task: asyncio.Task[bool]) -> None:
        self._task = None

    async def write(self, *, clean: bool = False) -> bool:
        """
        Write a snapshot, after the one that is being written. Return False if it failed.

        Args:
            clean: the broker has stopped, so the snapshot is at the end of the log.
        """
        await self.ended()
        # If the caller is cancelled, the snapshot is still written, and the next one waits for it.
        return await shield(self._start(clean=clean))

    async def ended(self) -> None:
        """Wait for the snapshot that is being written, if there is one."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _write(self, *, clean: bool) -> bool:
        table = self._state.partitions
        position = self._log.end
        dirty, table.dirty = table.dirty, set()
        full = self._snapshots.is_full_due()
        failures = self._commit.failures
        # This is read before the images are made: first offsets that rise later are in the next
        # snapshot.
        retained = self._state.retained
        try:
            chunks = await self._chunks(table.ids() if full else list(dirty))
            state = self._state
            problems = [text for text in state.problems if text not in state.until_restart]
            if state.dropped.too_many:
                await self._join_dropped()
            dropped = [(body.ranges, body.subjects) for body in state.dropped.bodies()]
            extra = Extra(dict(state.orphans), problems, retained, sorted(state.damaged), dropped)
            await self._commit.flushed()
            if self._commit.failures != failures:
                raise StorageError("a write failed while the snapshot was made")
            await self._run_blocking(self._put, chunks, full, clean, position, extra)
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

    async def _join_dropped(self) -> None:
        """
        Join ranges of dropped ids, while looking at a portion of the hosted partitions at a time.

        A partition that is added meanwhile is among the changed ones, which were collected from the
        beginning of this snapshot on.
        """
        state = self._state
        joining = state.dropped.joining()
        ids = state.partitions.ids()
        for first in range(0, len(ids), IDS_AT_ONCE):
            joining.keep_apart(ids[first : first + IDS_AT_ONCE])
            await asyncio.sleep(0)
        state.dropped.join(joining, [*state.partitions.dirty, *state.orphans, *state.damaged])

    async def _chunks(self, numbers: list[int]) -> list[bytes]:
        table = self._state.partitions
        chunks = []
        for first in range(0, len(numbers), SLICE):
            if first:
                await asyncio.sleep(0)
            images = [(number, table.image(number)) for number in numbers[first : first + SLICE]]
            chunks.append(
                encode_chunk([(number, image) for number, image in images if image is not None])
            )
        return chunks

    def _put(
        self, chunks: list[bytes], full: bool, clean: bool, position: int, extra: Extra
    ) -> None:
        self._queues.checkpoint(position)
        self._snapshots.write(chunks, full=full, clean=clean, position=position, extra=extra)

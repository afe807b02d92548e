"""Writes snapshots of the state when they are due, in slices, so that requests never wait for them.

    position := end of the log ─▶ images of changed partitions, in slices ─▶ wait until all of that is durable
                                       ─▶ index, then file, off the event loop ─▶ done

A partition that changes while the slices are made is in this snapshot as it was then, and in the next one again; the
log's records after `position` fold into either.

Invariants
    A snapshot has no record that the log may still lose: if the wait fails, the snapshot is dropped.
"""

from __future__ import annotations

import asyncio
import logging

from ...protocol.errors import KeylaneError, StorageError
from ..partition.state import BrokerState
from ..storage.index.interface import ConsumeQueues
from ..storage.log.commit_log import CommitLog
from ..storage.snapshot import Extra, Snapshots, encode_chunk
from .group_commit import GroupCommit, RunBlocking

log = logging.getLogger("keylane.broker")

SLICE = 1_000
"""Partitions between two turns of the event loop: about five milliseconds."""
DIRTY_MAX = 100_000
"""Changed partitions after which a snapshot is written, however little log they took."""


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
        """The log position that the newest snapshot stands for: a start reads the log from here on."""
        self.problem = ""
        """Why the last one failed; "" if it did not."""
        commit.on_settled = self._check

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
        Write a snapshot, after the one that is under way; False if it failed.

        Args:
            clean: the broker stops and decides nothing any more: the snapshot stands for the whole log.
        """
        await self.ended()
        # The caller may be cancelled; the snapshot is written all the same, and the next one waits for it.
        return await asyncio.shield(self._start(clean=clean))

    async def ended(self) -> None:
        """Wait for the snapshot that is under way, if there is one."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _write(self, *, clean: bool) -> bool:
        table = self._state.partitions
        position = self._log.end
        dirty, table.dirty = table.dirty, set()
        whole = self._snapshots.wants_whole()
        failures = self._commit.failures
        retained = (
            self._state.retained
        )  # before the images are made: what rises later is in the next one
        try:
            chunks = await self._chunks(table.ids() if whole else list(dirty))
            state = self._state
            problems = [text for text in state.problems if text not in state.until_restart]
            extra = Extra(dict(state.orphans), problems, retained, sorted(state.damaged))
            await self._commit.flushed()
            if self._commit.failures != failures:
                raise StorageError("writes failed while it was made")
            await self._run_blocking(self._put, chunks, whole, clean, position, extra)
        except Exception as error:
            table.dirty |= dirty
            if isinstance(error, KeylaneError):
                self.problem = error.message
                log.warning("no snapshot: %s", error.message)
            else:
                self.problem = f"a fault of our own: {error!r}"
                log.exception("no snapshot")
            return False
        self.position = position
        self.problem = ""
        return True

    async def _chunks(self, numbers: list[int]) -> list[bytes]:
        table = self._state.partitions
        chunks = []
        for first in range(0, len(numbers), SLICE):
            if first:
                await asyncio.sleep(0)
            images = [(number, table.image(number)) for number in numbers[first : first + SLICE]]
            chunks.append(
                encode_chunk([(one, image) for one, image in images if image is not None])
            )
        return chunks

    def _put(
        self, chunks: list[bytes], whole: bool, clean: bool, position: int, extra: Extra
    ) -> None:
        self._queues.checkpoint(position)
        self._snapshots.write(chunks, whole=whole, clean=clean, position=position, extra=extra)

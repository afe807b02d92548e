"""Writes records to the journal of scheduled messages. All records that wait for the disk become
one frame with one sync.

It runs on one event loop. Records are written in the order of the calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...protocol.errors import (
    BrokerReadOnlyError,
    CorruptLogError,
    DiskFullError,
    FlushFailedError,
    KeylaneError,
    StorageError,
)
from ..store.group_commit import RunBlocking
from .journal import ScheduledJournal
from .records import Place, Record, size_of

log = logging.getLogger("keylane.broker")

WRITE_BYTES_MAX = 4 << 20
"""The number of bytes of records above which a frame takes no more. A frame over FRAME_BYTES_MAX
would be cut off at a start.
"""


@dataclass(slots=True)
class _Write:
    """Records that wait for the disk."""

    records: Sequence[Record]
    size_bytes: int
    done: asyncio.Future[None]
    then: Callable[[Place], object]
    undo: Callable[[], object]


class JournalWriter:
    """The only writer of a journal."""

    def __init__(
        self,
        journal: ScheduledJournal,
        run_blocking: RunBlocking,
        *,
        written: Callable[[], object],
    ) -> None:
        """
        Args:
            run_blocking: runs one function at a time, in the order of the calls.
            written: called after each frame is written.
        """
        self._journal = journal
        self._run_blocking = run_blocking
        self._written = written
        self._queue: deque[_Write] = deque()
        self._failure = ""
        """Why nothing is written any more; "" if records are written."""
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str:
        """Why nothing is written; "" if records are written."""
        return self._journal.problems[0] if self._journal.problems else self._failure

    def check(self) -> None:
        """Raise CorruptLogError or BrokerReadOnlyError if nothing is written."""
        if self._journal.problems:
            raise CorruptLogError(f"scheduled messages are not served: {self.problem}")
        if self._failure:
            raise BrokerReadOnlyError(f"scheduled messages are not written: {self._failure}")

    def submit(
        self,
        records: Sequence[Record],
        *,
        then: Callable[[Place], object] = lambda _place: None,
        undo: Callable[[], object] = lambda: None,
    ) -> asyncio.Future[None]:
        """
        Write records in the order of the calls.

        Args:
            then: called when they are durable, before the future is done.
            undo: called instead of `then` if they are not written, or may not be durable.
        """
        done = asyncio.get_running_loop().create_future()
        self._queue.append(_Write(records, sum(map(size_of, records)), done, then, undo))
        if self._task is None:
            self._task = asyncio.create_task(self._write(), name="scheduled messages")
        return done

    async def _write(self) -> None:
        while self._queue:
            writes: list[_Write] = []
            size = 0
            while self._queue and (
                not writes or size + self._queue[0].size_bytes <= WRITE_BYTES_MAX
            ):
                writes.append(self._queue.popleft())
                size += writes[-1].size_bytes
            records = [record for write in writes for record in write.records]
            place = Place(0, 0, 0)
            try:
                self.check()
                if records:
                    place = await self._run_blocking(self._journal.append, records)
            except KeylaneError as error:
                self._refuse(writes, error)
                continue
            except Exception as error:
                log.exception("a bug in the broker stopped the writing of scheduled messages")
                self._refuse(writes, FlushFailedError(f"a bug in the broker: {error!r:.200}"))
                continue
            for write in writes:
                write.then(place)
                write.done.set_result(None)
            self._written()
        self._task = None

    def _refuse(self, writes: Sequence[_Write], error: KeylaneError) -> None:
        """Report a failure to the callers of writes. After most failures of the disk nothing more
        is written.
        """
        if isinstance(error, StorageError) and not isinstance(error, DiskFullError):
            self._failure = self._failure or error.message
            log.critical("scheduled messages are refused until the broker is restarted: %s", error)
        for write in writes:
            write.undo()
            write.done.set_exception(error.copy())
            write.done.exception()  # its caller may be gone

    async def idle(self) -> None:
        """Wait until all submitted records are written."""
        if self._task is not None:
            await asyncio.wait([self._task])

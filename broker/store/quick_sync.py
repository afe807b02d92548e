"""Makes small commits durable without a thread: written on the event loop, into memory, and synced
by the kernel.

A write of a few kilobytes goes to the page cache, in microseconds.  Where it takes longer, because
the machine has more to write than its disk takes, commits go to the thread for a while.

The thread could do all of it, for 130 to 250 µs more of processor time a commit, half as much again:
it can do so once threads run beside the event loop without Python's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ...protocol.clock import Clock
from ...protocol.errors import FlushFailedError
from ...rpc.threads.turn import in_turn
from ...rpc.threads.worker_thread import WorkerThread
from ..storage.append_file import SyncNotTakenError
from ..storage.files import AppendFile
from ..storage.kernel_syncs import KernelSyncs

log = logging.getLogger("keylane.broker")

T = TypeVar("T")
SLOW_WRITE_MS = 5
PAUSE_MS = 1_000
"""For how long commits go to the thread after a slow write."""


class QuickSync(Protocol):
    """Writes a small commit on the event loop, has its file synced, and calls back."""

    def is_ready(self) -> bool:
        """True if a commit may go this way now: no blocking function that writes is under way."""
        ...

    def write(self, function: Callable[..., T], /, *args: Any) -> T:
        """The value of a function that writes to memory only, or its exception."""
        ...

    def sync(self, file: AppendFile, done: Callable[[Exception | None], None]) -> None:
        """Make all writes to a file durable, then call `done` with None, or a FlushFailedError as
        of `AppendFile.fdatasync`.
        """
        ...


class KernelQuickSync:
    """
    `QuickSync` by the kernel; made in the event loop that uses it.

    Args:
        thread: runs all other functions that write, and what the kernel does not take.
    """

    def __init__(self, syncs: KernelSyncs, thread: WorkerThread, clock: Clock) -> None:
        self._syncs: KernelSyncs | None = syncs
        self._thread = thread
        self._boot_ns = clock.boot_ns
        self._ready_at_ns = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(syncs.descriptor, in_turn, syncs.collect)

    def is_ready(self) -> bool:
        """See `QuickSync`."""
        return (
            self._syncs is not None
            and not self._thread.under_way
            and (not self._ready_at_ns or self._boot_ns() >= self._ready_at_ns)
        )

    def write(self, function: Callable[..., T], /, *args: Any) -> T:
        """See `QuickSync`."""
        began_ns = self._boot_ns()
        try:
            return function(*args)
        finally:
            ended_ns = self._boot_ns()
            slow = ended_ns - began_ns >= SLOW_WRITE_MS * 1_000_000
            self._ready_at_ns = ended_ns + PAUSE_MS * 1_000_000 if slow else 0

    def sync(self, file: AppendFile, done: Callable[[Exception | None], None]) -> None:
        """See `QuickSync`."""

        def ended(error: Exception | None) -> None:
            if isinstance(error, SyncNotTakenError):
                self._leave_to_thread(file, done, error)
            else:
                done(error)

        if self._syncs is None:
            ended(SyncNotTakenError("the queue of the kernel is closed"))
            return
        try:
            file.begin_sync(self._syncs, ended)
        except SyncNotTakenError as error:
            ended(error)

    def _leave_to_thread(
        self, file: AppendFile, done: Callable[[Exception | None], None], error: Exception
    ) -> None:
        """Sync by the thread, from now on: the kernel has begun no sync."""
        log.info("commits are synced by a thread, not by the kernel's asynchronous I/O: %s", error)
        self.close()

        def synced(sync: asyncio.Future[Any]) -> None:
            failure: BaseException | None
            if sync.cancelled():  # whether the thread has synced, or will, is not known
                failure = FlushFailedError("a sync was cancelled", operation="fdatasync")
            else:
                failure = sync.exception()
            assert failure is None or isinstance(failure, Exception)
            done(failure)

        self._thread(file.fdatasync).add_done_callback(synced)

    def close(self) -> None:
        """Be ready no more."""
        if self._syncs is not None:
            with contextlib.suppress(ValueError, OSError):
                self._loop.remove_reader(self._syncs.descriptor)
            self._syncs = None

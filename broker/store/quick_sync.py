"""Makes small commits durable without a thread: they are written into memory on the event loop, and
synced by the kernel.

A write of a few kilobytes goes to the page cache, which takes microseconds. When it takes longer,
because the machine has more to write than its disk takes, commits go to the thread for a while.

The thread could make every commit, but it costs 130 to 250 µs more processor time for each, which
is half as much again. It can replace this path once threads run beside the event loop without
Python's lock.
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
from ..storage.append_file import SyncNotStartedError
from ..storage.files import AppendFile
from ..storage.kernel_syncs import KernelSyncs

log = logging.getLogger("keylane.broker")

T = TypeVar("T")
SLOW_WRITE_MS = 5
PAUSE_MS = 1_000
"""The time, in milliseconds, for which commits go to the thread after a slow write."""


class QuickSync(Protocol):
    """Writes a small commit on the event loop, syncs its file, and calls back."""

    def is_ready(self) -> bool:
        """Return True if a commit may take this path now: no blocking function that writes is under
        way.
        """
        ...

    def write(self, function: Callable[..., T], /, *args: Any) -> T:
        """Return the value of a function that writes to memory only, or raise its exception."""
        ...

    def sync(self, file: AppendFile, done: Callable[[Exception | None], None]) -> None:
        """Make all writes to a file durable, then call `done` with None, or with a FlushFailedError
        like that of `AppendFile.fdatasync`.
        """
        ...


class KernelQuickSync:
    """
    A `QuickSync` that uses the kernel. It must be made in the event loop that uses it.

    Args:
        thread: runs all other functions that write, and the syncs that the kernel does not accept.
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
            if isinstance(error, SyncNotStartedError):
                self._leave_to_thread(file, done, error)
            else:
                done(error)

        if self._syncs is None:
            ended(SyncNotStartedError("the queue of the kernel is closed"))
            return
        try:
            file.begin_sync(self._syncs, ended)
        except SyncNotStartedError as error:
            ended(error)

    def _leave_to_thread(
        self, file: AppendFile, done: Callable[[Exception | None], None], error: Exception
    ) -> None:
        """Sync with the thread from now on, because the kernel has begun no sync."""
        log.info("commits are synced by a thread, not by the kernel's asynchronous I/O: %s", error)
        self.close()

        def synced(sync: asyncio.Future[Any]) -> None:
            failure: BaseException | None
            if sync.cancelled():  # it is not known whether the thread has synced or will sync
                failure = FlushFailedError("a sync was cancelled", operation="fdatasync")
            else:
                failure = sync.exception()
            assert failure is None or isinstance(failure, Exception)
            done(failure)

        self._thread(file.fdatasync).add_done_callback(synced)

    def close(self) -> None:
        """Stop being ready, for good."""
        if self._syncs is not None:
            with contextlib.suppress(ValueError, OSError):
                self._loop.remove_reader(self._syncs.descriptor)
            self._syncs = None

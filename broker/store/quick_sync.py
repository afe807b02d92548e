"""Makes small commits durable without a thread: they are written to the page cache on the event
loop, and synced by the kernel.

Writing a few kilobytes to the page cache takes microseconds. If it takes longer, because the
machine has more to write than its disk can handle, commits use the thread for PAUSE_MS.

The thread could write every commit, but it needs 130 to 250 µs, or 50 %, more processor time for
each. It can replace this path once threads no longer share Python's global interpreter lock.
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
"""The duration of a write, in milliseconds, from which it counts as slow."""
PAUSE_MS = 1_000
"""How long commits use the thread after a slow write, in milliseconds."""


class QuickSync(Protocol):
    """Writes a small commit on the event loop, syncs its file, and calls back."""

    def is_ready(self) -> bool:
        """Return True if a commit may currently take this path, because the thread is not writing
        anything.
        """
        ...

    def write(self, function: Callable[..., T], /, *args: Any) -> T:
        """Call a function that writes only to memory, and return its result."""
        ...

    def sync(self, file: AppendFile, on_done: Callable[[Exception | None], None]) -> None:
        """Make all writes to a file durable, then call `on_done` with None or with the error that
        `AppendFile.fdatasync` would have raised.
        """
        ...


class KernelQuickSync:
    """
    A `QuickSync` that uses the kernel's asynchronous I/O. It must be created within its event loop.

    Args:
        thread: runs all other functions that write, and syncs that the kernel does not accept.
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
            and not self._thread.in_flight
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

    def sync(self, file: AppendFile, on_done: Callable[[Exception | None], None]) -> None:
        """See `QuickSync`."""

        def on_synced(error: Exception | None) -> None:
            if isinstance(error, SyncNotStartedError):
                self._fall_back(file, on_done, error)
            else:
                on_done(error)

        if self._syncs is None:
            on_synced(SyncNotStartedError("the kernel's queue is closed"))
            return
        try:
            file.begin_sync(self._syncs, on_synced)
        except SyncNotStartedError as error:
            on_synced(error)

    def _fall_back(
        self, file: AppendFile, on_done: Callable[[Exception | None], None], error: Exception
    ) -> None:
        """Sync in the thread, now and from now on, because the kernel did not start a sync."""
        log.info("commits are synced by a thread, not by the kernel's asynchronous I/O: %s", error)
        self.close()

        def on_thread_done(sync: asyncio.Future[Any]) -> None:
            failure: BaseException | None
            if sync.cancelled():  # the thread may have synced the file, or may still do so
                failure = FlushFailedError("a sync was cancelled", operation="fdatasync")
            else:
                failure = sync.exception()
            assert failure is None or isinstance(failure, Exception)
            on_done(failure)

        self._thread(file.fdatasync).add_done_callback(on_thread_done)

    def close(self) -> None:
        """Stop using the kernel's queue. From then on, `is_ready` returns False."""
        if self._syncs is not None:
            with contextlib.suppress(ValueError, OSError):
                self._loop.remove_reader(self._syncs.descriptor)
            self._syncs = None

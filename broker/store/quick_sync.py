"""Makes small commits durable without a thread: written on the event loop, into memory, and synced by the kernel.

A write of a few kilobytes goes to the page cache, in microseconds.  Where it takes longer, because the machine has more
to write than its disk takes, commits go to the thread for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ...protocol.clock import Clock
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
    """A second way to make a commit durable."""

    def is_ready(self) -> bool:
        """True if a commit may go this way now: no blocking function that writes is under way."""
        ...

    def write(self, function: Callable[..., T], /, *args: Any) -> T:
        """The value of a function that writes to memory only, or its exception."""
        ...

    async def sync(self, file: AppendFile) -> None:
        """Make all writes to a file durable.  Raises FlushFailedError as `AppendFile.fdatasync`."""
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
        self._boot_ms = clock.boot_ms
        self._ready_at_ms = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(syncs.descriptor, syncs.collect)

    def is_ready(self) -> bool:
        """See `QuickSync`."""
        return (
            self._syncs is not None
            and not self._thread.busy
            and (not self._ready_at_ms or self._boot_ms() >= self._ready_at_ms)
        )

    def write(self, function: Callable[..., T], /, *args: Any) -> T:
        """See `QuickSync`."""
        began_ms = self._boot_ms()
        try:
            return function(*args)
        finally:
            took_ms = self._boot_ms() - began_ms
            self._ready_at_ms = began_ms + took_ms + PAUSE_MS if took_ms >= SLOW_WRITE_MS else 0

    async def sync(self, file: AppendFile) -> None:
        """See `QuickSync`."""
        ended: asyncio.Future[None] = self._loop.create_future()

        def done(error: Exception | None) -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        try:
            if self._syncs is None:
                raise SyncNotTakenError("the queue of the kernel is closed")
            file.begin_sync(self._syncs, done)
            await ended
        except SyncNotTakenError as error:
            log.info("commits are synced by a thread: %s", error)
            self.close()
            await self._thread(file.fdatasync)

    def close(self) -> None:
        """Be ready no more."""
        if self._syncs is not None:
            with contextlib.suppress(ValueError, OSError):
                self._loop.remove_reader(self._syncs.descriptor)
            self._syncs = None

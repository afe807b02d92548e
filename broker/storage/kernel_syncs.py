"""Lets the Linux kernel sync files in the background, so that no thread of this process has to
wait. Does disk I/O.

    begin ─▶ a kernel worker syncs ─▶ `descriptor` is readable ─▶ collect ─▶ on_done(error)

Uses io_submit(2) with IOCB_CMD_FDSYNC, which every file system has supported since Linux 4.18. The
sysctl aio-max-nr limits the number of queues on a machine.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

SyncCallback = Callable[[Exception | None], None]
ErrorFactory = Callable[[int], Exception]
QUEUE_DEPTH = 8
"""The maximum number of syncs that may be in flight."""
NOT_STARTED_ERRNOS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EAGAIN})
"""The errors which mean that the kernel did not start a sync, so that `fdatasync` may be called
instead. A sync that was started and failed must never be repeated.
"""


class KernelSyncs:
    """
    A queue of asynchronous syncs. Only one thread may use it.

    Raises:
        OSError: the kernel does not support asynchronous I/O, or has no free queue.
    """

    def __init__(self) -> None:
        try:
            from caio import linux_aio  # a Linux-only module

            self._operation: Any = linux_aio.Operation
            self._context = linux_aio.Context(QUEUE_DEPTH)
        except (ImportError, SystemError, RuntimeError, MemoryError) as error:
            raise OSError(errno.ENOSYS, f"no asynchronous syncs: {error}") from error
        self._in_flight: dict[int, tuple[Any, SyncCallback, ErrorFactory]] = {}
        self._number = 0
        self._results: dict[int, int] = {}
        """Maps the number of each completed sync to its result."""

    @property
    def descriptor(self) -> int:
        """A file descriptor that becomes readable when a sync completes."""
        return self._context.fileno

    def begin(self, descriptor: int, on_done: SyncCallback, make_error: ErrorFactory) -> None:
        """
        Start an fdatasync. `collect` later calls `on_done` with None, or with `make_error(errno)`.

        Raises:
            OSError: the sync was not started.
        """
        self._number += 1
        number = self._number
        operation = self._operation.fdsync(descriptor)
        operation.set_callback(partial(self._results.__setitem__, number))
        self._in_flight[number] = operation, on_done, make_error
        try:
            submitted_count = self._context.submit(operation)
        except (OSError, SystemError, ValueError, OverflowError, RuntimeError) as error:
            del self._in_flight[number]
            raise OSError(errno.EAGAIN, f"the kernel did not accept the sync: {error}") from error
        if submitted_count != 1:
            del self._in_flight[number]
            raise OSError(errno.EAGAIN, "the kernel did not accept the sync")

    def collect(self) -> None:
        """Call the callbacks of all completed syncs."""
        try:
            self._context.poll()
        except BlockingIOError:
            pass
        # An event exists before the descriptor becomes readable, so one call finds all of them.
        self._context.process_events(QUEUE_DEPTH)
        while self._results:  # not in the library's callback, because `on_done` may start a sync
            number, result = self._results.popitem()
            _, on_done, make_error = self._in_flight.pop(number)
            error = 0 if result < 1 << 63 else (1 << 64) - result
            on_done(make_error(error) if error else None)

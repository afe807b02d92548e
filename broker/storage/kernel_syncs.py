"""Lets the kernel sync files in the background, without a waiting thread of this process. Disk;
Linux.

    begin ─▶ the kernel's worker syncs ─▶ `descriptor` is readable ─▶ collect ─▶ done(errno)

Source: io_submit(2), IOCB_CMD_FDSYNC, since Linux 4.18 for every file system; aio-max-nr bounds the
queues of a machine.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

Done = Callable[[Exception | None], None]
ErrorOf = Callable[[int], Exception]
AT_ONCE = 8
NOT_TAKEN = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EAGAIN})
"""The errors after which the kernel has not begun the sync, so another way may be tried: no failed
sync is repeated.
"""


class KernelSyncs:
    """
    A queue of syncs that are under way. Only one thread may use it.

    Raises:
        OSError: this kernel has no such queue, or none left.
    """

    def __init__(self) -> None:
        try:
            from caio import linux_aio  # a module for Linux only

            self._operation: Any = linux_aio.Operation
            self._context = linux_aio.Context(AT_ONCE)
        except (ImportError, SystemError, RuntimeError, MemoryError) as error:
            raise OSError(errno.ENOSYS, f"no syncs by the kernel: {error}") from error
        self._under_way: dict[int, tuple[Any, Done, ErrorOf]] = {}
        self._number = 0
        self._results: dict[int, int] = {}
        """Number of a sync that has ended → its result."""

    @property
    def descriptor(self) -> int:
        """The file descriptor that is readable once a sync has ended."""
        return self._context.fileno

    def begin(self, descriptor: int, done: Done, error_of: ErrorOf) -> None:
        """
        Begin an fdatasync. `collect` calls `done` with None, or with the error for the errno.

        Raises:
            OSError: it was not begun.
        """
        self._number += 1
        number = self._number
        operation = self._operation.fdsync(descriptor)
        operation.set_callback(partial(self._results.__setitem__, number))
        self._under_way[number] = operation, done, error_of
        try:
            taken = self._context.submit(operation)
        except (OSError, SystemError, ValueError, OverflowError, RuntimeError) as error:
            del self._under_way[number]
            raise OSError(errno.EAGAIN, f"the kernel takes no sync: {error}") from error
        if taken != 1:
            del self._under_way[number]
            raise OSError(errno.EAGAIN, "the kernel takes no sync")

    def collect(self) -> None:
        """Call `done` for every sync that has ended."""
        try:
            self._context.poll()
        except BlockingIOError:
            pass
        # An event exists before its descriptor is readable, so one look finds them all.
        self._context.process_events(AT_ONCE)
        while self._results:  # not in the library's callback: `done` may begin the next sync
            number, result = self._results.popitem()
            _, done, error_of = self._under_way.pop(number)
            error = 0 if result < 1 << 63 else (1 << 64) - result
            done(error_of(error) if error else None)

"""An append-only file on the disk: vectored writes, fdatasync, truncate. Does disk I/O; implements
`AppendFile`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from ...protocol.errors import DataFolderError, DiskFullError, FlushFailedError, StorageError
from ...protocol.errors.failures import open_files_error
from .kernel_syncs import NOT_STARTED_ERRNOS, KernelSyncs

Buffer = bytes | bytearray | memoryview
IOV_MAX = 1024
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
OPEN_FILES_ERRNOS = (errno.EMFILE, errno.ENFILE)
_ACCESS_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)


class SyncNotStartedError(Exception):
    """The kernel did not start the requested sync. No write is known to be lost."""


def disk_error(operation: str, path: str, error: OSError) -> StorageError:
    """Convert an `OSError` that `operation` raised for `path` into a StorageError."""
    if error.errno in OPEN_FILES_ERRNOS:
        return open_files_error(f"{operation} {path}", operation=operation, path=path)
    text = f"{operation} {path}: {error.strerror or error}"
    if error.errno in _FULL_ERRNOS:
        return DiskFullError(text, operation=operation, path=path)
    if error.errno in _ACCESS_ERRNOS:
        return DataFolderError(text, operation=operation, path=path)
    return StorageError(text, operation=operation, path=path)


class RealAppendFile:
    """The `AppendFile` for a real file system."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._allocated_bytes = self.size
        """The size of the file on the disk, including reserved bytes."""

    def append(self, buffers: Sequence[Buffer]) -> None:
        """See `AppendFile.append`. Each system call writes up to IOV_MAX buffers; a partial write
        is continued.
        """
        for first_index in range(0, len(buffers), IOV_MAX):
            remaining_buffers: list[Buffer] = list(buffers[first_index : first_index + IOV_MAX])
            while remaining_buffers:
                try:
                    written_bytes = os.pwritev(self._descriptor, remaining_buffers, self.size)
                except OSError as error:
                    raise disk_error("write", self._path, error) from error
                self.size += written_bytes
                remaining_buffers = _skip_bytes(remaining_buffers, written_bytes)

    @property
    def reserved(self) -> int:
        """See `AppendFile.reserved`."""
        return max(self._allocated_bytes - self.size, 0)

    def reserve(self, length: int) -> None:
        """See `AppendFile.reserve`."""
        try:
            os.posix_fallocate(self._descriptor, self.size, length)
        except OSError as error:
            raise disk_error("allocate", self._path, error) from error
        finally:
            self._allocated_bytes = os.fstat(
                self._descriptor
            ).st_size  # even if the disk is full, some bytes may be reserved

    def fdatasync(self) -> None:
        """See `AppendFile.fdatasync`."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise FlushFailedError(
                f"fdatasync {self._path}: {error.strerror}", operation="fdatasync", path=self._path
            ) from error

    def begin_sync(self, syncs: KernelSyncs, on_done: Callable[[Exception | None], None]) -> None:
        """See `AppendFile.begin_sync`."""
        try:
            syncs.begin(self._descriptor, on_done, self._sync_error)
        except OSError as error:
            text = f"fdatasync {self._path}: {error.strerror}"
            raise SyncNotStartedError(text) from error

    def _sync_error(self, error_number: int) -> Exception:
        text = f"fdatasync {self._path}: {os.strerror(error_number)}"
        if error_number in NOT_STARTED_ERRNOS:
            return SyncNotStartedError(text)
        return FlushFailedError(text, operation="fdatasync", path=self._path)

    def truncate(self, size: int) -> None:
        """See `AppendFile.truncate`."""
        try:
            os.ftruncate(self._descriptor, size)
            self.size = self._allocated_bytes = size
            os.fsync(self._descriptor)
        except OSError as error:
            raise FlushFailedError(
                f"truncate {self._path}: {error.strerror}", operation="truncate", path=self._path
            ) from error

    def rewind(self, size: int) -> None:
        """See `AppendFile.rewind`."""
        self.size = size

    def close(self) -> None:
        """See `AppendFile.close`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _skip_bytes(buffers: list[Buffer], count: int) -> list[Buffer]:
    """Return the buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        size = len(buffer)
        if count < size:
            return [memoryview(buffer)[count:], *buffers[index + 1 :]]
        count -= size
    return []

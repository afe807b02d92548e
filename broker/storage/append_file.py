"""A file on the disk that is written at its end: gathered writes, sync, truncate. Disk; see
`AppendFile`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from ...protocol.errors import DataFolderError, DiskFullError, FlushFailedError, StorageError
from ...protocol.errors.failures import open_files_error
from .kernel_syncs import NOT_TAKEN, KernelSyncs

Buffer = bytes | bytearray | memoryview
IOV_MAX = 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
OPEN_FILES_ERRORS = (errno.EMFILE, errno.ENFILE)
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)


class SyncNotTakenError(Exception):
    """The kernel has not begun the requested sync. Nothing is known to be lost."""


def disk_error(operation: str, path: str, error: OSError) -> StorageError:
    """Return the StorageError for an `OSError` that `operation` on `path` raised."""
    if error.errno in OPEN_FILES_ERRORS:
        return open_files_error(f"{operation} {path}", operation=operation, path=path)
    text = f"{operation} {path}: {error.strerror or error}"
    if error.errno in _FULL:
        return DiskFullError(text, operation=operation, path=path)
    if error.errno in _NO_RIGHT:
        return DataFolderError(text, operation=operation, path=path)
    return StorageError(text, operation=operation, path=path)


class RealAppendFile:
    """An `AppendFile` on the disk; the protocol has the contract."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._allocated = self.size
        """Bytes of the file, including reserved ones, when it was opened, cut or last given
        reserved bytes.
        """

    def append(self, buffers: Sequence[Buffer]) -> None:
        """See `AppendFile.append`. One system call writes many buffers. If it writes only a part,
        the rest is written by further calls.
        """
        for first in range(0, len(buffers), IOV_MAX):
            left: list[Buffer] = list(buffers[first : first + IOV_MAX])
            while left:
                try:
                    written = os.pwritev(self._descriptor, left, self.size)
                except OSError as error:
                    raise disk_error("write", self._path, error) from error
                self.size += written
                left = [] if written == sum(map(len, left)) else _rest(left, written)

    @property
    def reserved(self) -> int:
        """See `AppendFile.reserved`."""
        return max(self._allocated - self.size, 0)

    def reserve(self, length: int) -> None:
        """See `AppendFile.reserve`."""
        try:
            os.posix_fallocate(self._descriptor, self.size, length)
        except OSError as error:
            raise disk_error("allocate", self._path, error) from error
        finally:
            self._allocated = os.fstat(self._descriptor).st_size  # a full disk may reserve a part

    def fdatasync(self) -> None:
        """See `AppendFile.fdatasync`."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise FlushFailedError(
                f"fdatasync {self._path}: {error.strerror}", operation="fdatasync", path=self._path
            ) from error

    def begin_sync(self, syncs: KernelSyncs, done: Callable[[Exception | None], None]) -> None:
        """See `AppendFile.begin_sync`."""
        try:
            syncs.begin(self._descriptor, done, self._sync_error)
        except OSError as error:
            text = f"fdatasync {self._path}: {error.strerror}"
            raise SyncNotTakenError(text) from error

    def _sync_error(self, number: int) -> Exception:
        text = f"fdatasync {self._path}: {os.strerror(number)}"
        if number in NOT_TAKEN:
            return SyncNotTakenError(text)
        return FlushFailedError(text, operation="fdatasync", path=self._path)

    def truncate(self, size: int) -> None:
        """See `AppendFile.truncate`."""
        try:
            os.ftruncate(self._descriptor, size)
            self.size = self._allocated = size
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


def _rest(buffers: list[Buffer], written: int) -> list[Buffer]:
    for index, buffer in enumerate(buffers):
        size = len(buffer)
        if written < size:
            return [memoryview(buffer)[written:], *buffers[index + 1 :]]
        written -= size
    return []

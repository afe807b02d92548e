"""The store's interface to the disk (`Files`), and its implementation (`RealFiles`). All file I/O
is done here.

Paths are relative to the data folder and use "/". Every call blocks, and raises StorageError or a
subclass. Tests replace `RealFiles` with a simulated disk that loses, tears and corrupts writes.

Invariants
    A write is durable only after the file's `fdatasync`, and a created or removed name only after
    `sync_folder`. `append` writes all buffers or raises; after an error it is unknown how many
    bytes were written.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from ...protocol.errors import DataFolderError, FlushFailedError, StorageError
from .append_file import OPEN_FILES_ERRNOS, Buffer, RealAppendFile, disk_error
from .kernel_syncs import KernelSyncs

log = logging.getLogger("keylane.broker")
FOLDER_MODE, FILE_MODE, PROTECTED_MODE = 0o700, 0o600, 0o400
"""The access modes of folders, files and protected files. Only the user who runs the broker may
read messages.
"""
OTHERS_MODE = 0o077
READ_BYTES = 2 << 20
"""The size, in bytes, of one read of a large file."""
READ_FILES_MAX = 256
"""The number of descriptors that are kept open for reading."""


class AppendFile(Protocol):
    """A file that is open for appending."""

    size: int
    """The file size in bytes, including unsynced bytes but not reserved ones."""

    @property
    def reserved(self) -> int:
        """The number of bytes reserved beyond the end of the file. They are zeros, and count as
        written when the file is opened again.
        """
        ...

    def reserve(self, length: int) -> None:
        """
        Reserve `length` zero bytes beyond the end of the file. Appends overwrite them, and syncing
        such an append does not have to update the file size.

        Raises:
            StorageError: the disk is full or cannot reserve bytes. Written data is unchanged; some
                of the bytes may be reserved.
        """
        ...

    def append(self, buffers: Sequence[Buffer]) -> None:
        """Write the buffers, in order. Raises DiskFullError or another StorageError on failure."""
        ...

    def fdatasync(self) -> None:
        """Make all writes durable. After a FlushFailedError the file must not be synced again."""
        ...

    def begin_sync(self, syncs: KernelSyncs, on_done: Callable[[Exception | None], None]) -> None:
        """
        Let the kernel make all writes durable, then call `on_done` with None or with the error that
        `fdatasync` would have raised.

        If no sync was started, SyncNotStartedError is raised or passed to `on_done`; in that case
        `fdatasync` may be called.
        """
        ...

    def truncate(self, size: int) -> None:
        """Truncate the file to `size` bytes, durably. This drops reserved bytes."""
        ...

    def rewind(self, size: int) -> None:
        """Make the next append overwrite the file from byte `size` on."""
        ...

    def close(self) -> None:
        """Close the file without syncing it."""
        ...


class Files(Protocol):
    """A data folder."""

    def name(self) -> str:
        """Return the name of the folder, for messages and logs."""
        ...

    def lock(self) -> None:
        """Lock the folder against other processes until `close`. Raises DataFolderError."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder, durably, unless it exists."""
        ...

    def real_path(self, path: str) -> str:
        """Return the path in the file system, for a library that does its own I/O. Raises
        StorageError if there is none.
        """
        ...

    def list(self, path: str = "") -> list[str]:
        """Return the sorted names in a folder, or an empty list if the folder does not exist."""
        ...

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if the file does not exist."""
        ...

    def open_append(self, path: str) -> AppendFile:
        """Open a file for appending. The file is created if it does not exist."""
        ...

    def pread(self, path: str, position: int, length: int) -> bytes:
        """Return `length` bytes at byte `position` of a file, or fewer at the end of the file."""
        ...

    def preads(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Return the result of `pread` for each (position, length) of a file."""
        ...

    def read_ahead(self, path: str, position: int, length: int) -> None:
        """Ask the kernel to read bytes ahead that will soon be needed."""
        ...

    def protect(self, path: str) -> None:
        """Make a file read-only; open descriptors stay writable."""
        ...

    def unprotect(self, path: str) -> None:
        """Make a file writable again."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename the file `old` to `new`, atomically replacing any file of that name."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def sync_folder(self, path: str = "") -> None:
        """Make the names in a folder durable. Raises FlushFailedError."""
        ...

    def free_bytes(self) -> int:
        """Return the number of free bytes on the disk that are available to this user."""
        ...

    def total_bytes(self) -> int:
        """Return the number of the disk's used bytes plus the free bytes available to this user.
        The percentages of `df` are based on this sum.
        """
        ...

    def close(self) -> None:
        """Close all descriptors and release the lock."""
        ...


def file_numbers(names: Iterable[str], *, digits: int, suffix: str) -> list[int]:
    """Return the numbers of the files whose names consist of `digits` decimal digits and the
    suffix.
    """
    return [
        int(name[:digits])
        for name in names
        if len(name) == digits + len(suffix)
        and name.endswith(suffix)
        and name[:digits].isascii()
        and name[:digits].isdecimal()
    ]


def replace_file(files: Files, path: str, *pieces: Buffer) -> None:
    """Replace a file's content, atomically and durably: readers see either the old content or the
    new.
    """
    replace_large_file(files, path, [pieces])


def replace_large_file(files: Files, path: str, parts: Iterable[Sequence[Buffer]]) -> None:
    """Replace a file like `replace_file`, holding only one part in memory at a time."""
    temporary = path + ".tmp"
    if files.size(temporary) is not None:
        files.remove(temporary)
    out = files.open_append(temporary)
    try:
        try:
            for pieces in parts:
                out.append(pieces)
            out.fdatasync()
        finally:
            out.close()
        files.rename(temporary, path)
    except StorageError:
        with suppress(StorageError):
            files.remove(temporary)  # it may occupy the last free bytes on a full disk
        raise
    files.sync_folder(path.rpartition("/")[0])


def rewrite_in_place(files: Files, path: str, file: AppendFile, *, start: int, end: int) -> None:
    """
    Rewrite the bytes `[start, end)` of a file in place. `file` is the file that is open at `path`;
    the caller must sync it.

    After a failed sync, the kernel marks pages of its cache as clean although they are not on the
    disk. Another sync would not write them, and a sync of later bytes would leave a hole.
    """
    while start < end:
        data = files.pread(path, start, min(READ_BYTES, end - start))
        file.rewind(start)
        file.append([data])
        start += len(data)


def _make_folders(path: Path) -> None:
    """Create a folder and its missing parents, each durably."""
    if path.is_dir():
        return
    _make_folders(path.parent)
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_locked(root: str) -> bool:
    """Return True if another process holds the lock of the data folder; False otherwise, or if the
    folder does not exist.
    """
    try:
        descriptor = os.open(f"{root}/lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def restrict_permissions(root: str) -> None:
    """
    Revoke other users' permissions on a data folder and its files, and log a warning on failure.

    They may have been granted when the folder was copied, or by a umask.
    """
    for folder, _names, files in os.walk(root):
        for path in (folder, *(f"{folder}/{name}" for name in files)):
            try:
                mode = os.stat(path, follow_symlinks=False).st_mode
                if mode & OTHERS_MODE and not stat.S_ISLNK(mode):
                    os.chmod(path, stat.S_IMODE(mode) & ~OTHERS_MODE)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("cannot keep other users from reading %s: %s", path, error.strerror)


class RealFiles:
    """The `Files` of the folder `root` in the file system. Thread-safe."""

    def __init__(self, root: Path | str) -> None:
        self._root = str(root)
        self._make_append_file: Callable[[str, int], RealAppendFile] = RealAppendFile
        self._lock_descriptor = -1
        self._cache_lock = threading.Lock()
        self._cached_descriptors: OrderedDict[str, list[int]] = OrderedDict()
        """Maps paths to [descriptor, number of threads that are reading], least recently used
        first.
        """

    def name(self) -> str:
        """See `Files.name`."""
        return self._root

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def lock(self) -> None:
        """See `Files.lock`. The folder is created if it does not exist."""
        try:
            _make_folders(Path(self._root))
            self._lock_descriptor = os.open(self._path("lock"), os.O_RDWR | os.O_CREAT, FILE_MODE)
        except OSError as error:
            if error.errno in OPEN_FILES_ERRNOS:
                raise disk_error("open", self._path("lock"), error) from error
            raise DataFolderError(
                f"cannot write in the data folder {self._root}: {error.strerror}", path=self._root
            ) from error
        self._flock(fcntl.LOCK_EX)

    def lock_to_read(self) -> None:
        """
        Lock the folder like `lock`, even on a read-only file system, such as a snapshot of a disk.

        No broker can write to the folder through a read-only mount. The lock detects a broker that
        uses the folder through another mount.
        """
        try:
            self.lock()
        except DataFolderError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EROFS:
                raise
            with suppress(FileNotFoundError):
                self._lock_descriptor = os.open(self._path("lock"), os.O_RDONLY)
                self._flock(fcntl.LOCK_SH)

    def _flock(self, kind: int) -> None:
        try:
            fcntl.flock(self._lock_descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1
            folder_error = DataFolderError(
                f"another broker is using the data folder {self._root}", path=self._root
            )
            folder_error.hint = "Stop that broker, or give this one a folder of its own."
            raise folder_error from error

    def make_folder(self, path: str) -> None:
        """See `Files.make_folder`."""
        try:
            Path(self._path(path)).mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            if not Path(self._path(path)).is_dir():
                raise self._not_a_folder(path) from None
            # Sync its name in any case: the process that created the folder may have been killed
            # before it did so.
        except OSError as error:
            raise disk_error("mkdir", path, error) from error
        self.sync_folder(path.rpartition("/")[0])

    def _not_a_folder(self, path: str) -> DataFolderError:
        folder = self._path(path)
        return DataFolderError(f"{folder} is not a folder", path=folder)

    def real_path(self, path: str) -> str:
        """See `Files.real_path`."""
        return self._path(path)

    def list(self, path: str = "") -> list[str]:
        """See `Files.list`."""
        try:
            return sorted(os.listdir(self._path(path)))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise self._not_a_folder(path) from None
        except OSError as error:
            raise disk_error("list", path, error) from error

    def size(self, path: str) -> int | None:
        """See `Files.size`."""
        try:
            return os.stat(self._path(path)).st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise disk_error("stat", path, error) from error

    def open_append(self, path: str) -> RealAppendFile:
        """See `Files.open_append`."""
        try:
            descriptor = os.open(self._path(path), os.O_RDWR | os.O_CREAT, FILE_MODE)
            return self._make_append_file(path, descriptor)
        except OSError as error:
            raise disk_error("open", path, error) from error

    def pread(self, path: str, position: int, length: int) -> bytes:
        """See `Files.pread`."""
        return self.preads(path, ((position, length),))[0]

    def preads(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """See `Files.preads`."""
        parts = []
        try:
            with self._open_cached(path) as descriptor:
                for position, length in ranges:
                    data = os.pread(descriptor, length, position)
                    while len(data) < length:
                        chunk = os.pread(descriptor, length - len(data), position + len(data))
                        if not chunk:
                            break
                        data += chunk
                    parts.append(data)
        except OSError as error:
            raise disk_error("read", path, error) from error
        return parts

    @contextmanager
    def _open_cached(self, path: str) -> Iterator[int]:
        """Provide a cached descriptor for reading. It is not closed while it is in use."""
        with self._cache_lock:
            cached_entry = self._cached_descriptors.get(path)
            if cached_entry is None:
                cached_entry = [os.open(self._path(path), os.O_RDONLY), 0]
                self._cached_descriptors[path] = cached_entry
                self._evict()
            else:
                self._cached_descriptors.move_to_end(path)
            cached_entry[1] += 1
        try:
            yield cached_entry[0]
        finally:
            with self._cache_lock:
                cached_entry[1] -= 1
                if not cached_entry[1] and self._cached_descriptors.get(path) is not cached_entry:
                    os.close(cached_entry[0])

    def _evict(self) -> None:
        excess = len(self._cached_descriptors) - READ_FILES_MAX
        for path in list(self._cached_descriptors)[: max(excess, 0)]:
            self._drop_cached(path)

    def _drop_cached(self, path: str) -> None:
        cached = self._cached_descriptors.pop(path, None)
        if cached is not None and not cached[1]:
            os.close(cached[0])

    def read_ahead(self, path: str, position: int, length: int) -> None:
        """See `Files.read_ahead`."""
        try:
            with self._open_cached(path) as descriptor:
                os.posix_fadvise(descriptor, position, length, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            raise disk_error("advise", path, error) from error

    def protect(self, path: str) -> None:
        """See `Files.protect`."""
        self._set_mode(path, PROTECTED_MODE)

    def unprotect(self, path: str) -> None:
        """See `Files.unprotect`."""
        self._set_mode(path, FILE_MODE)

    def _set_mode(self, path: str, mode: int) -> None:
        try:
            os.chmod(self._path(path), mode)
        except OSError as error:
            raise disk_error("chmod", path, error) from error

    def rename(self, old: str, new: str) -> None:
        """See `Files.rename`."""
        with self._cache_lock:
            self._drop_cached(old)
            self._drop_cached(new)
        try:
            os.replace(self._path(old), self._path(new))
        except OSError as error:
            raise disk_error("rename", new, error) from error

    def remove(self, path: str) -> None:
        """See `Files.remove`."""
        with self._cache_lock:
            self._drop_cached(path)
        try:
            os.remove(self._path(path))
        except OSError as error:
            raise disk_error("remove", path, error) from error

    def sync_folder(self, path: str = "") -> None:
        """See `Files.sync_folder`."""
        try:
            descriptor = os.open(self._path(path), os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise FlushFailedError(
                f"fsync {path or '.'}: {error.strerror}", operation="fsync", path=path
            ) from error

    def free_bytes(self) -> int:
        """See `Files.free_bytes`."""
        stats = self._statvfs()
        return stats.f_bavail * stats.f_frsize

    def total_bytes(self) -> int:
        """See `Files.total_bytes`."""
        stats = self._statvfs()
        return (stats.f_blocks - stats.f_bfree + stats.f_bavail) * stats.f_frsize

    def _statvfs(self) -> os.statvfs_result:
        try:
            return os.statvfs(self._root)
        except FileNotFoundError as error:
            raise DataFolderError(
                f"the data folder {self._root} was removed while the broker runs: messages are "
                "refused, and what it had stored is lost",
                path=self._root,
            ) from error
        except OSError as error:
            raise disk_error("statvfs", "", error) from error

    def close(self) -> None:
        """See `Files.close`."""
        with self._cache_lock:
            for path in list(self._cached_descriptors):
                self._drop_cached(path)
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

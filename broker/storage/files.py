"""The interface of the store to the disk (`Files`), and its implementation (`RealFiles`). I/O: all
access to files.

Paths are relative to the data folder, with "/" between the parts. Every call blocks, and raises
StorageError or a subclass. Tests replace `RealFiles` by a simulated disk that loses, tears and
damages writes.

Invariants
    A write is durable only after `fdatasync` of its file, a new or removed name only after
    `sync_folder`. `append` writes all buffers or raises. After an error it is unknown how many
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
from .append_file import OPEN_FILES_ERRORS, Buffer, RealAppendFile, disk_error
from .kernel_syncs import KernelSyncs

log = logging.getLogger("keylane.broker")
FOLDER_MODE, FILE_MODE, PROTECTED_MODE = 0o700, 0o600, 0o400
"""The access modes of folders, files and protected files: only the user who runs the broker may
read messages.
"""
OTHERS_MODE = 0o077
READ_BYTES = 2 << 20
"""The size in bytes of the parts in which a large file is read."""
READ_FILES_MAX = 256
"""The number of descriptors that are kept open for reading."""


class AppendFile(Protocol):
    """A file open for writing at its end."""

    size: int
    """The end of the file: its bytes, synced or not, without reserved ones."""

    @property
    def reserved(self) -> int:
        """The number of reserved bytes after the end. When the file is opened they count as
        written, and are zeros.
        """
        ...

    def reserve(self, length: int) -> None:
        """
        Add `length` bytes of zeros after the end of the file. Appends overwrite them, and their
        syncs need not record a new size.

        Raises:
            StorageError: the disk is full or cannot reserve bytes. Nothing that was written is
                changed, and a part of the bytes may be reserved.
        """
        ...

    def append(self, buffers: Sequence[Buffer]) -> None:
        """Write the buffers one after another, or raise DiskFullError or StorageError."""
        ...

    def fdatasync(self) -> None:
        """Make all writes durable, or raise FlushFailedError; after that the file must not be
        synced again.
        """
        ...

    def begin_sync(self, syncs: KernelSyncs, done: Callable[[Exception | None], None]) -> None:
        """
        Let the kernel make all writes durable, and call `done` with None or with an error like that
        of `fdatasync`.

        The error that is passed or raised is a SyncNotTakenError if no sync was begun; then
        `fdatasync` may be called.
        """
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, durably. Afterwards it has no reserved bytes."""
        ...

    def rewind(self, size: int) -> None:
        """Let the next append overwrite the file from byte `size` on."""
        ...

    def close(self) -> None:
        """Close the file without making it durable."""
        ...


class Files(Protocol):
    """A data folder."""

    def name(self) -> str:
        """Return the folder's name, as it is shown to people."""
        ...

    def lock(self) -> None:
        """Lock the folder against other processes until `close`, or raise DataFolderError."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder unless it exists, and make its name durable."""
        ...

    def outside(self, path: str) -> str:
        """Return the path in the file system, for a library that does its own I/O, or raise
        StorageError.
        """
        ...

    def list(self, path: str = "") -> list[str]:
        """Return the names in a folder, sorted. The list is empty if the folder does not exist."""
        ...

    def size(self, path: str) -> int | None:
        """Return the number of bytes in a file, or None if the file does not exist."""
        ...

    def open_append(self, path: str) -> AppendFile:
        """Open a file for writing at its end. It is created if it is missing."""
        ...

    def pread(self, path: str, position: int, length: int) -> bytes:
        """Return up to `length` bytes from `position` on; there are fewer at the end of the
        file.
        """
        ...

    def preads(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Read like `pread` for each (position, length) of one file."""
        ...

    def will_read(self, path: str, position: int, length: int) -> None:
        """Let the kernel read bytes ahead that will be needed soon."""
        ...

    def protect(self, path: str) -> None:
        """Make a file read only; open descriptors stay writable."""
        ...

    def unprotect(self, path: str) -> None:
        """Make a file writable again."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Replace the file `new` by the file `old`, atomically."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def sync_folder(self, path: str = "") -> None:
        """Make the names in a folder durable, or raise FlushFailedError."""
        ...

    def free_bytes(self) -> int:
        """Return the number of free bytes on the disk for this user."""
        ...

    def total_bytes(self) -> int:
        """Return the number of used and free bytes on the disk for this user; `df` shows
        percentages of this total.
        """
        ...

    def close(self) -> None:
        """Close all descriptors and release the lock."""
        ...


def replace_file(files: Files, path: str, *pieces: Buffer) -> None:
    """Replace a file's content atomically and durably: a reader sees the old content or the new
    one.
    """
    replace_large_file(files, path, [pieces])


def replace_large_file(files: Files, path: str, parts: Iterable[Sequence[Buffer]]) -> None:
    """Replace a file like `replace_file`, with only one of the parts in memory at a time."""
    draft = path + ".tmp"
    if files.size(draft) is not None:
        files.remove(draft)
    out = files.open_append(draft)
    try:
        try:
            for pieces in parts:
                out.append(pieces)
            out.fdatasync()
        finally:
            out.close()
        files.rename(draft, path)
    except StorageError:
        with suppress(StorageError):
            files.remove(draft)  # on a full disk it would take the last free bytes
        raise
    files.sync_folder(path.rpartition("/")[0])


def write_again(files: Files, path: str, file: AppendFile, *, start: int, end: int) -> None:
    """
    Write the bytes `[start, end)` of a file over themselves; `file` is open on `path`, and the
    caller syncs it.

    After a failed sync the kernel marks bytes in the page cache as clean although they are not on
    the disk. Another sync would not write them, and a sync of later bytes would leave a hole there.
    """
    while start < end:
        data = files.pread(path, start, min(READ_BYTES, end - start))
        file.rewind(start)
        file.append([data])
        start += len(data)


def _make_folders(path: Path) -> None:
    """Make a folder and its missing parents, each durably."""
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
    """Return True if another process has locked the data folder now; False also if there is no
    folder.
    """
    try:
        number = os.open(f"{root}/lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(number)
    return False


def narrow_rights(root: str) -> None:
    """
    Remove other users' rights to a data folder and its files; warn if that fails.

    A copy or a umask may have granted them.
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
    """The folder `root` in the file system. Thread-safe."""

    def __init__(self, root: Path | str) -> None:
        self._root = str(root)
        self._lock_descriptor = -1
        self._guard = threading.Lock()
        self._reading: OrderedDict[str, list[int]] = OrderedDict()
        """path → [descriptor, number of threads that read from it], least recently used first."""

    def name(self) -> str:
        """See `Files.name`."""
        return self._root

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def lock(self) -> None:
        """See `Files.lock`. Creates the folder if it is missing."""
        try:
            _make_folders(Path(self._root))
            self._lock_descriptor = os.open(self._path("lock"), os.O_RDWR | os.O_CREAT, FILE_MODE)
        except OSError as error:
            if error.errno in OPEN_FILES_ERRORS:
                raise disk_error("open", self._path("lock"), error) from error
            raise DataFolderError(
                f"cannot write in the data folder {self._root}: {error.strerror}", path=self._root
            ) from error
        self._flock(fcntl.LOCK_EX)

    def lock_to_read(self) -> None:
        """
        Lock the folder like `lock`, even if its file system is mounted read-only, like a snapshot
        of a disk.

        No broker writes such a folder through this mount. The lock detects a broker that uses it
        through another mount.
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
            raise DataFolderError(
                f"another broker is using the data folder {self._root}", path=self._root
            ) from error

    def make_folder(self, path: str) -> None:
        """See `Files.make_folder`."""
        try:
            Path(self._path(path)).mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            if not Path(self._path(path)).is_dir():
                raise self._no_folder(path) from None
            # The folder is synced anyway: the process that made it may have been killed before its
            # sync.
        except OSError as error:
            raise disk_error("mkdir", path, error) from error
        self.sync_folder(path.rpartition("/")[0])

    def _no_folder(self, path: str) -> DataFolderError:
        folder = self._path(path)
        return DataFolderError(f"{folder} has to be a folder", path=folder)

    def outside(self, path: str) -> str:
        """See `Files.outside`."""
        return self._path(path)

    def list(self, path: str = "") -> list[str]:
        """See `Files.list`."""
        try:
            return sorted(os.listdir(self._path(path)))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise self._no_folder(path) from None
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
            return RealAppendFile(
                path, os.open(self._path(path), os.O_RDWR | os.O_CREAT, FILE_MODE)
            )
        except OSError as error:
            raise disk_error("open", path, error) from error

    def pread(self, path: str, position: int, length: int) -> bytes:
        """See `Files.pread`."""
        return self.preads(path, ((position, length),))[0]

    def preads(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """See `Files.preads`."""
        parts = []
        try:
            with self._descriptor(path) as descriptor:
                for position, length in ranges:
                    data = os.pread(descriptor, length, position)
                    while len(data) < length:
                        more = os.pread(descriptor, length - len(data), position + len(data))
                        if not more:
                            break
                        data += more
                    parts.append(data)
        except OSError as error:
            raise disk_error("read", path, error) from error
        return parts

    @contextmanager
    def _descriptor(self, path: str) -> Iterator[int]:
        with self._guard:
            opened = self._reading.get(path)
            if opened is None:
                opened = [os.open(self._path(path), os.O_RDONLY), 0]
                self._reading[path] = opened
                self._evict()
            else:
                self._reading.move_to_end(path)
            opened[1] += 1
        try:
            yield opened[0]
        finally:
            with self._guard:
                opened[1] -= 1
                if not opened[1] and self._reading.get(path) is not opened:
                    os.close(opened[0])

    def _evict(self) -> None:
        spare = len(self._reading) - READ_FILES_MAX
        for path in list(self._reading)[: max(spare, 0)]:
            self._forget(path)

    def _forget(self, path: str) -> None:
        opened = self._reading.pop(path, None)
        if opened is not None and not opened[1]:
            os.close(opened[0])

    def will_read(self, path: str, position: int, length: int) -> None:
        """See `Files.will_read`."""
        try:
            with self._descriptor(path) as descriptor:
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
        with self._guard:
            self._forget(old)
            self._forget(new)
        try:
            os.replace(self._path(old), self._path(new))
        except OSError as error:
            raise disk_error("rename", new, error) from error

    def remove(self, path: str) -> None:
        """See `Files.remove`."""
        with self._guard:
            self._forget(path)
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
        disk = self._disk()
        return disk.f_bavail * disk.f_frsize

    def total_bytes(self) -> int:
        """See `Files.total_bytes`."""
        disk = self._disk()
        return (disk.f_blocks - disk.f_bfree + disk.f_bavail) * disk.f_frsize

    def _disk(self) -> os.statvfs_result:
        try:
            return os.statvfs(self._root)
        except OSError as error:
            raise disk_error("statvfs", "", error) from error

    def close(self) -> None:
        """See `Files.close`."""
        with self._guard:
            for path in list(self._reading):
                self._forget(path)
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

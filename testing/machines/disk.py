"""An in-memory disk with a page cache. In a crash, data that was not synced may be lost, kept in
part, or torn.

It implements `keylane.broker.storage.files.Files`. `crash_at` is the number of the write operation
in which `Crashed` is raised, and `disk_after_crash` returns the disk that the machine finds when it
starts again.
"""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable, Mapping, Sequence

from ...broker.storage.append_file import Buffer
from ...broker.storage.kernel_syncs import KernelSyncs
from ...protocol.errors import (
    DataFolderError,
    DiskFullError,
    FlushFailedError,
    StorageError,
)

BLOCK_BYTES = 512
"""The number of bytes that the disk writes completely or not at all, unless a test asks for smaller
blocks.
"""


class Crashed(SystemExit):
    """The machine has crashed. Event loops let this propagate from any task, and no keylane code
    catches it.
    """


class _Content:
    """A file: the bytes that programs see, the synced bytes, and the unsynced writes."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = bytearray(data)
        self.written: list[tuple[int, bytes]] = []
        self.torn = False
        """True if the last write lost one of its blocks, but nothing else is missing."""
        self.reserved_to = 0
        """The end of the bytes that were reserved since the last sync. Either all of them survive a
        crash, or none.
        """

    def sync(self) -> None:
        """Sync only the writes since the last sync, because a failed sync has lost its data."""
        synced = self.synced
        synced.extend(bytes(max(0, self.reserved_to - len(synced))))
        for start, data in self.written:
            synced.extend(bytes(max(0, start + len(data) - len(synced))))
            synced[start : start + len(data)] = data
        del synced[len(self.data) :]
        self.written.clear()
        self.reserved_to = 0

    def surviving_bytes(self, rng: random.Random, block_bytes: int) -> bytes:
        """Return the synced bytes, plus some of the blocks that were written since."""
        survival_chance = 1.0 if self.torn else rng.choice((0.0, 0.5, 0.9, 1.0))
        surviving = bytearray(self.synced)
        if self.reserved_to and rng.random() < survival_chance:
            surviving.extend(bytes(max(0, self.reserved_to - len(surviving))))
        lost_block = rng.randrange(len(self.written[-1][1])) // block_bytes if self.torn else -1
        for start, data in self.written:
            is_whole = start != self.written[-1][0]
            for block_start in range(0, len(data), block_bytes):
                if rng.random() < survival_chance and (
                    is_whole or block_start // block_bytes != lost_block
                ):
                    block = data[block_start : block_start + block_bytes]
                    end = start + block_start + len(block)
                    surviving.extend(bytes(max(0, end - len(surviving))))
                    surviving[start + block_start : end] = block
        return bytes(surviving)


class SimAppendFile:
    """See `keylane.broker.storage.files.AppendFile`."""

    def __init__(self, disk: SimDisk, path: str, content: _Content) -> None:
        self._disk = disk
        self._path = path
        self._content = content
        self.size = len(content.data)

    def append(self, buffers: Sequence[Buffer]) -> None:
        """See `AppendFile.append`."""
        data = b"".join(buffers)
        free_bytes = self._disk.free_space
        if self._disk.failing_operation == "write":
            data = data[: len(data) // 2]  # a short write, followed by the error
        is_full = False
        if free_bytes is not None:
            writable_bytes = self.reserved + max(free_bytes, 0)
            is_full = len(data) >= writable_bytes
            data = data[:writable_bytes]
            self._disk.free_space = free_bytes - max(len(data) - self.reserved, 0)
        self._content.data[self.size : self.size + len(data)] = data
        self._content.written.append((self.size, data))
        self.size += len(data)
        self._disk.step("write")
        if self._disk.tear_next and len(data) > 2 * self._disk.block_bytes:
            self._content.torn = True
            raise Crashed("in a write")
        if self._disk.failing_operation == "write":
            raise StorageError(f"write {self._path}: Input/output error", path=self._path)
        if is_full:
            raise DiskFullError(f"write {self._path}: No space left on device", path=self._path)

    @property
    def reserved(self) -> int:
        """See `AppendFile.reserved`."""
        return max(len(self._content.data) - self.size, 0)

    def reserve(self, length: int) -> None:
        """See `AppendFile.reserve`."""
        if not self._disk.reserves:
            raise StorageError(f"allocate {self._path}: Operation not supported", path=self._path)
        self._disk.step("reserve")
        added = bytes(max(length - self.reserved, 0))
        if self._disk.free_space is not None:
            if self._disk.free_space < len(added):
                raise DiskFullError(
                    f"allocate {self._path}: No space left on device", path=self._path
                )
            self._disk.free_space -= len(added)
        self._content.data += added
        self._content.reserved_to = len(self._content.data)

    def fdatasync(self) -> None:
        """See `AppendFile.fdatasync`."""
        self._disk.step("fdatasync")
        if self._disk.failing_operation == "fdatasync":
            # Linux does the same: the pages are marked clean, but they are not on the disk.
            self._content.written.clear()
            self._content.reserved_to = 0
            raise FlushFailedError(f"fdatasync {self._path}: Input/output error", path=self._path)
        self._content.sync()
        self._disk.syncs += 1
        self._disk.step("synced")

    def begin_sync(self, _syncs: KernelSyncs, done: Callable[[Exception | None], None]) -> None:
        """See `AppendFile.begin_sync`."""
        try:
            self.fdatasync()
        except StorageError as error:
            done(error)
        else:
            done(None)

    def truncate(self, size: int) -> None:
        """See `AppendFile.truncate`."""
        self._disk.step("truncate")
        freed_bytes = len(self._content.data) - size
        if self._disk.free_space is not None:
            self._disk.free_space += freed_bytes
        del self._content.data[size:]
        self.size = size
        self._content.sync()

    def rewind(self, size: int) -> None:
        """See `AppendFile.rewind`."""
        self.size = size

    def close(self) -> None:
        """See `AppendFile.close`."""


class SimDisk:
    """The simulated disk, which can be used as `Files`."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.contents: dict[str, _Content] = {}
        self.folders: set[str] = {""}
        self._durable_names: dict[str, dict[str, _Content]] = {"": {}}
        """The durable file names in each folder."""
        self.total_space = 1 << 41
        self.free_space: int | None = None
        """The number of free bytes; None for unlimited space."""
        self.reserves = False
        """True if files can reserve space beyond their end."""
        self.failing_operation = ""
        """The operation that fails from now on: "write", "fdatasync" or "remove"."""
        self.steps = 0
        self.syncs = 0
        self.crash_at: int | None = None
        self.tear_next = False
        """True if the machine stops during the next write of several blocks, which loses one of
        them.
        """
        self.on_step: Callable[[str], None] = lambda _name: None
        self._locked = False
        self.protected: set[str] = set()

    def step(self, name: str) -> None:
        """Count an operation, during which the machine may crash."""
        self.steps += 1
        self.on_step(name)
        if self.crash_at is not None and self.steps >= self.crash_at:
            raise Crashed(name)

    def disk_after_crash(self, rng: random.Random) -> SimDisk:
        """Return the disk as the next boot finds it after the crash."""
        disk = SimDisk(self.block_bytes)
        disk.reserves = self.reserves
        disk.folders = set(self.folders)
        for folder in self.folders:
            names = dict(self._durable_names.get(folder, {}))
            current_names = {
                path: content for path, content in self.contents.items() if _folder(path) == folder
            }
            changed = [
                path
                for path in {*names, *current_names}
                if names.get(path) is not current_names.get(path)
            ]
            for path in sorted(changed):
                if rng.random() < 0.5:
                    if path in current_names:
                        names[path] = current_names[path]
                    else:
                        del names[path]
            surviving = {
                path: _Content(content.surviving_bytes(rng, self.block_bytes))
                for path, content in names.items()
            }
            disk.contents |= surviving
            disk._durable_names[folder] = dict(surviving)
        return disk

    # ── Files ─────────────────────────────────────────────────────────────────────────────────────
    def name(self) -> str:
        """See `Files.name`."""
        return "simulated disk"

    def lock(self) -> None:
        """See `Files.lock`."""
        if self._locked:
            raise DataFolderError("another broker is using the simulated disk")
        self._locked = True

    def make_folder(self, path: str) -> None:
        """See `Files.make_folder`."""
        self.folders.add(path)
        self._durable_names.setdefault(path, {})

    def list(self, path: str = "") -> list[str]:
        """See `Files.list`."""
        names = {name.rpartition("/")[2] for name in self.contents if _folder(name) == path}
        names |= {
            folder.rpartition("/")[2]
            for folder in self.folders
            if folder and _folder(folder) == path
        }
        return sorted(names)

    def size(self, path: str) -> int | None:
        """See `Files.size`."""
        content = self.contents.get(path)
        return None if content is None else len(content.data)

    def open_append(self, path: str) -> SimAppendFile:
        """See `Files.open_append`."""
        if _folder(path) not in self.folders:
            raise StorageError(f"open {path}: No such file or directory", path=path)
        if path in self.protected:  # as for a user who is not root
            raise DataFolderError(f"open {path}: Permission denied", path=path)
        if path not in self.contents:
            self.step("create")
        return SimAppendFile(self, path, self.contents.setdefault(path, _Content()))

    def pread(self, path: str, position: int, length: int) -> bytes:
        """See `Files.pread`."""
        content = self.contents.get(path)
        if content is None:
            raise StorageError(f"read {path}: No such file or directory", path=path)
        return bytes(content.data[position : position + length])

    def preads(self, path: str, ranges: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        """See `Files.preads`."""
        return [self.pread(path, position, length) for position, length in ranges]

    def read_ahead(self, path: str, position: int, length: int) -> None:
        """See `Files.read_ahead`."""

    def protect(self, path: str) -> None:
        """See `Files.protect`."""
        if path not in self.contents:
            raise StorageError(f"chmod {path}: No such file or directory", path=path)
        self.protected.add(path)

    def unprotect(self, path: str) -> None:
        """See `Files.unprotect`."""
        self.protected.discard(path)

    def rename(self, old: str, new: str) -> None:
        """See `Files.rename`."""
        self.step("rename")
        if old not in self.contents:
            raise StorageError(f"rename {new}: No such file or directory", path=new)
        self.contents[new] = self.contents.pop(old)

    def remove(self, path: str) -> None:
        """See `Files.remove`."""
        self.step("remove")
        if self.failing_operation == "remove":
            raise StorageError(f"remove {path}: Input/output error", path=path)
        self.protected.discard(path)
        content = self.contents.pop(path, None)
        if content is None:
            raise StorageError(f"remove {path}: No such file or directory", path=path)
        if self.free_space is not None:
            self.free_space += len(content.data)

    def sync_folder(self, path: str = "") -> None:
        """See `Files.sync_folder`."""
        self.step("sync_folder")
        self._durable_names[path] = {
            name: content for name, content in self.contents.items() if _folder(name) == path
        }

    def free_bytes(self) -> int:
        """See `Files.free_bytes`."""
        return 1 << 40 if self.free_space is None else self.free_space

    def total_bytes(self) -> int:
        """See `Files.total_bytes`."""
        return self.total_space

    def real_path(self, path: str) -> str:
        """See `Files.real_path`."""
        raise StorageError(f"{path}: a simulated disk is inside only", path=path)

    def close(self) -> None:
        """See `Files.close`."""
        self._locked = False


def disk_of(files: Mapping[str, bytes]) -> SimDisk:
    """Return a disk with these files, all synced."""
    disk = SimDisk()
    for path, data in files.items():
        disk.make_folder(_folder(path))
        disk.contents[path] = disk._durable_names[_folder(path)][path] = _Content(data)
    return disk


def _folder(path: str) -> str:
    return path.rpartition("/")[0]

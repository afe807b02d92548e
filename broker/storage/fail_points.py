"""Kills the process at a named point of its disk I/O, for tests of recovery after a crash.

    KEYLANE_FAIL_AT=synced:3      killed after the third sync
    KEYLANE_FAIL_AT=write~:2      killed after half of the second write

There is a point before and after each operation that changes the disk. The points of the index
surround calls of its library, which does its own I/O. If the variable is not set, `RealFiles` is
used, which has no such points.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ...protocol.errors import ConfigError
from ...protocol.text import parse_number
from .append_file import Buffer, RealAppendFile
from .files import Files, RealFiles
from .kernel_syncs import KernelSyncs

VARIABLE = "KEYLANE_FAIL_AT"
FILE_POINTS = (
    "create",
    "created",
    "write",
    "write~",
    "written",
    "sync",
    "synced",
    "reserve",
    "reserved",
    "truncate",
    "truncated",
    "rename",
    "renamed",
    "remove",
    "removed",
    "sync-folder",
    "folder-synced",
    "make-folder",
    "folder-made",
)
LIBRARY_POINTS = (
    "index-write",
    "index-written",
    "index-sync",
    "index-synced",
    "index-flush",
    "index-flushed",
    "index-clear",
    "index-cleared",
)
POINTS = FILE_POINTS + LIBRARY_POINTS

KILL = 9
"""The number of SIGKILL."""


class FailPoint:
    """Counts how often each point is reached, and kills the process at the configured one."""

    def __init__(self, text: str) -> None:
        name, _, count = text.partition(":")
        if name not in POINTS or not parse_number(count):
            raise ConfigError(
                f"{VARIABLE}={text!r} is not point:count; the points are {', '.join(POINTS)}"
            )
        self.name = name
        self._kill_at = int(count)
        self._counts: Counter[str] = Counter()

    def is_kill_due(self, name: str) -> bool:
        """Count that a point was reached, and return True if the process must be killed now."""
        self._counts[name] += 1
        return name == self.name and self._counts[name] == self._kill_at

    def reach(self, name: str) -> None:
        """Count that a point was reached, and kill the process if that is due."""
        if self.is_kill_due(name):
            os.kill(os.getpid(), KILL)


class FailingAppendFile(RealAppendFile):
    """A `RealAppendFile` with fail points."""

    def __init__(self, path: str, descriptor: int, point: FailPoint) -> None:
        super().__init__(path, descriptor)
        self._point = point

    def append(self, buffers: Sequence[Buffer]) -> None:
        """See `AppendFile.append`."""
        self._point.reach("write")
        if self._point.is_kill_due("write~"):
            data = b"".join(buffers)
            super().append([data[: len(data) // 2]])
            os.kill(os.getpid(), KILL)
        super().append(buffers)
        self._point.reach("written")

    def reserve(self, length: int) -> None:
        """See `AppendFile.reserve`."""
        self._point.reach("reserve")
        super().reserve(length)
        self._point.reach("reserved")

    def fdatasync(self) -> None:
        """See `AppendFile.fdatasync`."""
        self._point.reach("sync")
        super().fdatasync()
        self._point.reach("synced")

    def begin_sync(self, syncs: KernelSyncs, on_done: Callable[[Exception | None], None]) -> None:
        """See `AppendFile.begin_sync`."""

        def on_synced(error: Exception | None) -> None:
            self._point.reach("synced")
            on_done(error)

        self._point.reach("sync")
        super().begin_sync(syncs, on_synced)

    def truncate(self, size: int) -> None:
        """See `AppendFile.truncate`."""
        self._point.reach("truncate")
        super().truncate(size)
        self._point.reach("truncated")


class FailingFiles(RealFiles):
    """`RealFiles` with fail points."""

    def __init__(self, root: str, point: FailPoint) -> None:
        super().__init__(root)
        self._point = point
        self.reach = point.reach
        self._make_append_file = partial(FailingAppendFile, point=point)

    def make_folder(self, path: str) -> None:
        """See `Files.make_folder`."""
        self._point.reach("make-folder")
        super().make_folder(path)
        self._point.reach("folder-made")

    def open_append(self, path: str) -> RealAppendFile:
        """See `Files.open_append`."""
        self._point.reach("create")
        file = super().open_append(path)
        self._point.reach("created")
        return file

    def rename(self, old: str, new: str) -> None:
        """See `Files.rename`."""
        self._point.reach("rename")
        super().rename(old, new)
        self._point.reach("renamed")

    def remove(self, path: str) -> None:
        """See `Files.remove`."""
        self._point.reach("remove")
        super().remove(path)
        self._point.reach("removed")

    def sync_folder(self, path: str = "") -> None:
        """See `Files.sync_folder`."""
        self._point.reach("sync-folder")
        super().sync_folder(path)
        self._point.reach("folder-synced")


def fail_point_hook(files: Files) -> Callable[[str], None]:
    """Return the function that a library which does its own I/O in the folder must call at its fail
    points.
    """
    return files.reach if isinstance(files, FailingFiles) else ignore_fail_point


def ignore_fail_point(_name: str) -> None:
    """Do nothing: no fail point is configured."""


def make_files(root: str, environment: Mapping[str, str] | None = None) -> RealFiles:
    """
    Return the files of the folder `root`, with fail points if KEYLANE_FAIL_AT is set.

    Raises:
        ConfigError: the value of the variable is not a known point with a count.
    """
    configured = (os.environ if environment is None else environment).get(VARIABLE)
    return RealFiles(root) if configured is None else FailingFiles(root, FailPoint(configured))

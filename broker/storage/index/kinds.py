"""The kinds of index that a broker may have, by their names in the settings. Disk, through
`Files`.

index/         "file"                 rocksdb/       "rocksdb"
unfinished-…   a mark: the index of this kind is incomplete, and has to be rebuilt
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ....protocol.errors import DiskFullError, MissingExtraError
from ..fail_points import reach_of
from ..files import Files, replace_file
from ..reserve import Reserve
from .file import FileConsumeQueues
from .file_blocks import FOLDER as FILE_FOLDER
from .interface import ConsumeQueues

if TYPE_CHECKING:
    from .rocksdb import RocksConsumeQueues

ROCKSDB_FOLDER = "rocksdb"
_LIBRARYS_OWN = ("LOG", "rocksdict-config.json")
_FOLDERS = {"file": FILE_FOLDER, "rocksdb": ROCKSDB_FOLDER}


def open_index(files: Files, kind: str) -> ConsumeQueues:
    """
    Open the index of this kind in a data folder. It is created if it is missing.

    Raises:
        StorageError: the index cannot be opened.
    """
    queues: ConsumeQueues
    if kind == "file":
        queues = FileConsumeQueues(files)
    else:
        open_queues = _rocks_queues()
        files.make_folder(ROCKSDB_FOLDER)
        path = files.outside(ROCKSDB_FOLDER)
        try:
            queues = open_queues(path, reach=reach_of(files))
        except DiskFullError:
            if not Reserve(files).give_up():
                raise
            queues = open_queues(path, reach=reach_of(files))
    if files.size(_mark(kind)) is not None:
        queues.truncate(0)
        unmark(files, kind)
    return queues


@contextmanager
def index_to_read(files: Files, kind: str) -> Iterator[ConsumeQueues]:
    """
    Open the index of this kind for reading only.

    Raises:
        StorageError: the index is damaged, or cannot be opened.
    """
    queues: ConsumeQueues
    if kind == "file":
        queues = FileConsumeQueues(files)
        try:
            yield queues
        finally:
            queues.leave()
        return
    open_queues = _rocks_queues()
    # The library writes files even when it only reads, so it gets a temporary folder of links.
    with tempfile.TemporaryDirectory() as folder:
        source = Path(files.outside(ROCKSDB_FOLDER)).resolve()
        for name in files.list(ROCKSDB_FOLDER):
            if name in _LIBRARYS_OWN:
                shutil.copy(source / name, folder)
            elif name != "LOCK":
                Path(folder, name).symlink_to(source / name)
        queues = open_queues(folder, read_only=True)
        try:
            yield queues
        finally:
            queues.leave()


def _rocks_queues() -> type[RocksConsumeQueues]:
    """Return the index on RocksDB, whose library is loaded only here.  Raises MissingExtraError."""
    try:
        from .rocksdb import RocksConsumeQueues
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "the index rocksdb", "server") from error
    return RocksConsumeQueues


def is_unfinished(files: Files, kind: str) -> bool:
    """Return True if the index of this kind is marked as incomplete."""
    return files.size(_mark(kind)) is not None


def has_index(files: Files, kind: str) -> bool:
    """Return True if there is a complete index of this kind."""
    return bool(files.list(_FOLDERS[kind])) and files.size(_mark(kind)) is None


def mark_others(files: Files, kind: str) -> None:
    """Mark the indexes of other kinds as incomplete, because new batches are not added to them."""
    for other in _FOLDERS:
        if other != kind and has_index(files, other):
            mark(files, other)


def mark(files: Files, kind: str) -> None:
    """Mark the index of this kind as incomplete, durably."""
    replace_file(files, _mark(kind), b"")


def unmark(files: Files, kind: str) -> None:
    """Remove the mark of an index that is now complete, durably."""
    if files.size(_mark(kind)) is not None:
        files.remove(_mark(kind))
        files.sync_folder()


def remove_index(files: Files, kind: str) -> None:
    """Remove the files of an index that is closed."""
    mark(files, kind)
    folder = _FOLDERS[kind]
    for name in files.list(folder):
        files.remove(f"{folder}/{name}")
    files.sync_folder(folder)
    unmark(files, kind)


def _mark(kind: str) -> str:
    return f"unfinished-{kind}"

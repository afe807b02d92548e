"""Opens, marks and removes the broker's index, whose kind is named in its settings. Does disk I/O
through `Files`.

    index/            the index "file"
    rocksdb/          the index "rocksdb"
    unfinished-KIND   a mark: the index of this kind is incomplete and must be rebuilt
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ....protocol.errors import DiskFullError, MissingExtraError
from ..fail_points import fail_point_hook
from ..files import Files, replace_file
from ..reserve import release_reserve
from .file import FileConsumeQueues
from .file_blocks import FOLDER as FILE_FOLDER
from .interface import ConsumeQueues

if TYPE_CHECKING:
    from .rocksdb import RocksConsumeQueues

ROCKSDB_FOLDER = "rocksdb"
_LIBRARY_FILES = ("LOG", "rocksdict-config.json")
_FOLDERS = {"file": FILE_FOLDER, "rocksdb": ROCKSDB_FOLDER}


def open_index(files: Files, kind: str) -> ConsumeQueues:
    """
    Open the index of this kind in a data folder. It is created if it does not exist.

    Raises:
        StorageError: the index cannot be opened.
    """
    queues: ConsumeQueues
    if kind == "file":
        queues = FileConsumeQueues(files)
    else:
        index_class = _load_rocksdb_class()
        files.make_folder(ROCKSDB_FOLDER)
        path = files.real_path(ROCKSDB_FOLDER)
        try:
            queues = index_class(path, reach=fail_point_hook(files))
        except DiskFullError:
            if not release_reserve(files):
                raise
            queues = index_class(path, reach=fail_point_hook(files))
    if files.size(_mark_path(kind)) is not None:
        queues.truncate(0)
        unmark_incomplete(files, kind)
    return queues


@contextmanager
def open_read_only(files: Files, kind: str) -> Iterator[ConsumeQueues]:
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
            queues.close_unflushed()
        return
    index_class = _load_rocksdb_class()
    # The library writes files even when it only reads, so give it a temporary folder of links.
    with tempfile.TemporaryDirectory() as folder:
        source = Path(files.real_path(ROCKSDB_FOLDER)).resolve()
        for name in files.list(ROCKSDB_FOLDER):
            if name in _LIBRARY_FILES:
                shutil.copy(source / name, folder)
            elif name != "LOCK":
                Path(folder, name).symlink_to(source / name)
        queues = index_class(folder, read_only=True)
        try:
            yield queues
        finally:
            queues.close_unflushed()


def _load_rocksdb_class() -> type[RocksConsumeQueues]:
    """Import the library, and return the class of the RocksDB index. Raises MissingExtraError."""
    try:
        from .rocksdb import RocksConsumeQueues
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "the index rocksdb", "server") from error
    return RocksConsumeQueues


def is_incomplete(files: Files, kind: str) -> bool:
    """Return True if the index of this kind is marked as incomplete."""
    return files.size(_mark_path(kind)) is not None


def has_index(files: Files, kind: str) -> bool:
    """Return True if an index of this kind exists and is not marked as incomplete."""
    return bool(files.list(_FOLDERS[kind])) and files.size(_mark_path(kind)) is None


def mark_others_incomplete(files: Files, kind: str) -> None:
    """Mark indexes of other kinds as incomplete, because new batches are not added to them."""
    for other in _FOLDERS:
        if other != kind and has_index(files, other):
            mark_incomplete(files, other)


def mark_incomplete(files: Files, kind: str) -> None:
    """Mark the index of this kind as incomplete, durably."""
    replace_file(files, _mark_path(kind), b"")


def unmark_incomplete(files: Files, kind: str) -> None:
    """Remove the mark of an index that has become complete, durably."""
    if files.size(_mark_path(kind)) is not None:
        files.remove(_mark_path(kind))
        files.sync_folder()


def remove_index(files: Files, kind: str) -> None:
    """Delete the files of a closed index."""
    mark_incomplete(files, kind)
    folder = _FOLDERS[kind]
    for name in files.list(folder):
        files.remove(f"{folder}/{name}")
    files.sync_folder(folder)
    unmark_incomplete(files, kind)


def _mark_path(kind: str) -> str:
    return f"unfinished-{kind}"

"""Which index a broker has: the name in its settings, and what it opens.  Disk, through `Files`."""

from __future__ import annotations

from .consume_queue import ConsumeQueues
from .files import Files
from .index_file import FileConsumeQueues

ROCKSDB_FOLDER = "rocksdb"


def open_index(files: Files, kind: str) -> ConsumeQueues:
    """
    The index of this kind in a data folder, made if it is missing.

    Raises:
        StorageError: it cannot be opened.
    """
    assert kind in {"file", "rocksdb"}
    if kind == "file":
        return FileConsumeQueues(files)
    from .index_rocksdb import RocksConsumeQueues

    files.make_folder(ROCKSDB_FOLDER)
    return RocksConsumeQueues(files.outside(ROCKSDB_FOLDER))

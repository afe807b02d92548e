"""Makes a copy of a data folder the folder of its broker group. Does disk I/O through `Files`."""

from __future__ import annotations

from msgspec import Struct

from ...protocol.errors import DataFolderError
from ..copies.copied_log import CopiedLog
from ..storage.copy_file import CopyFile, read_copy_file, remove_copy_file
from ..storage.files import Files


class Promotion(Struct, frozen=True, kw_only=True):
    """A copy that a broker may be started on."""

    folder: str
    broker_group: str
    log_end: int
    """The end of its log, in bytes."""


def read_copy(files: Files) -> CopyFile:
    """Return what a copy knows of itself. Raises DataFolderError if the folder is no copy."""
    copy = read_copy_file(files)
    if copy is None:
        raise DataFolderError(
            f"{files.name()} is not a copy: a broker may be started on it as it is",
            path=files.name(),
        )
    return copy


def promote_copy(files: Files) -> Promotion:
    """
    Cut what the copy has not received as a whole, and let a broker serve it from now on.

    Raises:
        DataFolderError: the folder is no copy, or one that was never complete; it stays a copy.
        StorageError
    """
    copy = read_copy(files)
    copied = CopiedLog(files)
    try:
        if copied.end < copy.complete_at:
            raise DataFolderError(
                f"{files.name()} was never complete: it has the log up to position {copied.end}, "
                f"and the broker had it up to {copy.complete_at} when the copy was begun",
                path=files.name(),
            )
    finally:
        copied.close()
    remove_copy_file(files)
    return Promotion(folder=files.name(), broker_group=copy.broker_group, log_end=copied.end)

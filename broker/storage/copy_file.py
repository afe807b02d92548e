"""The file that marks a data folder as a copy, and says whether it is complete. Does disk I/O
through `Files`.

    {"format": 1, "copy_id": "5c…", "broker_group": "g1", "complete_at": 123456}

Invariants
    No broker serves a folder that has this file. A copy is complete once its log reaches
    `complete_at`: what the broker had removed before, its later records repeat below that position.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ...protocol.errors import DataFolderError, Reason, StorageError
from .files import Files, replace_file

COPY_PATH = "copy.json"
FORMAT = 1


class CopyFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy knows of itself."""

    format: int = FORMAT
    copy_id: str
    """A random id, by which the broker names the copy."""
    broker_group: str
    complete_at: int
    """The end of the broker's log when the copy was begun."""
    durable_end: int = 0
    """What the broker has called durable of what the copy has, as of some seconds ago: the copy is
    never cut below it.
    """


class Candidate(NamedTuple):
    """A copy that may be promoted."""

    copy: CopyFile
    broker_id: str
    """The id of the data folder that it is a copy of."""
    log_end: int


def is_copy(files: Files) -> bool:
    """Return True if a data folder is kept as a copy."""
    return files.size(COPY_PATH) is not None


def read_copy_file(files: Files) -> CopyFile | None:
    """Return what a copy knows of itself; None if the folder is no copy. Raises
    DataFolderError.
    """
    if not is_copy(files):
        return None
    try:
        copy = msgspec.json.decode(files.pread(COPY_PATH, 0, 1 << 16), type=CopyFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, StorageError) as error:
        raise DataFolderError(
            f"{files.name()}/{COPY_PATH} is unreadable: {error}", path=files.name()
        ) from error
    if copy.format != FORMAT:
        raise DataFolderError(
            f"{files.name()} is a copy of format {copy.format}, this broker keeps format {FORMAT}",
            path=files.name(),
        )
    return copy


def write_copy_file(files: Files, copy: CopyFile) -> None:
    """Write the file, durably."""
    replace_file(files, COPY_PATH, msgspec.json.encode(copy) + b"\n")


def remove_copy_file(files: Files) -> None:
    """Make the folder one that a broker may serve, durably."""
    files.remove(COPY_PATH)
    files.sync_folder()


def check_no_copy(files: Files) -> None:
    """Raise DataFolderError if the folder is kept as a copy."""
    if is_copy(files):
        raise DataFolderError(
            Reason.FOLDER_IS_COPY,
            f"{files.name()} is a copy that follows a broker",
            path=files.name(),
        )

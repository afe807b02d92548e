"""Makes a copy of a data folder the folder of its broker group, and the folder whose place it has
taken a copy. Does disk I/O through `Files`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import Struct

from ...protocol.errors import ConflictError, DataFolderError, Reason
from ..copies.copied_log import CopiedLog
from ..scheduled import agenda
from ..settings import INDEX_KINDS
from ..storage import snapshot
from ..storage.copy_file import (
    Candidate,
    CopyFile,
    read_copy_file,
    remove_copy_file,
    write_copy_file,
)
from ..storage.data_folder import read_identity, record_copies, record_promotion
from ..storage.files import Files
from ..storage.index.kinds import has_index, mark_incomplete
from ..storage.log.commit_log import segment_bases


class Promotion(Struct, frozen=True, kw_only=True):
    """A copy that a broker may be started on."""

    folder: str
    broker_group: str
    log_end: int
    """The end of its log, in bytes."""


def read_candidate(files: Files) -> Candidate:
    """
    Cut what a copy has not received as a whole, and return what it has.

    Raises:
        DataFolderError: the folder is no copy, or one that was never complete.
        StorageError
    """
    copy = read_copy_file(files)
    if copy is None:
        raise DataFolderError(
            Reason.NOT_A_COPY,
            f"{files.name()} is not a copy: a broker may be started on it as it is",
            path=files.name(),
        )
    copied = CopiedLog(files)
    end = max(copied.end, 0)  # without a segment while the broker's log is empty
    try:
        if end < copy.complete_at:
            raise DataFolderError(
                f"{files.name()} was never complete: it has the log up to position {end}, "
                f"and the broker had it up to {copy.complete_at} when the copy was begun",
                path=files.name(),
            )
        if copied.has_lost_bytes or end < copy.durable_end:
            raise DataFolderError(
                Reason.COPY_UNUSABLE,
                f"{files.name()} has lost bytes that it had synced: promote another copy",
                path=files.name(),
            )
    finally:
        copied.close()
    return Candidate(copy, read_identity(files).broker_id, end)


async def wait_for_promotion(ask: Callable[[], Awaitable[object]], *, pause_s: float) -> None:
    """Call `ask`, which asks a metaserver for a promotion, until the broker counts as silent.
    Raises the errors of `ask`.
    """
    while True:
        try:
            await ask()
            return
        except ConflictError as error:
            if error.reason is not Reason.BROKER_SERVES:
                raise
        await asyncio.sleep(pause_s)


def promote_candidate(files: Files, candidate: Candidate) -> Promotion:
    """Let a broker serve a copy from now on. It acks nothing before it has heard from a
    metaserver. Raises StorageError.
    """
    record_promotion(files, candidate.copy.copy_id)
    remove_copy_file(files)
    return Promotion(
        folder=files.name(),
        broker_group=candidate.copy.broker_group,
        log_end=candidate.log_end,
    )


def demote_folder(files: Files, *, copy_id: str) -> None:
    """
    Make the folder of a broker whose place a copy has taken a copy itself.

    Its log is kept. What was derived from the log is built again at a promotion, because the log
    may be cut to what the other folder has. No broker serves the folder once the first file is
    written.

    Raises:
        DataFolderError, StorageError
    """
    identity = read_identity(files)
    end = max((base for base in segment_bases(files)), default=0)
    write_copy_file(
        files,
        CopyFile(copy_id=copy_id, broker_group=identity.broker_group, complete_at=end),
    )
    record_copies(files, exist=True)
    for kind in INDEX_KINDS:
        if has_index(files, kind):
            mark_incomplete(files, kind)
    for folder in (snapshot.FOLDER, agenda.FOLDER):
        if names := files.list(folder):
            for name in names:
                files.remove(f"{folder}/{name}")
            files.sync_folder(folder)

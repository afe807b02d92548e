"""Where a group begins that goes on behind a backfill: `manifest:DIR`, as programs and operators
give it.
"""

from __future__ import annotations

from pathlib import Path

from ..protocol.errors import JobError, Reason
from ..protocol.groups import GroupStart
from ..protocol.reading.instants import GroupBegin
from ..protocol.reprocess.manifest import decode_manifest, group_start_of

PREFIX = "manifest:"
MANIFEST_PATH = "_keylane/manifest.json"
"""Below the folder of the output."""


def manifest_start(text: str, *, subject: str) -> GroupStart:
    """
    The start of a group on `subject` behind the backfill in the folder that follows `manifest:`.
    Blocks.

    Raises:
        JobError: there is no manifest, it is not complete, or it is of another subject.
    """
    path = Path(text.removeprefix(PREFIX)) / MANIFEST_PATH
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JobError(Reason.MANIFEST, f"{path}: {error.strerror}", path=str(path)) from None
    return group_start_of(decode_manifest(data, where=str(path)), subject=subject, where=str(path))


def begin_of(start: GroupBegin | None, *, subject: str) -> GroupBegin | GroupStart | None:
    """Where a group begins: as given, or behind the backfill of `manifest:DIR`.  Raises
    JobError.
    """
    if isinstance(start, str) and start.startswith(PREFIX):
        return manifest_start(start, subject=subject)
    return start

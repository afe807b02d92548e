"""The start of a group that continues after a backfill: `manifest:DIR`, as programs and operators
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
"""The path of the manifest below the folder of the output."""


def manifest_start(text: str, *, subject: str) -> GroupStart:
    """
    Return the start of a group on `subject` after the backfill in the folder that follows
    `manifest:`. This call blocks.

    Raises:
        JobError: there is no manifest, it is incomplete, or it belongs to another subject.
    """
    path = Path(text.removeprefix(PREFIX)) / MANIFEST_PATH
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JobError(Reason.MANIFEST, f"{path}: {error.strerror}", path=str(path)) from None
    return group_start_of(decode_manifest(data, where=str(path)), subject=subject, where=str(path))


def begin_of(start: GroupBegin | None, *, subject: str) -> GroupBegin | GroupStart | None:
    """Return the start of a group: as given, or after the backfill of `manifest:DIR`. Raises
    JobError.
    """
    if isinstance(start, str) and start.startswith(PREFIX):
        return manifest_start(start, subject=subject)
    return start

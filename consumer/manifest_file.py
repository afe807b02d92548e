"""Resolves `manifest:DIR`, the start of a group that continues after a backfill."""

from __future__ import annotations

from pathlib import Path

from ..protocol.errors import JobError, Reason
from ..protocol.groups import GroupStart
from ..protocol.reading.instants import GroupStartOption
from ..protocol.reprocess.manifest import build_group_start, decode_manifest

PREFIX = "manifest:"
MANIFEST_PATH = "_keylane/manifest.json"
"""The path of the manifest within the output folder."""


def manifest_start(text: str, *, subject: str) -> GroupStart:
    """
    Return the start of a group that continues after the backfill in the folder that `text` names.
    This call blocks.

    Args:
        text: "manifest:" and the folder.
        subject: the group's subject.

    Raises:
        JobError: there is no manifest, it is incomplete, or it belongs to another subject.
    """
    path = Path(text.removeprefix(PREFIX)) / MANIFEST_PATH
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JobError(Reason.MANIFEST, f"{path}: {error.strerror}", path=str(path)) from None
    return build_group_start(
        decode_manifest(data, where=str(path)), subject=subject, where=str(path)
    )


def resolve_start(
    start: GroupStartOption | None, *, subject: str
) -> GroupStartOption | GroupStart | None:
    """Return a group's start, with `manifest:DIR` resolved to the end of that backfill. Raises
    JobError.
    """
    if isinstance(start, str) and start.startswith(PREFIX):
        return manifest_start(start, subject=subject)
    return start

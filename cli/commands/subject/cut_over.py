"""Where the consumer groups of a subject go on in the rows of a job that take its messages' place.

Producers and consumers have to stand still meanwhile: what is sent between this look and the publication is deleted with the
old messages.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ....protocol.errors import CutOverError, ManifestError, NotSentError, SubjectUnknownError

if TYPE_CHECKING:
    from ....admin import Admin
    from ....protocol.reprocess.manifest import Manifest


async def group_starts(
    admin: Admin, meta: str, hidden: str, subject: str, folder: str
) -> dict[str, dict[int, int]] | None:
    """
    Consumer group → partition of the hidden subject → first offset that the group has not handled.

    Returns:
        None if the hidden subject is gone: publishing says whether it is published.

    Raises:
        ManifestError: there is no manifest, it is not complete, or it is of other subjects.
        CutOverError: messages would be missing.
        NotSentError: a broker does not answer.
    """
    from ....arrow.reading import read
    from ....protocol.reprocess.manifest import live_offsets
    from ....spark.reprocess.carrying import SourceOffsets, check_covers, positions
    from ....spark.reprocess.folder import MANIFEST, OutputFolder

    manifest = OutputFolder(folder).read(MANIFEST)
    if manifest is None:
        raise ManifestError(f"{folder} has no manifest", path=folder)
    live_offsets(manifest, where=folder)
    _check_subjects(manifest, hidden, subject, folder)
    try:
        new = await admin.describe_subject(hidden)
    except SubjectUnknownError:
        return None
    old = await admin.describe_subject(subject)
    stored = [
        SourceOffsets(partition_id=each.partition_id, first=each.first_offset, end=each.next_offset)
        for each in old.partitions
        if each.first_offset is not None and each.next_offset is not None
    ]
    ends = {
        each.partition_id: each.next_offset
        for each in new.partitions
        if each.next_offset is not None
    }
    if len(stored) < len(old.partitions) or len(ends) < len(new.partitions):
        raise NotSentError(f"a broker of {subject} or {hidden} does not answer")
    cursors = await _cursors(admin, subject)
    check_covers(manifest, stored, cursors)

    def scan() -> dict[str, dict[int, int]]:
        rows = read(meta, hidden, columns=("partition", "offset", "properties"))
        return positions(cursors, rows, ends)

    return await asyncio.to_thread(scan) if cursors else {}


def _check_subjects(manifest: Manifest, hidden: str, subject: str, folder: str) -> None:
    output = manifest.output
    if not output or (output.hidden, output.target, manifest.subject) != (hidden, subject, subject):
        made = f"{output.hidden} for {output.target}" if output else "Parquet files"
        raise ManifestError(
            f"{folder} is of {manifest.subject}, into {made}, not of {subject} into {hidden}",
            path=folder,
        )


async def _cursors(admin: Admin, subject: str) -> dict[str, dict[int, int]]:
    """Consumer group → partition → cursor.  Raises NotSentError, CutOverError: messages are set aside."""
    cursors: dict[str, dict[int, int]] = {}
    for group in await admin.list_groups(subject):
        described = await admin.describe_group(subject, group.group)
        for each in described.partitions:
            if each.offset is None:
                raise NotSentError(each.problem or "a broker does not answer")
            if each.parked:
                raise CutOverError(
                    f"consumer group {group.group!r} has {each.parked} messages of partition {each.partition_id} set aside, which "
                    "would be deleted: redrive or discard them first (`keylane parked`)",
                    partition_id=each.partition_id,
                )
        cursors[group.group] = {
            each.partition_id: each.offset or 0 for each in described.partitions
        }
    return cursors

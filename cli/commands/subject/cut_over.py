"""Finds where the consumer groups of a subject continue in the rows of a job that replace its
messages.

Producers may continue: the job has sealed the messages of which its rows are made, and new messages
are stored after those and after the rows. The cursors of the groups must not change between reading
them here and the publication, which is refused if a group has live consumers, was reset, or has had
a consumer since. It may take minutes to
read the rows; if a group was reset or had a consumer in that time, they are read again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ....protocol.errors import JobError, NotSentError, PublishError, Reason, SubjectUnknownError

if TYPE_CHECKING:
    from ....admin import Admin
    from ....protocol.operations import Publication
    from ....protocol.reprocess.manifest import Manifest
    from ....spark.reprocess.carrying import SourceOffsets


LOOKS_MAX = 3
"""Number of times that the rows are read if cursors change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOver:
    """The arguments of a publication that replaces messages with rows."""

    starts: dict[str, dict[int, int]] | None = None
    """The first offset that a group has not handled, by consumer group and partition of the hidden
    subject; None if it is already published.
    """
    ends: dict[int, int]
    """The end of the messages of which the rows were made, by partition of the subject."""
    revisions: dict[str, str] = field(default_factory=dict)
    """The revision of each consumer group before its cursors were last read."""
    subject_id: int = 0
    """The id of the hidden subject that the job has filled."""


async def cut_over(
    admin: Admin, meta: str, hidden: str, subject: str, folder: str, *, wait: bool
) -> tuple[dict[str, dict[int, int]] | None, Publication]:
    """
    Replace messages with rows; if a group has changed since its cursors were read, plan again.

    Returns:
        Where the groups continue, see `CutOver.starts`, and the publication.

    Raises:
        PublishError: the groups keep changing.
        The errors of `plan_cut_over` and `Admin.publish_subject`.
    """
    left = LOOKS_MAX
    while True:
        planned = await plan_cut_over(admin, meta, hidden, subject, folder)
        left -= 1
        try:
            answer = await admin.publish_subject(
                hidden,
                subject,
                replace=True,
                starts=planned.starts,
                ends=planned.ends,
                subject_id=planned.subject_id,
                revisions=planned.revisions,
                wait=wait,
            )
        except PublishError as error:
            if error.reason is not Reason.PUBLISH_CURSORS or not left:
                raise
        else:
            return planned.starts, answer


async def plan_cut_over(admin: Admin, meta: str, hidden: str, subject: str, folder: str) -> CutOver:
    """
    Find where the consumer groups are in the messages, and from that in the rows.

    Raises:
        JobError: there is no manifest, it is not complete, or it describes other subjects or
            rows.
        RowsError: retention has removed some of the rows.
        JobError: messages would be missing, or the cursors keep changing.
        NotSentError: a broker does not answer.
    """
    from ....arrow.reading import read
    from ....protocol.reprocess.manifest import live_offsets
    from ....spark.reprocess.carrying import check_covers, positions
    from ....spark.reprocess.folder import MANIFEST, OutputFolder

    manifest = OutputFolder(folder).read(MANIFEST)
    if manifest is None:
        raise JobError(Reason.MANIFEST, f"{folder} has no manifest", path=folder)
    live_offsets(manifest, where=folder)
    _check_subjects(manifest, hidden, subject, folder)
    subject_id = manifest.output.subject_id if manifest.output else 0
    covered = {each.partition_id: each.end for each in manifest.ranges}
    try:
        ends = await _ends(admin, hidden)
    except SubjectUnknownError:
        # Publishing says whether it is published.
        return CutOver(ends=covered, subject_id=subject_id)
    _check_rows(manifest, hidden, ends, folder)
    stored = await _stored(admin, subject, before=min(ends))
    covered |= {each.partition_id: each.end for each in stored if each.first >= each.end}
    for _ in range(LOOKS_MAX):
        cursors, _ = await _cursors(admin, subject, before=min(ends))
        check_covers(manifest, stored, cursors)

        def scan(now: dict[str, dict[int, int]] = cursors) -> dict[str, dict[int, int]]:
            rows = read(meta, hidden, columns=("partition", "offset", "properties"))
            return positions(now, rows, ends)

        if not cursors:
            return CutOver(starts={}, ends=covered, subject_id=subject_id)
        starts = await asyncio.to_thread(scan)
        now, revisions = await _cursors(admin, subject, before=min(ends))
        if now == cursors:
            return CutOver(starts=starts, ends=covered, revisions=revisions, subject_id=subject_id)
    raise JobError(
        Reason.CUT_OVER,
        f"consumer groups of {subject} were reset, or handled messages, while the rows were read: "
        "do not change them until the rows are published",
    )


async def _ends(admin: Admin, hidden: str) -> dict[int, int]:
    """Return the offset after the last row of each partition of the hidden subject; raise
    SubjectUnknownError, NotSentError or RowsError.
    """
    from ....spark.writing.hidden import check_kept

    new = await admin.describe_subject(hidden)
    ends = {
        each.partition_id: each.next_offset
        for each in new.partitions
        if each.next_offset is not None
    }
    if len(ends) < len(new.partitions):
        raise NotSentError(f"a broker of {hidden} does not answer")
    for each in new.partitions:
        check_kept(hidden, each.partition_id, each.first_offset or 0)
    return ends


def _check_rows(manifest: Manifest, hidden: str, ends: dict[int, int], folder: str) -> None:
    """Raise JobError unless the hidden subject has exactly the rows that the job of the folder
    has counted.
    """
    assert manifest.output
    if ends != (manifest.output.messages or {}):
        raise JobError(
            Reason.MANIFEST,
            f"{hidden} has other rows than the job of {folder} has written: it was created again, "
            "or others have written to it; delete it (`keylane subject delete`), and run the job "
            "again",
            path=folder,
        )


async def _stored(admin: Admin, subject: str, *, before: int) -> list[SourceOffsets]:
    """Return the stored offsets of the partitions before the cut, which have lower ids than those
    of the hidden subject.
    """
    from ....spark.reprocess.carrying import SourceOffsets

    old = await admin.describe_subject(subject)
    partitions = [each for each in old.partitions if each.partition_id < before]
    stored = [
        SourceOffsets(partition_id=each.partition_id, first=each.first_offset, end=each.next_offset)
        for each in partitions
        if each.first_offset is not None and each.next_offset is not None
    ]
    if len(stored) < len(partitions):
        raise NotSentError(f"a broker of {subject} does not answer")
    return stored


def _check_subjects(manifest: Manifest, hidden: str, subject: str, folder: str) -> None:
    output = manifest.output
    if not output or (output.hidden, output.target, manifest.subject) != (hidden, subject, subject):
        made = f"{output.hidden} for {output.target}" if output else "Parquet files"
        raise JobError(
            Reason.MANIFEST,
            f"{folder} has a job from {manifest.subject} into {made}, not from {subject} into "
            f"{hidden}",
            path=folder,
        )


async def _cursors(
    admin: Admin, subject: str, *, before: int
) -> tuple[dict[str, dict[int, int]], dict[str, str]]:
    """
    Return the cursors of each consumer group by partition before the cut, and the revision of each
    group before its cursors were read.

    Raises:
        NotSentError: a broker does not answer.
        JobError: messages are parked.
    """
    cursors: dict[str, dict[int, int]] = {}
    revisions: dict[str, str] = {}
    for group in await admin.list_groups(subject):
        described = await admin.describe_group(subject, group.group)
        mine = [each for each in described.partitions if each.partition_id < before]
        for each in mine:
            if each.offset is None:
                raise NotSentError(each.problem or "a broker does not answer")
            if each.parked:
                raise JobError(
                    Reason.CUT_OVER,
                    f"consumer group {group.group!r} has parked {each.parked} messages of "
                    f"partition {each.partition_id}, which would be deleted: redrive or skip them "
                    "first (`keylane parked`)",
                    partition_id=each.partition_id,
                )
        cursors[group.group] = {each.partition_id: each.offset or 0 for each in mine}
        revisions[group.group] = described.revision
    return cursors, revisions

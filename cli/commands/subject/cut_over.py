"""Where the consumer groups of a subject go on in the rows of a job that take its messages' place.

Producers go on: the job has sealed what its rows are made of, and what is sent lies behind both.
The groups stand still from this look to the publication, which is refused while one has live
consumers, or where it was reset or had one since.  The rows may take minutes to read: where a group
was reset, or had a consumer, meanwhile, they are read again.
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
"""How often the rows are read while cursors change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOver:
    """What a publication has to know to put rows in the place of messages."""

    starts: dict[str, dict[int, int]] | None = None
    """Consumer group → partition of the hidden subject → first offset that it has not handled;
    None: it is published.
    """
    ends: dict[int, int]
    """Partition of the subject → where the messages end that the rows were made of."""
    revisions: dict[str, str] = field(default_factory=dict)
    """Consumer group → its revision before the last look at its cursors."""
    subject_id: int = 0
    """Of the hidden subject that the job has filled."""


async def cut_over(
    admin: Admin, meta: str, hidden: str, subject: str, folder: str, *, wait: bool
) -> tuple[dict[str, dict[int, int]] | None, Publication]:
    """
    Put rows in the place of messages; where a group has changed since the last look, look again.

    Returns:
        Where the groups go on, as `CutOver.starts`, and what became of the publication.

    Raises:
        What `plan_cut_over` and `Admin.publish_subject` raise; PublishError: groups change
        all the while.
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
    Look where the consumer groups are, in the messages and so in the rows.

    Raises:
        JobError: there is no manifest, it is not complete, or it is of other subjects or of
            other rows.
        RowsError: retention has removed some of the rows.
        JobError: messages would be missing, or cursors change all the while.
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
        f"leave them as they are "
        "until the rows are published",
    )


async def _ends(admin: Admin, hidden: str) -> dict[int, int]:
    """Partition of the hidden subject → one past its last row.  Raises SubjectUnknownError,
    NotSentError, RowsError.
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
    """Raises JobError unless the hidden subject has the rows that the job of the folder has
    counted, and no others.
    """
    assert manifest.output
    if ends != (manifest.output.messages or {}):
        raise JobError(
            Reason.MANIFEST,
            f"{hidden} has other rows than the job of {folder} has written: it was made anew or "
            f"written to since; delete it "
            "(`keylane subject delete`), and run the job again",
            path=folder,
        )


async def _stored(admin: Admin, subject: str, *, before: int) -> list[SourceOffsets]:
    """What is stored of the partitions before the cut: those with lower ids than the hidden
    subject's.
    """
    from ....spark.reprocess.carrying import SourceOffsets

    old = await admin.describe_subject(subject)
    there = [each for each in old.partitions if each.partition_id < before]
    stored = [
        SourceOffsets(partition_id=each.partition_id, first=each.first_offset, end=each.next_offset)
        for each in there
        if each.first_offset is not None and each.next_offset is not None
    ]
    if len(stored) < len(there):
        raise NotSentError(f"a broker of {subject} does not answer")
    return stored


def _check_subjects(manifest: Manifest, hidden: str, subject: str, folder: str) -> None:
    output = manifest.output
    if not output or (output.hidden, output.target, manifest.subject) != (hidden, subject, subject):
        made = f"{output.hidden} for {output.target}" if output else "Parquet files"
        raise JobError(
            Reason.MANIFEST,
            f"{folder} is of {manifest.subject}, into {made}, not of {subject} into {hidden}",
            path=folder,
        )


async def _cursors(
    admin: Admin, subject: str, *, before: int
) -> tuple[dict[str, dict[int, int]], dict[str, str]]:
    """
    Consumer group → partition before the cut → cursor, and group → its revision before this look.

    Raises:
        NotSentError: a broker does not answer.
        JobError: messages are set aside.
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
                    f"consumer group {group.group!r} has {each.parked} messages of partition "
                    f"{each.partition_id} set aside, which "
                    "would be deleted: redrive or discard them first (`keylane parked`)",
                    partition_id=each.partition_id,
                )
        cursors[group.group] = {each.partition_id: each.offset or 0 for each in mine}
        revisions[group.group] = described.revision
    return cursors, revisions

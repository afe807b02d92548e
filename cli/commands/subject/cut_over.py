"""Replaces a subject's messages with the rows of a job, and determines where its consumer groups
continue.

Producers may keep running: the job has sealed the messages that it reads, and new messages are
stored after both these messages and the rows. The groups' cursors must not change between the time
when they are read here and the publication, which is refused if a group has live consumers, or if
it was reset or had a consumer in the meantime. Reading the rows may take minutes; if a group was
reset or had a consumer during this time, the cursors are read again.
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


ATTEMPTS_MAX = 3
"""Maximum number of times that the rows are read because cursors have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOver:
    """The arguments of a publication that replaces messages with rows."""

    starts: dict[str, dict[int, int]] | None = None
    """Maps each consumer group to a dict that maps each partition id of the hidden subject to the
    first offset that the group has not handled. None if the subject is already published.
    """
    ends: dict[int, int]
    """Maps each partition id of the subject to the end offset of the messages from which the rows
    were made.
    """
    revisions: dict[str, str] = field(default_factory=dict)
    """Maps each consumer group to its revision before its cursors were last read."""
    subject_id: int = 0
    """Id of the hidden subject that the job filled."""


async def cut_over(
    admin: Admin,
    metaserver_address: str,
    hidden_subject: str,
    subject: str,
    job_folder: str,
    *,
    wait: bool,
) -> tuple[dict[str, dict[int, int]] | None, Publication]:
    """
    Replace messages with rows. The plan is repeated if a group changes after its cursors were read.

    Returns:
        Where the groups continue (see `CutOver.starts`), and the publication.

    Raises:
        PublishError: the groups keep changing.
        Any error of `plan_cut_over` and `Admin.publish_subject`.
    """
    attempts_left = ATTEMPTS_MAX
    while True:
        plan = await plan_cut_over(admin, metaserver_address, hidden_subject, subject, job_folder)
        attempts_left -= 1
        try:
            publication = await admin.publish_subject(
                hidden_subject,
                subject,
                replace=True,
                starts=plan.starts,
                ends=plan.ends,
                subject_id=plan.subject_id,
                revisions=plan.revisions,
                wait=wait,
            )
        except PublishError as error:
            if error.reason is not Reason.PUBLISH_CURSORS or not attempts_left:
                raise
        else:
            return plan.starts, publication


async def plan_cut_over(
    admin: Admin, metaserver_address: str, hidden_subject: str, subject: str, job_folder: str
) -> CutOver:
    """
    Convert the consumer groups' cursors in the messages to offsets in the rows.

    Raises:
        JobError: the manifest is missing or incomplete, or describes other subjects or rows;
            messages would be missing; or the cursors keep changing.
        RowsError: retention has removed some of the rows.
        NotSentError: a broker does not respond.
    """
    from ....arrow.reading import read
    from ....protocol.reprocess.manifest import live_offsets
    from ....spark.reprocess.carrying import check_manifest_covers, positions
    from ....spark.reprocess.folder import MANIFEST, OutputFolder

    manifest = OutputFolder(job_folder).read(MANIFEST)
    if manifest is None:
        raise JobError(Reason.MANIFEST, f"{job_folder} has no manifest", path=job_folder)
    live_offsets(manifest, where=job_folder)
    _check_subjects(manifest, hidden_subject, subject, job_folder)
    subject_id = manifest.output.subject_id if manifest.output else 0
    covered_ranges = {each.partition_id: each.end for each in manifest.ranges}
    try:
        ends = await _fetch_ends(admin, hidden_subject)
    except SubjectUnknownError:
        # Perhaps it is already published; the publication reports that.
        return CutOver(ends=covered_ranges, subject_id=subject_id)
    _check_rows(manifest, hidden_subject, ends, job_folder)
    stored_offsets = await _fetch_stored(admin, subject, first_row_partition=min(ends))
    covered_ranges |= {
        each.partition_id: each.end for each in stored_offsets if each.first >= each.end
    }
    for _ in range(ATTEMPTS_MAX):
        cursors, _ = await _fetch_cursors(admin, subject, first_row_partition=min(ends))
        check_manifest_covers(manifest, stored_offsets, cursors)

        def find_starts(
            latest_cursors: dict[str, dict[int, int]] = cursors,
        ) -> dict[str, dict[int, int]]:
            rows = read(
                metaserver_address, hidden_subject, columns=("partition", "offset", "properties")
            )
            return positions(latest_cursors, rows, ends)

        if not cursors:
            return CutOver(starts={}, ends=covered_ranges, subject_id=subject_id)
        starts = await asyncio.to_thread(find_starts)
        latest_cursors, revisions = await _fetch_cursors(
            admin, subject, first_row_partition=min(ends)
        )
        if latest_cursors == cursors:
            return CutOver(
                starts=starts, ends=covered_ranges, revisions=revisions, subject_id=subject_id
            )
    raise JobError(
        Reason.CUT_OVER,
        f"consumer groups of {subject} were reset, or handled messages, while the rows were read: "
        "do not change them until the rows are published",
    )


async def _fetch_ends(admin: Admin, hidden_subject: str) -> dict[int, int]:
    """Return the end offset of each partition of the hidden subject. Raises SubjectUnknownError,
    NotSentError or RowsError.
    """
    from ....spark.writing.hidden import check_not_removed

    description = await admin.describe_subject(hidden_subject)
    ends = {
        each.partition_id: each.next_offset
        for each in description.partitions
        if each.next_offset is not None
    }
    if len(ends) < len(description.partitions):
        raise NotSentError(f"a broker of {hidden_subject} does not answer")
    for each in description.partitions:
        check_not_removed(hidden_subject, each.partition_id, each.first_offset or 0)
    return ends


def _check_rows(
    manifest: Manifest, hidden_subject: str, ends: dict[int, int], job_folder: str
) -> None:
    """Raise JobError unless the hidden subject contains exactly the rows written by the job whose
    output is in the folder.
    """
    assert manifest.output
    if ends != (manifest.output.messages or {}):
        raise JobError(
            Reason.MANIFEST,
            f"{hidden_subject} has other rows than the job of {job_folder} has written: it was "
            "created again, or others have written to it; delete it (`keylane subject delete`), "
            "and run the job again",
            path=job_folder,
        )


async def _fetch_stored(
    admin: Admin, subject: str, *, first_row_partition: int
) -> list[SourceOffsets]:
    """Return the stored offsets of the partitions before the cut, which are those with lower ids
    than the partitions of the hidden subject.
    """
    from ....spark.reprocess.carrying import SourceOffsets

    description = await admin.describe_subject(subject)
    partitions = [
        each for each in description.partitions if each.partition_id < first_row_partition
    ]
    stored_offsets = [
        SourceOffsets(partition_id=each.partition_id, first=each.first_offset, end=each.next_offset)
        for each in partitions
        if each.first_offset is not None and each.next_offset is not None
    ]
    if len(stored_offsets) < len(partitions):
        raise NotSentError(f"a broker of {subject} does not answer")
    return stored_offsets


def _check_subjects(manifest: Manifest, hidden_subject: str, subject: str, job_folder: str) -> None:
    output = manifest.output
    if not output or (output.hidden, output.target, manifest.subject) != (
        hidden_subject,
        subject,
        subject,
    ):
        output_text = f"{output.hidden} for {output.target}" if output else "Parquet files"
        raise JobError(
            Reason.MANIFEST,
            f"{job_folder} has a job from {manifest.subject} into {output_text}, "
            f"not from {subject} into {hidden_subject}",
            path=job_folder,
        )


async def _fetch_cursors(
    admin: Admin, subject: str, *, first_row_partition: int
) -> tuple[dict[str, dict[int, int]], dict[str, str]]:
    """
    Return each consumer group's cursors on the partitions before the cut, and its revision, which
    is read before the cursors.

    Raises:
        NotSentError: a broker does not respond.
        JobError: messages are parked.
    """
    cursors: dict[str, dict[int, int]] = {}
    revisions: dict[str, str] = {}
    for group in await admin.list_groups(subject):
        description = await admin.describe_group(subject, group.group)
        partitions = [
            each for each in description.partitions if each.partition_id < first_row_partition
        ]
        for each in partitions:
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
        cursors[group.group] = {each.partition_id: each.offset or 0 for each in partitions}
        revisions[group.group] = description.revision
    return cursors, revisions

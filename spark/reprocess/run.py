"""Runs a job over fixed ranges of a subject, and stores its rows in a folder of Parquet files or in
a subject. Requires a Spark session.

    fix the ranges, hold them ─▶ run the missing pieces, a     ─▶ write the manifest, move the
                                 task for each partition          holds to the ends
            │ plan.json            │ part-….parquet, one after another     │ manifest.json
            └──────────────────────┴─ a later run makes the missing pieces ┘

Invariants
    The first run fixes the ranges. A later run must have the same job, subject and target, and also
    the same code unless changed code is accepted. Each piece records the code that made it.
    A killed job leaves only complete pieces behind, and the same command continues after them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash
from msgspec import UNSET
from msgspec.structs import replace as replace_fields

from ...arrow.planner import PlannedRange
from ...arrow.selection import ReadBound, ReadOptions
from ...arrow.snapshot import take_snapshot
from ...protocol.errors import JobError, PublishError, Reason
from ...protocol.operations import FILLED_BY_CHARS_MAX
from ...protocol.reprocess.manifest import (
    Manifest,
    SourceRange,
    SubjectOutput,
    continue_with_code,
    missing_pieces,
)
from .folder import MANIFEST, PLAN, OutputFolder
from .holding import RetentionHold
from .job import Job
from .target import JobTarget
from .worker import DONE_SCHEMA, JobTask, slice_range, task_runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIECE_ROWS = 250_000
PIECE_BYTES = 64 << 20
"""The limits of a piece, in rows and bytes. A worker keeps one piece and its output in memory."""
HANDOVER_MS = 3_600_000
ACCEPT_CODE_HINT = (
    "The code has changed: the module of the job, a module that it imports, or its version. "
    "--accept-code keeps the pieces that are done, and makes the others with this code; in a new "
    "folder all are made with this code, and --compare compares the two."
)
ROWS_PER_SECOND, BYTES_PER_SECOND = 250_000, 40 << 20
"""The approximate speed of a task with a cheap job, used to estimate durations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The pieces that a run still has to process."""

    manifest: Manifest
    missing: tuple[PlannedRange, ...]
    """The missing pieces, sorted by partition and offset."""

    @property
    def tasks(self) -> int:
        """The number of tasks, which is one per partition with missing pieces."""
        return len({piece.partition_id for piece in self.missing})

    @property
    def rows(self) -> int:
        """The number of messages in the missing pieces."""
        return sum(piece.rows for piece in self.missing)

    @property
    def size_bytes(self) -> int:
        """The approximate size of the missing pieces in the log, in bytes."""
        return sum(piece.size_bytes for piece in self.missing)

    def minutes(self, cores: int) -> float:
        """Return the approximate duration in minutes with this number of task slots, which is at
        least the duration of the longest task.
        """
        costs: dict[int, float] = {}
        for piece in self.missing:
            cost = max(piece.rows / ROWS_PER_SECOND, piece.size_bytes / BYTES_PER_SECOND)
            costs[piece.partition_id] = costs.get(piece.partition_id, 0) + cost
        return max(sum(costs.values()) / cores, max(costs.values(), default=0)) / 60


def plan_job(
    job: Job,
    options: ReadOptions,
    folder: OutputFolder,
    *,
    output: SubjectOutput | None = None,
    accept_code: bool = False,
) -> JobPlan:
    """
    Choose the ranges or read them from the folder, and return a plan for the missing pieces.

    This writes nothing, and blocks.

    Args:
        output: the subject that gets the rows; None for Parquet files. If the job has already
            begun, only the target is compared.
        accept_code: keep pieces that were made with different code.

    Raises:
        JobError: the folder has output for another job, code, subject or target, or its manifest is
            unreadable.
        DataLossError: retention has removed messages of missing pieces.
        RefusedError, UnreachableError: planning fails.
    """
    known_manifest = _load_known_manifest(job, options, folder, output, accept_code=accept_code)
    if known_manifest is not None:
        return _plan_missing(known_manifest, options, folder)
    return _plan_first_run(job, options, folder, output)


def _plan_first_run(
    job: Job, options: ReadOptions, folder: OutputFolder, output: SubjectOutput | None
) -> JobPlan:
    (subject,) = options.subjects
    planned_ranges = [] if options.partitions == frozenset() else take_snapshot(options)
    return _plan_missing(
        _new_manifest(job, subject, planned_ranges, output), options, folder, planned_ranges
    )


def _load_known_manifest(
    job: Job,
    options: ReadOptions,
    folder: OutputFolder,
    output: SubjectOutput | None,
    *,
    accept_code: bool,
) -> Manifest | None:
    """Return the manifest or the plan in the folder, or None. Raises JobError if it is unreadable,
    or belongs to another job, code, subject or target.
    """
    (subject,) = options.subjects
    manifest = folder.read(MANIFEST) or folder.read(PLAN)
    if manifest is None:
        return None
    target = output.target if output else ""
    known_target = manifest.output.target if manifest.output else ""
    is_same_job = (job.name, subject, target) == (manifest.job, manifest.subject, known_target)
    if is_same_job and (accept_code or job.code == manifest.code):
        return continue_with_code(manifest, job.code)
    error = JobError(
        Reason.JOB_CHANGED,
        f"{folder.path} has the output of job {manifest.job}, {manifest.code}, of subject "
        f"{manifest.subject}{_describe_target(known_target)}; the command is for job {job.name}, "
        f"{job.code}, of {subject}{_describe_target(target)}",
        path=str(folder.path),
    )
    if is_same_job:
        error.hint = ACCEPT_CODE_HINT
    raise error


def _plan_after_cut(
    job: Job, options: ReadOptions, folder: OutputFolder, to: JobTarget, *, accept_code: bool
) -> tuple[JobPlan, ReadOptions, Manifest | None]:
    """
    Cut the source, then plan the messages before the cut, which are in sealed partitions. Messages
    that are sent meanwhile come after the rows.

    Returns:
        The plan, the options with its partitions, and the manifest if the job is already complete.
    """
    known_manifest = _load_known_manifest(
        job, options, folder, to.output(), accept_code=accept_code
    )
    finished_manifest = folder.read(MANIFEST)
    requested = known_manifest.output if known_manifest and known_manifest.output else to.output()
    try:
        output, older_ids = to.cut(requested)
    except PublishError as error:
        if (
            error.reason is not Reason.PUBLISH_TARGET
            or known_manifest is None
            or finished_manifest is None
        ):
            raise
        # The rows are already published.
        return _plan_missing(known_manifest, options, folder), options, finished_manifest
    partitions = older_ids if options.partitions is None else older_ids & options.partitions
    options = replace(options, partitions=partitions)
    if known_manifest is not None and known_manifest.output == output:
        plan = _plan_missing(known_manifest, options, folder)
        if plan.missing or finished_manifest is None:
            return plan, options, None
        return plan, options, to.check_rows(finished_manifest)
    # The earlier hidden subject was deleted, and messages may have arrived since, so all rows are
    # written again, with new ranges.
    folder.remove(MANIFEST)
    plan = _plan_first_run(job, options, folder, output)
    folder.write(PLAN, plan.manifest)
    return plan, options, None


def _describe_target(target: str) -> str:
    return f", to subject {target}" if target else ""


def _plan_missing(
    manifest: Manifest,
    options: ReadOptions,
    folder: OutputFolder,
    planned_ranges: list[PlannedRange] | None = None,
) -> JobPlan:
    pieces_to_run = missing_pieces(manifest, folder.pieces(manifest.mark, manifest.earlier_marks))
    if planned_ranges is None:
        planned_ranges = _replan(options, pieces_to_run)
    by_id = {each.partition_id: each for each in planned_ranges}
    return JobPlan(
        manifest=manifest,
        missing=tuple(
            slice_range(by_id[each.partition_id], each.start, each.end) for each in pieces_to_run
        ),
    )


def _new_manifest(
    job: Job, subject: str, planned_ranges: Iterable[PlannedRange], output: SubjectOutput | None
) -> Manifest:
    planned_ranges = list(planned_ranges)
    largest = max((each.message_bytes for each in planned_ranges), default=0)
    return Manifest(
        job=job.name,
        code=job.code,
        subject=subject,
        planned_at_ms=time.time_ns() // 1_000_000,
        ranges=tuple(
            SourceRange(
                partition_id=each.partition_id,
                start=each.start,
                end=each.end,
                queue=each.queue,
                epoch=each.epoch,
            )
            for each in planned_ranges
        ),
        piece_rows=max(1, min(PIECE_ROWS, PIECE_BYTES // max(largest, 1))),
        output=output or UNSET,
    )


def _replan(options: ReadOptions, missing_pieces: list[SourceRange]) -> list[PlannedRange]:
    """Plan the missing pieces of an earlier run again, because partitions may have moved to other
    brokers.
    """
    if not missing_pieces:
        return []
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for piece in missing_pieces:
        starts.setdefault(piece.partition_id, piece.start)
        ends[piece.partition_id] = piece.end
    missing_options = replace(
        options,
        partitions=frozenset(starts),
        start=ReadBound(0, starts),
        end=ReadBound(0, ends),
    )
    return take_snapshot(missing_options)


def run_job(
    spark: SparkSession | Callable[[], SparkSession],
    job: Job,
    options: ReadOptions,
    folder: OutputFolder,
    *,
    to: JobTarget | None = None,
    handover_ms: int = HANDOVER_MS,
    accept_code: bool = False,
    park: bool = False,
    planned: Callable[[JobPlan], None] = lambda _plan: None,
) -> Manifest:
    """
    Run the job on the missing pieces, and write the manifest to the folder. This blocks, and
    returns the manifest.

    Args:
        spark: a session, or a function that starts one. It is called only if a piece is missing.
        to: the subject that gets the rows; None for Parquet files. If it is the source itself, and
            the rows stay hidden, the source is cut first, because the rows will replace all
            messages before the cut.
        handover_ms: the time in milliseconds that messages after the ranges stay held when the job
            has ended, so that a consumer group can start there.
        accept_code: run the missing pieces even if other pieces were made with different code.
        park: set aside messages for which the function fails, and count them in `Manifest.parked`;
            if False, the job fails instead.
        planned: called with the plan when it has been stored.

    Raises:
        JobError: the job fails, or the workers and the driver do not share the folder.
        The errors of `plan_job`, of `JobTarget`, and of Spark.
    """
    if to is not None:
        to = replace(to, filled_by=_describe_filler(job, folder))
    if to is not None and to.needs_cut(options.subjects[0]):
        plan, options, done = _plan_after_cut(job, options, folder, to, accept_code=accept_code)
    else:
        output = to.output() if to else None
        plan = plan_job(job, options, folder, output=output, accept_code=accept_code)
        done = folder.read(MANIFEST)
        if plan.missing or (done is not None and to is not None and not to.ensure_published(done)):
            done = None
    if done is not None:
        planned(plan)
        return done
    with _retention_hold(options, plan, handover_ms):
        folder.write(PLAN, replace_fields(plan.manifest, pieces=()))
        if to is not None:  # the rows of a deleted hidden subject are written again
            plan = _plan_missing(to.create(plan.manifest), options, folder)
            folder.write(PLAN, replace_fields(plan.manifest, pieces=()))
            folder.remove(MANIFEST)  # it may describe rows that were deleted
        planned(plan)
        _run_tasks(spark, job, options, folder, plan, to, park=park)
        pieces = folder.pieces(plan.manifest.mark, plan.manifest.earlier_marks)
        used_codes = {piece.code for piece in pieces}
        codes = (
            tuple(code for code in plan.manifest.earlier_codes or () if code in used_codes) or UNSET
        )
        manifest = replace_fields(plan.manifest, pieces=tuple(pieces), earlier_codes=codes)
        missing = missing_pieces(manifest, manifest.pieces)
        if missing:
            raise JobError(
                Reason.MANIFEST,
                f"{folder.path} lacks {len(missing)} pieces that the workers have written: is it "
                "the same folder on every machine?",
                path=str(folder.path),
            )
        if to is not None:
            manifest = to.check_rows(manifest)
        folder.write(MANIFEST, manifest)
        if to is not None:
            to.publish(manifest)
    return manifest


def _describe_filler(job: Job, folder: OutputFolder) -> str:
    """
    Return the description of the job and its folder that is stored with the hidden subject.

    It is the same for each run, but different for each folder.
    """
    text = f"job {job.name} of folder {folder.path}"
    if len(text) <= FILLED_BY_CHARS_MAX:
        return text
    digest = f"… ({xxhash.xxh3_64_hexdigest(text.encode())})"
    return text[: FILLED_BY_CHARS_MAX - len(digest)] + digest


def _retention_hold(options: ReadOptions, plan: JobPlan, handover_ms: int) -> RetentionHold:
    """
    Return a hold that protects the messages that are still to be read from retention.

    In each partition it starts at the first missing piece, or at the end if no piece is missing.
    """
    starts: dict[int, int] = {}
    for piece in plan.missing:
        starts.setdefault(piece.partition_id, piece.start)
    ends = {each.partition_id: each.end for each in plan.manifest.ranges}
    hold_starts = {
        partition_id: starts.get(partition_id, end) for partition_id, end in ends.items()
    }
    return RetentionHold(
        options.meta,
        plan.manifest.subject,
        plan.manifest.job,
        starts=hold_starts,
        ends=ends,
        handover_ms=handover_ms,
    )


def _run_tasks(
    spark: SparkSession | Callable[[], SparkSession],
    job: Job,
    options: ReadOptions,
    folder: OutputFolder,
    plan: JobPlan,
    to: JobTarget | None,
    *,
    park: bool,
) -> None:
    if not plan.missing:
        return
    session = spark() if callable(spark) else spark
    hidden = None if to is None else to.hidden_rows(plan.manifest)
    for wave in group_into_waves(plan.missing, in_order=to is not None):
        tasks = [
            JobTask(
                options=options,
                pieces=tuple(pieces),
                folder=str(folder.path),
                hidden=hidden,
                park=park,
            )
            for pieces in wave
        ]
        task_numbers = session.range(0, len(tasks), 1, len(tasks))
        task_numbers.mapInArrow(task_runner(job, tasks), DONE_SCHEMA).collect()


def group_into_waves(
    missing_ranges: Iterable[PlannedRange], *, in_order: bool
) -> list[list[list[PlannedRange]]]:
    """
    Return the pieces of each task, in waves of tasks that run concurrently.

    Args:
        in_order: put each partition into a later wave than its ancestors.
    """
    by_wave: dict[int, dict[int, list[PlannedRange]]] = {}
    for piece in missing_ranges:
        wave = by_wave.setdefault(piece.epoch if in_order else 0, {})
        wave.setdefault(piece.partition_id, []).append(piece)
    return [list(by_wave[epoch].values()) for epoch in sorted(by_wave)]

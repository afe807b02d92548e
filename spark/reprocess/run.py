"""Runs a job over fixed ranges of a subject, into a folder of Parquet files.  Needs a Spark session.

    plan: ranges fixed, hold ─▶ missing pieces, a task for each partition ─▶ manifest, hold moved behind the ranges
            │ plan.json            │ part-….parquet, one after another            │ manifest.json
            └──────────────────────┴── run again: what is missing, or nothing ────┘

Invariants
    The ranges are those of the first run; code, subject and bounds of a later run have to be the same.
    A killed job leaves whole pieces only; the same command goes on behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as changed

from ...arrow.planner import PlannedRange
from ...arrow.selection import ReadBound, ReadOptions
from ...arrow.snapshot import take_snapshot
from ...protocol.errors import JobChangedError, ManifestError
from ...protocol.reprocess.manifest import Manifest, SourceRange, missing_pieces
from .comparing import KeyDifference, differences
from .folder import MANIFEST, PLAN, OutputFolder
from .holding import Holding
from .job import Job
from .worker import DONE_SCHEMA, JobTask, cut, task_runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIECE_ROWS = 250_000
PIECE_BYTES = 64 << 20
"""A worker has one piece in memory, with its output."""
HANDOVER_MS = 3_600_000
ROWS_PER_SECOND, BYTES_PER_SECOND = 250_000, 40 << 20
"""Of one task, about, for a job that costs little; a plan estimates its minutes by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What a run is to do."""

    manifest: Manifest
    missing: tuple[PlannedRange, ...]
    """By partition and offset."""

    @property
    def tasks(self) -> int:
        """One for each partition that has missing pieces."""
        return len({piece.partition_id for piece in self.missing})

    @property
    def rows(self) -> int:
        """Messages of the missing pieces."""
        return sum(piece.rows for piece in self.missing)

    @property
    def size_bytes(self) -> int:
        """Bytes of log of the missing pieces, about."""
        return sum(piece.size_bytes for piece in self.missing)

    def minutes(self, cores: int) -> float:
        """How long it takes with this number of task slots, about; never shorter than the longest task."""
        costs: dict[int, float] = {}
        for piece in self.missing:
            cost = max(piece.rows / ROWS_PER_SECOND, piece.size_bytes / BYTES_PER_SECOND)
            costs[piece.partition_id] = costs.get(piece.partition_id, 0) + cost
        return max(sum(costs.values()) / cores, max(costs.values(), default=0)) / 60


def plan_job(job: Job, options: ReadOptions, folder: OutputFolder) -> JobPlan:
    """
    Fix the ranges, or find them in the folder, and tell what is missing; writes nothing.  Blocks.

    Raises:
        JobChangedError: the folder has the output of another job, other code or another subject.
        ManifestError: the folder's manifest is unreadable.
        DataLossError: retention has removed messages of missing pieces.
        RefusedError, UnreachableError: what planning raises.
    """
    (subject,) = options.subjects
    known = folder.read(MANIFEST) or folder.read(PLAN)
    if known is None:
        planned = take_snapshot(options)
        manifest = _manifest_of(job, subject, planned)
    else:
        manifest = known
        asked = (job.name, job.code, subject)
        if asked != (known.job, known.code, known.subject):
            raise JobChangedError(
                f"{folder.path} has the output of job {known.job}, {known.code}, of subject {known.subject}; "
                f"asked for is job {job.name}, {job.code}, of {subject}",
                path=str(folder.path),
            )
        planned = None
    missing = missing_pieces(manifest, folder.pieces(manifest.code))
    if planned is None:
        planned = _planned_again(options, missing)
    by_id = {each.partition_id: each for each in planned}
    return JobPlan(
        manifest=manifest,
        missing=tuple(cut(by_id[each.partition_id], each.start, each.end) for each in missing),
    )


def _manifest_of(job: Job, subject: str, planned: Iterable[PlannedRange]) -> Manifest:
    planned = list(planned)
    largest = max((each.message_bytes for each in planned), default=0)
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
            for each in planned
        ),
        piece_rows=max(1, min(PIECE_ROWS, PIECE_BYTES // max(largest, 1))),
    )


def _planned_again(options: ReadOptions, missing: list[SourceRange]) -> list[PlannedRange]:
    """Where the missing pieces are now; the ranges are those of the first run."""
    if not missing:
        return []
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for piece in missing:
        starts.setdefault(piece.partition_id, piece.start)
        ends[piece.partition_id] = piece.end
    again = replace(
        options,
        partitions=frozenset(starts),
        start=ReadBound(0, starts),
        end=ReadBound(0, ends),
    )
    return take_snapshot(again)


def run_job(
    spark: SparkSession,
    job: Job,
    options: ReadOptions,
    folder: OutputFolder,
    *,
    handover_ms: int = HANDOVER_MS,
    planned: Callable[[JobPlan], None] = lambda _plan: None,
) -> Manifest:
    """
    Do what is missing; returns the manifest, which is then in the folder.  Blocks.

    Args:
        handover_ms: how long messages behind the ranges are held afterwards, for a consumer group to begin there.
        planned: called when the plan is stored.

    Raises:
        What `plan_job` raises; JobFailedError, and the errors of Spark.
    """
    plan = plan_job(job, options, folder)
    manifest = plan.manifest
    if not plan.missing and (done := folder.read(MANIFEST)) is not None:
        planned(plan)
        return done
    starts: dict[int, int] = {}
    for piece in plan.missing:
        starts.setdefault(piece.partition_id, piece.start)
    ends = {each.partition_id: each.end for each in manifest.ranges}
    held = {number: starts.get(number, end) for number, end in ends.items()}
    with Holding(
        options.meta,
        manifest.subject,
        manifest.job,
        starts=held,
        ends=ends,
        handover_ms=handover_ms,
    ):
        folder.write(PLAN, changed(manifest, pieces=()))
        planned(plan)
        if plan.missing:
            _run_tasks(spark, job, options, folder, plan)
        manifest = changed(manifest, pieces=tuple(folder.pieces(manifest.code)))
        left = missing_pieces(manifest, manifest.pieces)
        if left:
            raise ManifestError(
                f"{folder.path} lacks {len(left)} pieces that the workers have written: is it the same folder on every "
                "machine?",
                path=str(folder.path),
            )
        folder.write(MANIFEST, manifest)
    return manifest


def _run_tasks(
    spark: SparkSession, job: Job, options: ReadOptions, folder: OutputFolder, plan: JobPlan
) -> None:
    by_id: dict[int, list[PlannedRange]] = {}
    for piece in plan.missing:
        by_id.setdefault(piece.partition_id, []).append(piece)
    tasks = [
        JobTask(options=options, pieces=tuple(pieces), folder=str(folder.path))
        for pieces in by_id.values()
    ]
    numbers = spark.range(0, len(tasks), 1, len(tasks))
    numbers.mapInArrow(task_runner(job, tasks), DONE_SCHEMA).collect()


def compare_outputs(old: OutputFolder, new: OutputFolder) -> list[KeyDifference]:
    """
    Where the output of one folder differs from that of another; equal digests are not read.

    Raises:
        ManifestError: one of them is not complete, or they have other ranges.
    """
    before, after = old.read(MANIFEST), new.read(MANIFEST)
    for folder, manifest in ((old, before), (new, after)):
        if manifest is None:
            raise ManifestError(f"{folder.path} is not complete", path=str(folder.path))
    assert before is not None
    assert after is not None
    pieces = {(each.partition_id, each.start, each.end): each for each in before.pieces}
    if pieces.keys() != {(each.partition_id, each.start, each.end) for each in after.pieces}:
        raise ManifestError(
            f"{old.path} and {new.path} have other ranges: reprocess both with the same --start and --end",
            path=str(old.path),
        )
    unlike: list[KeyDifference] = []
    for piece in after.pieces:
        other = pieces[piece.partition_id, piece.start, piece.end]
        if other.digest != piece.digest:
            unlike += differences(piece.partition_id, old.rows_of(other), new.rows_of(piece))
    return unlike

"""Runs a task of a job: reads the missing pieces of a partition, calls the function on each, and
writes the resulting rows.

Invariants
    A task reads its pieces in offset order, and the function receives each piece as one table.
    A repeated piece has the same rows if the function is deterministic.
    A message is only parked after the function has failed for a table with just this message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from ...arrow.planner import PlannedRange
from ...arrow.schema import arrow_schema
from ...arrow.selection import ReadOptions
from ...arrow.task_reader import read_task
from ...protocol.errors import JobError, KeylaneError, Reason
from ...protocol.reprocess.manifest import JobPiece
from ..failure import readable_errors
from .digest import table_digest
from .folder import OutputFolder, piece_file
from .job import Job, JobFunction
from .messages import REPLAY, to_messages
from .target import HiddenRows, store_rows

PARKED_MAX = 1_000
"""The maximum number of parked messages per piece. A function that fails for more is considered
broken. Each failure costs about twenty calls.
"""
ERROR = "error"
"""The column of parked messages that contains the function's error."""
ERROR_CHARS = 1_000
DONE_SCHEMA = "partition_id long, rows long"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTask:
    """A task for the missing pieces of one partition, in offset order."""

    options: ReadOptions
    pieces: tuple[PlannedRange, ...]
    folder: str
    hidden: HiddenRows | None = None
    """The hidden subject that gets the rows; None for Parquet files."""
    park: bool = False
    """Whether to set aside messages for which the function fails; otherwise the job fails."""


def task_runner(
    job: Job, tasks: Sequence[JobTask]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for `mapInArrow` that takes the indexes of tasks."""

    def run(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                task = tasks[number]
                with readable_errors():
                    rows = sum(run_piece(job, task, piece) for piece in task.pieces)
                yield pa.RecordBatch.from_pydict(
                    {"partition_id": [task.pieces[0].partition_id], "rows": [rows]}
                )

    return run


def run_piece(job: Job, task: JobTask, planned_range: PlannedRange) -> int:
    """
    Read a piece, call the function, and store the rows. Return the number of rows.

    Raises:
        JobError: the function raised an error or did not return a table or, with `park`, it failed
            for too many messages.
        KeylaneError: reading or storing fails.
    """
    batches = list(read_task(task.options, [planned_range]))
    messages = pa.Table.from_batches(batches, arrow_schema(task.options.columns))
    parked = messages.slice(0, 0)
    if task.park:
        rows, parked = call_isolating_failures(job, messages, planned_range)
    else:
        rows = call_function(job.name, job.function, messages, planned_range)
    folder = OutputFolder(task.folder)
    piece = JobPiece(
        partition_id=planned_range.partition_id,
        start=planned_range.start,
        end=planned_range.end,
        rows=rows.num_rows,
        digest=table_digest(rows),
        file=""
        if task.hidden
        else piece_file(planned_range.partition_id, planned_range.start, planned_range.end),
        parked=parked.num_rows,
    )
    folder.write_parked(piece, parked)
    if task.hidden is not None:
        store_rows(
            task.hidden,
            to_messages(rows, job=job.name, piece=piece),
            piece,
            keyless_bounds=(planned_range.range_start, planned_range.range_end),
        )
        folder.record_piece(piece, task.hidden.mark)
        return piece.rows
    output = rows.drop_columns([REPLAY]) if REPLAY in rows.column_names else rows
    job_names = pa.repeat(pa.scalar(job.name, pa.string()), rows.num_rows)
    folder.write_piece(piece, output.append_column(REPLAY, job_names), job.code)
    return piece.rows


def call_isolating_failures(
    job: Job, messages: pa.Table, planned_range: PlannedRange
) -> tuple[pa.Table, pa.Table]:
    """
    Call the function. Return its rows, and the messages for which it failed, with their errors.

    A table for which the function fails is halved until each failing message is isolated.

    Raises:
        JobError: the function did not return a table, returned tables with incompatible schemas, or
            failed for too many messages.
    """
    results: list[pa.Table] = []
    parked: list[pa.Table] = []
    pending_tables = [messages]
    while pending_tables:
        table = pending_tables.pop()
        try:
            results.append(call_function(job.name, job.function, table, planned_range))
        except JobError as error:
            cause, half_rows = error.__cause__, table.num_rows // 2
            if cause is None:
                raise
            if half_rows:
                pending_tables += [table.slice(half_rows), table.slice(0, half_rows)]
            elif table.num_rows:
                if len(parked) == PARKED_MAX:
                    raise JobError(
                        Reason.JOB_FAILED,
                        f"{error.message}; it fails for over {PARKED_MAX} messages of this piece",
                        **error.details,
                    ) from cause
                text = f"{type(cause).__name__}: {cause}"[:ERROR_CHARS]
                text = text.encode(errors="replace").decode()
                parked.append(table.append_column(ERROR, pa.array([text], pa.string())))
    if not results:
        results.append(_empty_result(job, messages, planned_range))
    try:
        rows = (
            results[0]
            if len(results) == 1
            else pa.concat_tables(results, promote_options="default")
        )
    except pa.ArrowException as error:
        raise JobError(
            Reason.JOB_FAILED,
            f"job {job.name} at [{planned_range.start}, {planned_range.end}) of partition "
            f"{planned_range.partition_id} returned tables with different schemas, when bad "
            f"messages were left out: {error}",
            job=job.name,
            partition_id=planned_range.partition_id,
            start=planned_range.start,
        ) from None
    return rows, pa.concat_tables(parked) if parked else messages.slice(0, 0)


def _empty_result(job: Job, messages: pa.Table, planned_range: PlannedRange) -> pa.Table:
    """Return the function's result for an empty table, or an empty table of values if the function
    fails.
    """
    try:
        return call_function(job.name, job.function, messages.slice(0, 0), planned_range)
    except JobError:
        return pa.table({"value": pa.array([], pa.binary())})


def call_function(
    name: str, function: JobFunction, rows: pa.Table, planned_range: PlannedRange
) -> pa.Table:
    """Call the function and return its table. Raises JobError if it fails or does not return a
    table.
    """
    location = (
        f"[{planned_range.start}, {planned_range.end}) of partition {planned_range.partition_id}"
    )
    details = {
        "job": name,
        "partition_id": planned_range.partition_id,
        "start": planned_range.start,
    }
    try:
        result = function(rows)
    except KeylaneError:
        raise
    except Exception as error:
        raise JobError(
            Reason.JOB_FAILED,
            f"job {name} at {location}: {type(error).__name__}: {error}",
            **details,
        ) from error
    if isinstance(result, pa.RecordBatch):
        return pa.Table.from_batches([result])
    if not isinstance(result, pa.Table):
        raise JobError(
            Reason.JOB_FAILED,
            f"job {name} at {location} gave {type(result).__name__}, not a pyarrow.Table",
            **details,
        )
    return result


def slice_range(planned_range: PlannedRange, start: int, end: int) -> PlannedRange:
    """Return the part `[start, end)` of a planned range."""
    return replace(planned_range, start=start, end=end)

"""`keylane spark reprocess`: plans and runs a job, with a progress bar per partition, and compares
its output.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from ....protocol.clock import SystemClock
from ....protocol.errors import ConfigError, KeylaneError
from ....protocol.reprocess.manifest import SourceRange
from ....protocol.text import counted, format_time
from ...options import OutputFormat
from ...screen import make_table, show_data, show_error, show_line, show_table
from ...status import showing

if TYPE_CHECKING:
    from ....arrow.selection import ReadOptions
    from ....spark.reprocess.folder import OutputFolder
    from ....spark.reprocess.job import Job
    from ....spark.reprocess.run import JobPlan
    from ....spark.reprocess.target import JobTarget

PARQUET = "parquet:"
POLL_SECONDS = 0.3
DIFFERENCES_SHOWN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ReprocessOptions:
    """The options of `keylane spark reprocess`."""

    meta: str
    source: str
    to: str
    job: str
    start: str
    end: str
    name: str
    plan: bool
    compare: str
    handover_ms: int
    folder: str = ""
    hidden: str = ""
    partitions: int = 0
    accept_code: bool = False
    code_version: str = ""
    park: bool = False


def reprocess(output: OutputFormat, command: ReprocessOptions) -> int:
    """Run the command and return its exit status: 0, 1 after an error, 2 if the outputs differ, or
    3 if messages are parked.
    """
    from ....spark.failure import parse_error

    try:
        return _reprocess(output, command)
    except KeylaneError as error:
        show_error(error, output)
    except Exception as error:
        keylane_error = parse_error(str(error))
        if keylane_error is None:
            raise
        show_error(keylane_error, output)
    return 1


def _reprocess(output: OutputFormat, command: ReprocessOptions) -> int:
    from ....protocol.ids import check_name
    from ....spark.options import parse_options
    from ....spark.reprocess.folder import OutputFolder
    from ....spark.reprocess.job import load_job
    from ....spark.reprocess.run import plan_job

    folder_path, target = _parse_target(command)
    sys.path.insert(0, "")  # like `python -m`: find jobs in the current folder
    job = load_job(command.job, name=command.name, version=command.code_version)
    check_name("job", job.name)
    folder = OutputFolder(folder_path)
    options = parse_options(
        {
            "meta": command.meta,
            "subject": command.source,
            "start": command.start,
            "end": command.end,
            "columns": "partition,offset,key,value,timestamp,properties",
        },
        now_ms=SystemClock.wall_ms(),
    )
    if len(options.subjects) != 1:
        raise ConfigError(f"--source is one subject, not {command.source!r:.80}")
    if command.plan:
        hidden = target.output() if target else None
        planned = plan_job(job, options, folder, output=hidden, accept_code=command.accept_code)
        _show_plan(output, planned)
        return 0
    if command.compare:
        _check_comparison(command.compare)
    parked = _run(output, command, job, options, folder, target)
    has_differences = _compare(output, command, folder) if command.compare else False
    return 2 if has_differences else 3 if parked else 0


def _check_comparison(compare: str) -> None:
    """Check the argument of --compare before the job runs. Raises the errors that it causes."""
    from ....protocol.ids import check_name
    from ....spark.reprocess.folder import OutputFolder
    from ....spark.reprocess.outputs import SUBJECT, read_complete_manifest

    if compare.startswith(SUBJECT):
        check_name("subject", compare.removeprefix(SUBJECT))
    else:
        read_complete_manifest(OutputFolder(compare))


def _parse_target(command: ReprocessOptions) -> tuple[str, JobTarget | None]:
    """
    Return the output folder and the target subject, which is None for Parquet.

    Raises:
        ConfigError: the options contradict each other.
    """
    from ....spark.reprocess.target import JobTarget
    from ....spark.writing.job import parse_write_options

    if command.to.startswith(PARQUET):
        if command.to == PARQUET:
            raise ConfigError(f"--target is parquet:DIR or a subject, not {command.to!r:.80}")
        if command.folder or command.partitions or command.hidden:
            raise ConfigError("--folder, --partitions and --hidden go with --target SUBJECT")
        return command.to.removeprefix(PARQUET), None
    if not command.folder:
        raise ConfigError(
            "--target SUBJECT needs --folder DIR, where the plan and the manifest are kept"
        )
    if command.to == command.source and not command.hidden:
        raise ConfigError(
            "--target the subject itself would store the rows after the messages of which they are "
            "made: with --hidden they stay hidden, and `keylane subject publish HIDDEN SUBJECT "
            "--replace --groups-from DIR` replaces the messages with them"
        )
    write_options = {
        "meta": command.meta,
        "subject": command.to,
        "publish": "false" if command.hidden else "true",
    }
    write_options |= {"partitions": str(command.partitions)} if command.partitions else {}
    write_options |= {"hidden": command.hidden} if command.hidden else {}
    return command.folder, JobTarget(options=parse_write_options(write_options))


class PlanFields(TypedDict):
    """What a job would do, as JSON."""

    rows: int
    mb: float
    tasks: int
    minutes: float
    ranges: tuple[SourceRange, ...]
    missing_rows: dict[int, int]
    removed_from_ms: dict[int, int | None]


class DifferenceFields(TypedDict):
    """A key whose rows differ from those of another output, as JSON."""

    partition_id: int
    key: str | None
    first_offset: int | None
    rows: int


def _show_plan(output: OutputFormat, plan: JobPlan) -> None:
    cores = os.cpu_count() or 1
    megabytes, minutes = round(plan.size_bytes / 1e6, 1), round(plan.minutes(cores), 1)
    missing_rows = Counter[int]()
    for piece in plan.missing:
        missing_rows[piece.partition_id] += piece.rows
    removed = {piece.partition_id: piece.removed_from_ms for piece in plan.missing}
    if output is not OutputFormat.TABLE:
        fields = PlanFields(
            rows=plan.rows,
            mb=megabytes,
            tasks=plan.tasks,
            minutes=minutes,
            ranges=plan.manifest.ranges,
            missing_rows=dict(missing_rows),
            removed_from_ms=removed,
        )
        show_data(output, fields)
        return
    rows = [
        (
            each.partition_id,
            each.start,
            each.end,
            each.end - each.start,
            missing_rows[each.partition_id],
            removal_text(removed.get(each.partition_id), now_ms=SystemClock.wall_ms()),
        )
        for each in plan.manifest.ranges
    ]
    title = f"{plan.manifest.job} of {plan.manifest.subject}, {plan.manifest.code}"
    names = ("id#", "start#", "end#", "rows#", "missing rows#", "removed from")
    show_table(make_table(title, names, rows))
    show_line(
        f"to do: {plan.rows} rows, {megabytes} MB, {plan.tasks} tasks, about "
        f"{minutes} minutes with {cores} cores; the job protects their messages from "
        "retention"
    )
    times = [at for at in removed.values() if at is not None]
    if times:
        show_line(
            f"not protected yet: retention may remove some of them "
            f"{removal_text(min(times), now_ms=SystemClock.wall_ms())}, "
            "unless a consumer group still needs them; run the job before that"
        )


def removal_text(at_ms: int | None, *, now_ms: int) -> str:
    """Describe when retention starts to remove messages; `at_ms` is milliseconds since 1970."""
    if at_ms is None:
        return "-"
    if at_ms <= now_ms:
        return "now"
    minutes = (at_ms - now_ms) // 60_000
    days, hours = minutes // 1_440, minutes // 60 % 24
    remaining = f"{days} d {hours} h" if days else f"{hours} h {minutes % 60} min"
    return f"from {format_time(at_ms)}, in {remaining}"


def _run(
    output: OutputFormat,
    command: ReprocessOptions,
    job: Job,
    options: ReadOptions,
    folder: OutputFolder,
    target: JobTarget | None,
) -> int:
    """Run the job, show its result, and return the number of parked messages."""
    from ....spark.reprocess.run import run_job
    from ....spark.session import local_session
    from ...java import find_java

    java_home = find_java().path
    with _progress_bars(folder, is_visible=output is OutputFormat.TABLE) as (add_bars, show_bars):

        def start_spark() -> Any:  # a session; only `spark/` may import pyspark
            with showing("starting Spark"):
                session = local_session(java_home=java_home, cores=os.cpu_count() or 1)
            show_bars()
            return session

        manifest = run_job(
            start_spark,
            job,
            options,
            folder,
            to=target,
            handover_ms=command.handover_ms,
            accept_code=command.accept_code,
            park=command.park,
            planned=add_bars,
        )
    if output is not OutputFormat.TABLE:
        show_data(output, manifest)
        return manifest.parked
    show_line(
        f"{manifest.job}: {manifest.rows_in} messages of {manifest.subject} made "
        f"{manifest.rows_out} rows in {len(manifest.pieces)} pieces, by {manifest.code}"
    )
    for code, count in Counter(piece.code for piece in manifest.pieces if piece.code).items():
        show_line(f"{counted(count, 'piece')} of these by {code}")
    if line := folder.describe_parked(manifest):
        show_line(line)
    if manifest.output and command.hidden:
        show_line(f"the rows are in {manifest.output.hidden}, hidden")
        if command.to == command.source:
            show_line(
                f"keylane subject publish {command.hidden} {command.to} --replace --groups-from "
                f"{folder.path}"
            )
    elif manifest.output:
        show_line(f"the rows are published in {command.to}")
    show_line(f"a group can continue after them with --start manifest:{folder.path}")
    return manifest.parked


@contextmanager
def _progress_bars(
    folder: OutputFolder, *, is_visible: bool
) -> Iterator[tuple[Callable[[JobPlan], None], Callable[[], None]]]:
    """Show a progress bar per partition, updated from the files in the folder. Yields a function
    that adds the bars for a plan, and one that begins to show them.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    stopped = threading.Event()
    progress = Progress(*columns, disable=not is_visible)
    bars: dict[int, object] = {}

    def add_bars(plan: JobPlan) -> None:
        for each in plan.manifest.ranges:
            bars[each.partition_id] = progress.add_task(
                f"partition {each.partition_id}", total=each.end - each.start
            )

    def update_bars() -> None:
        done_rows = Counter[int]()
        for partition_id, rows in folder.done_ranges():
            done_rows[partition_id] += rows
        for partition_id, bar in list(bars.items()):
            progress.update(bar, completed=done_rows[partition_id])  # type: ignore[arg-type]

    def show_bars() -> None:
        for bar in bars.values():
            progress.reset(bar)  # type: ignore[arg-type]  # its time begins now
        progress.start()

    def follow_folder() -> None:
        while not stopped.wait(POLL_SECONDS):
            update_bars()

    thread = threading.Thread(target=follow_folder, name="progress", daemon=True)
    thread.start()
    try:
        yield add_bars, show_bars
    finally:
        stopped.set()
        thread.join()
        update_bars()
        if progress.live.is_started:
            progress.stop()


def _compare(output: OutputFormat, command: ReprocessOptions, folder: OutputFolder) -> bool:
    """Show where the two outputs differ. Return True if they do."""
    from ....spark.reprocess.folder import OutputFolder
    from ....spark.reprocess.outputs import SUBJECT, compare_outputs, read_complete_manifest

    with showing(f"comparing with {command.compare}"):
        differences = compare_outputs(command.meta, command.compare, folder)
    if output is not OutputFormat.TABLE:
        show_data(
            output,
            [
                DifferenceFields(
                    partition_id=each.partition_id,
                    key=_key_text(each.key),
                    first_offset=each.first_offset,
                    rows=each.rows,
                )
                for each in differences
            ],
        )
    elif not differences:
        show_line(f"the output equals that of {command.compare}")
    else:
        rows = [
            (each.partition_id, _key_text(each.key), each.first_offset, each.rows)
            for each in differences[:DIFFERENCES_SHOWN]
        ]
        title = f"{counted(len(differences), 'key')} with other rows than in {command.compare}"
        show_table(make_table(title, ("id#", "key", "first offset#", "rows#"), rows))
    compared = [] if command.compare.startswith(SUBJECT) else [OutputFolder(command.compare)]
    for each in (*compared, folder) if output is OutputFormat.TABLE else ():
        if line := each.describe_parked(read_complete_manifest(each)):
            show_line(line)
    return bool(differences)


def _key_text(key: object) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)

"""`keylane spark reprocess`: plans and runs a job, with a progress bar for each partition, and
compares its output.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....protocol.clock import SystemClock
from ....protocol.errors import ConfigError, KeylaneError
from ....protocol.scheduled.deliver_at import shown
from ....protocol.text import counted
from ...options import OutputFormat
from ...screen import make_table, show_error, show_json, show_line, show_table

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
class Asked:
    """The options of the command line."""

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


def reprocess(output: OutputFormat, asked: Asked) -> int:
    """Run the command, and return its exit status: 0, 1 after an error, 2 if outputs differ, 3 if
    messages are parked.
    """
    from ....spark.failure import error_in

    try:
        return _reprocess(output, asked)
    except KeylaneError as error:
        show_error(error, output)
    except Exception as error:
        ours = error_in(str(error))
        if ours is None:
            raise
        show_error(ours, output)
    return 1


def _reprocess(output: OutputFormat, asked: Asked) -> int:
    from ....protocol.ids import check_name
    from ....spark.options import parse_options
    from ....spark.reprocess.folder import OutputFolder
    from ....spark.reprocess.job import load_job
    from ....spark.reprocess.run import plan_job

    where, to = _goal(asked)
    sys.path.insert(0, "")  # like `python -m`: jobs in the current folder are found
    job = load_job(asked.job, name=asked.name, version=asked.code_version)
    check_name("job", job.name)
    folder = OutputFolder(where)
    options = parse_options(
        {
            "meta": asked.meta,
            "subject": asked.source,
            "start": asked.start,
            "end": asked.end,
            "columns": "partition,offset,key,value,timestamp,properties",
        },
        now_ms=SystemClock.wall_ms(),
    )
    if len(options.subjects) != 1:
        raise ConfigError(f"--from is one subject, not {asked.source!r:.80}")
    if asked.plan:
        hidden = to.output() if to else None
        planned = plan_job(job, options, folder, output=hidden, accept_code=asked.accept_code)
        _show_plan(output, planned)
        return 0
    if asked.compare:
        _check_older(asked.compare)
    parked = _run(output, asked, job, options, folder, to)
    differs = _compare(output, asked, folder) if asked.compare else False
    return 2 if differs else 3 if parked else 0


def _check_older(compare: str) -> None:
    """Raise the errors of the comparison before the job runs."""
    from ....protocol.ids import check_name
    from ....spark.reprocess.folder import OutputFolder
    from ....spark.reprocess.outputs import SUBJECT, complete

    if compare.startswith(SUBJECT):
        check_name("subject", compare.removeprefix(SUBJECT))
    else:
        complete(OutputFolder(compare))


def _goal(asked: Asked) -> tuple[str, JobTarget | None]:
    """
    Return the output folder and the target subject, which is None for Parquet.

    Raises:
        ConfigError: the options conflict.
    """
    from ....spark.reprocess.target import JobTarget
    from ....spark.writing.job import parse_write_options

    if asked.to.startswith(PARQUET):
        if asked.to == PARQUET:
            raise ConfigError(f"--to is parquet:DIR or a subject, not {asked.to!r:.80}")
        if asked.folder or asked.partitions or asked.hidden:
            raise ConfigError("--folder, --partitions and --hidden go with --to SUBJECT")
        return asked.to.removeprefix(PARQUET), None
    if not asked.folder:
        raise ConfigError(
            "--to SUBJECT needs --folder DIR, where the plan and the manifest are kept"
        )
    if asked.to == asked.source and not asked.hidden:
        raise ConfigError(
            "--to the subject itself would store the rows after the messages of which they are "
            "made: with --hidden they stay hidden, and `keylane subject publish HIDDEN SUBJECT "
            "--replace --groups-from DIR` replaces the messages with them"
        )
    given = {
        "meta": asked.meta,
        "subject": asked.to,
        "publish": "false" if asked.hidden else "true",
    }
    given |= {"partitions": str(asked.partitions)} if asked.partitions else {}
    given |= {"hidden": asked.hidden} if asked.hidden else {}
    return asked.folder, JobTarget(options=parse_write_options(given))


def _show_plan(output: OutputFormat, plan: JobPlan) -> None:
    cores = os.cpu_count() or 1
    facts = {
        "rows": plan.rows,
        "mb": round(plan.size_bytes / 1e6, 1),
        "tasks": plan.tasks,
        "minutes": round(plan.minutes(cores), 1),
    }
    left = Counter[int]()
    for piece in plan.missing:
        left[piece.partition_id] += piece.rows
    removed = {piece.partition_id: piece.removed_from_ms for piece in plan.missing}
    if output is OutputFormat.JSON:
        more = {"missing_rows": dict(left), "removed_from_ms": removed}
        show_json({**facts, "ranges": plan.manifest.ranges, **more})
        return
    rows = [
        (
            each.partition_id,
            each.start,
            each.end,
            each.end - each.start,
            left[each.partition_id],
            removal_text(removed.get(each.partition_id), now_ms=SystemClock.wall_ms()),
        )
        for each in plan.manifest.ranges
    ]
    title = f"{plan.manifest.job} of {plan.manifest.subject}, {plan.manifest.code}"
    names = ("id#", "start#", "end#", "rows#", "missing rows#", "removed from")
    show_table(make_table(title, names, rows))
    show_line(
        f"to do: {facts['rows']} rows, {facts['mb']} MB, {facts['tasks']} tasks, about "
        f"{facts['minutes']} minutes with {cores} cores; the job protects their messages from "
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
    """Return when retention begins to remove messages, as text for an operator."""
    if at_ms is None:
        return "-"
    if at_ms <= now_ms:
        return "now"
    minutes = (at_ms - now_ms) // 60_000
    days, hours = minutes // 1_440, minutes // 60 % 24
    left = f"{days} d {hours} h" if days else f"{hours} h {minutes % 60} min"
    return f"from {shown(at_ms)}, in {left}"


def _run(
    output: OutputFormat,
    asked: Asked,
    job: Job,
    options: ReadOptions,
    folder: OutputFolder,
    to: JobTarget | None,
) -> int:
    """Run the job, show its result, and return the number of parked messages."""
    from ....spark.reprocess.run import run_job
    from ....spark.session import local_session
    from ...java import find_java

    spark = local_session(java_home=find_java().path, cores=os.cpu_count() or 1)
    with _bars(folder, shown=output is OutputFormat.TABLE) as begin:
        manifest = run_job(
            spark,
            job,
            options,
            folder,
            to=to,
            handover_ms=asked.handover_ms,
            accept_code=asked.accept_code,
            park=asked.park,
            planned=begin,
        )
    if output is OutputFormat.JSON:
        show_json(manifest)
        return manifest.parked
    show_line(
        f"{manifest.job}: {manifest.rows_in} messages of {manifest.subject} made "
        f"{manifest.rows_out} rows in {len(manifest.pieces)} pieces, by {manifest.code}"
    )
    for code, count in Counter(piece.code for piece in manifest.pieces if piece.code).items():
        show_line(f"{counted(count, 'piece')} of these by {code}")
    if line := folder.parked_text(manifest):
        show_line(line)
    if manifest.output and asked.hidden:
        show_line(f"the rows are in {manifest.output.hidden}, hidden")
        if asked.to == asked.source:
            show_line(
                f"keylane subject publish {asked.hidden} {asked.to} --replace --groups-from "
                f"{folder.path}"
            )
    elif manifest.output:
        show_line(f"the rows are published in {asked.to}")
    show_line(f"a group can continue after them with --start manifest:{folder.path}")
    return manifest.parked


@contextmanager
def _bars(folder: OutputFolder, *, shown: bool) -> Iterator[Callable[[JobPlan], None]]:
    """Show a bar for each partition, which follows the files in the folder; yield a function that
    creates the bars for a plan.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    ended = threading.Event()
    with Progress(*columns, disable=not shown) as progress:
        bars: dict[int, object] = {}

        def begin(plan: JobPlan) -> None:
            for each in plan.manifest.ranges:
                bars[each.partition_id] = progress.add_task(
                    f"partition {each.partition_id}", total=each.end - each.start
                )

        def move() -> None:
            done = Counter[int]()
            for partition_id, rows in folder.done_ranges():
                done[partition_id] += rows
            for partition_id, bar in list(bars.items()):
                progress.update(bar, completed=done[partition_id])  # type: ignore[arg-type]

        def follow() -> None:
            while not ended.wait(POLL_SECONDS):
                move()

        follower = threading.Thread(target=follow, name="progress", daemon=True)
        follower.start()
        try:
            yield begin
        finally:
            ended.set()
            follower.join()
            move()


def _compare(output: OutputFormat, asked: Asked, folder: OutputFolder) -> bool:
    """Show where two outputs differ, and return True if they do."""
    from ....spark.reprocess.folder import OutputFolder
    from ....spark.reprocess.outputs import SUBJECT, compare_outputs, complete

    unlike = compare_outputs(asked.meta, asked.compare, folder)
    if output is OutputFormat.JSON:
        show_json(
            [
                {
                    "partition_id": each.partition_id,
                    "key": _text(each.key),
                    "first_offset": each.first_offset,
                    "rows": each.rows,
                }
                for each in unlike
            ]
        )
    elif not unlike:
        show_line(f"the output equals that of {asked.compare}")
    else:
        rows = [
            (each.partition_id, _text(each.key), each.first_offset, each.rows)
            for each in unlike[:DIFFERENCES_SHOWN]
        ]
        title = f"{counted(len(unlike), 'key')} with other rows than in {asked.compare}"
        show_table(make_table(title, ("id#", "key", "first offset#", "rows#"), rows))
    older = [] if asked.compare.startswith(SUBJECT) else [OutputFolder(asked.compare)]
    for each in (*older, folder) if output is OutputFormat.TABLE else ():
        if line := each.parked_text(complete(each)):
            show_line(line)
    return bool(unlike)


def _text(key: object) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)

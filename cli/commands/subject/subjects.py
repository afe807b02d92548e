"""`keylane subject` create, set, list, describe, history and publish."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from ....admin import (
    Admin,
    OperationView,
    PartitionDescription,
    PartitionHistory,
    Retention,
    SubjectDescription,
    SubjectHistory,
    SubjectSummary,
    SubjectView,
)
from ....protocol.errors import ConfigError, JobError
from ....protocol.limits import MESSAGE_BYTES_MAX
from ....protocol.operations import OperationState
from ....protocol.routing import OrderStrategy, Partition, PartitionState
from ....protocol.text import counted
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import make_table, show_json, show_left_out, show_line, show_table
from ..operations import change_partitions

COLUMNS = ("id#", "partition", "logical", "broker group", "state", "address")


def show_created(view: SubjectView) -> None:
    """Show the partitions of a new subject."""
    ordered = sorted(view.route.open_partitions(), key=lambda partition: partition.range_start)
    title = _title(view, view.route.version)
    show_table(make_table(title, COLUMNS, [_cells(partition) for partition in ordered]))
    sealed = len(view.route.partitions) - len(ordered)
    if sealed:
        shown = f"keylane subject describe {view.subject} --all"
        show_line(f"… and {counted(sealed, 'sealed partition')}: {shown}")


def set_subject(
    meta: str,
    output: OutputFormat,
    subject: str,
    *,
    order_strategy: OrderStrategy | None,
    retention: Retention | None,
    message_bytes_max: int | None,
    dry_run: bool,
    wait: bool,
) -> None:
    """Change settings of a subject; show each before and after, and the partitions that continue
    it.
    """

    async def begin(admin: Admin) -> OperationView:
        change = await admin.set_subject(
            subject,
            order_strategy=order_strategy,
            retention=retention,
            message_bytes_max=message_bytes_max,
            dry_run=dry_run,
        )
        for name, before in change.before.items():
            now = change.after[name]
            changed = before if now == before else f"{before} -> {now}"
            show_line(f"{subject}: {name} {changed}", errors=output is OutputFormat.JSON)
        return change.operation

    change_partitions(meta, output, begin, planned=dry_run, wait=wait)


def show_subjects(subjects: Sequence[SubjectSummary]) -> None:
    """Show subjects, and for hidden ones where they will be published."""
    rows = [
        (summary.subject, summary.order_strategy, summary.partitions, summary.route_version)
        for summary in subjects
    ]
    columns = ("subject", "strategy", "partitions#", "route version#")
    show_table(make_table("subjects" if rows else "no subjects yet", columns, rows))
    for summary in subjects:
        if summary.hidden_for:
            show_line(
                f"{summary.subject}: hidden, to be published in {summary.hidden_for}"
                f"{_expiry(summary.expires_in_ms)}"
            )
        if summary.problem:
            show_line(f"{summary.subject}: {summary.problem}")


def _expiry(left_ms: int | None) -> str:
    if left_ms is None:
        return ""
    minutes = left_ms // 60_000
    left = f"{minutes // 60} h" if minutes >= 120 else f"{minutes} min"
    return f"; deleted in {left} unless it is filled or published"


async def describe_subject(
    meta: str, output: OutputFormat, *, subject: str, all_partitions: bool = False
) -> None:
    """
    Show a subject's partitions: where each is, its range, state and offsets.

    A table leaves out sealed partitions that every group has drained, unless `all_partitions` is
    set.
    """
    undrained: set[int] = set()
    as_json = output is OutputFormat.JSON
    async with open_admin(meta) as admin:
        described = await admin.describe_subject(subject)
        sealed = any(part.state is PartitionState.SEALED for part in described.partitions)
        if sealed and not all_partitions and not as_json:
            undrained = {part.partition_id for part in await admin.undrained(subject)}
    if output is OutputFormat.JSON:
        show_json(described)
        return
    rows = [
        (*_cells(partition), partition.first_offset, partition.next_offset)
        for partition in described.partitions
        if all_partitions or not _is_drained(partition, undrained)
    ]
    title = _title(described, described.route_version)
    show_table(make_table(title, (*COLUMNS, "first#", "next#"), rows))
    show_left_out(len(described.partitions) - len(rows))
    for partition in described.partitions:
        if partition.problem:
            show_line(f"offsets unknown: {partition.problem}")
        for hold in partition.holds:
            show_line(
                f"partition {partition.partition_id}: job {hold.job} holds messages from offset "
                f"{hold.from_offset} on, for {hold.left_ms // 1000} s more unless it renews the "
                "hold"
            )


def _is_drained(partition: PartitionDescription, undrained: Collection[int]) -> bool:
    """Return True if the partition is sealed, and no group and no job needs it."""
    return (
        partition.state is PartitionState.SEALED
        and partition.partition_id not in undrained
        and not partition.problem
        and not partition.holds
    )


def _cells(partition: Partition | PartitionDescription) -> Sequence[object]:
    return (
        partition.partition_id,
        partition.name,
        f"[{partition.range_start}, {partition.range_end})",
        partition.broker_group,
        partition.state,
        partition.address,
    )


def _title(shown: SubjectView | SubjectDescription, version: int) -> str:
    words = [shown.order_strategy.value]
    if shown.static:
        words.append("static")
    if shown.retention is not Retention.ACKED:
        words.append(f"retention {shown.retention}")
    if shown.message_bytes_max < MESSAGE_BYTES_MAX:
        words.append(f"messages of at most {shown.message_bytes_max} bytes")
    return f"{shown.subject}: {', '.join(words)}, route version {version}"


def show_history(history: SubjectHistory) -> None:
    """Show every partition that a subject ever had."""
    show_line(f"{history.subject}: route version {history.route_version}")
    for line in lineage(history.partitions):
        show_line(line)


def lineage(partitions: list[PartitionHistory]) -> list[str]:
    """
    Return the lines of the partitions' trees, parents above their children.

    A partition with several parents is drawn under the oldest of them; the others refer to it.
    """
    children: dict[int, list[PartitionHistory]] = {}
    for entry in partitions:
        for parent in entry.partition.parents:
            children.setdefault(parent, []).append(entry)
    drawn: list[str] = []
    roots = [entry for entry in partitions if not entry.partition.parents]
    # A stack of (parent, partition, prefix of its line, prefix of the lines below it).
    left = [
        (0, entry, "", "")
        for entry in sorted(roots, key=lambda entry: entry.partition.range_start, reverse=True)
    ]
    while left:
        above, entry, first, rest = left.pop()
        partition = entry.partition
        if above and min(partition.parents) != above:
            drawn.append(f"{first}{partition.name}, shown elsewhere")
            continue
        drawn.append(f"{first}{_described(entry)}")
        below = children.get(partition.partition_id, [])
        for child in reversed(below):
            branch, under = ("└─ ", "   ") if child is below[-1] else ("├─ ", "│  ")
            left.append((int(partition.partition_id), child, rest + branch, rest + under))
    return drawn


def _described(entry: PartitionHistory) -> str:
    partition = entry.partition
    end = "" if entry.end_offset is None else f" at {entry.end_offset}"
    abandoned = ", abandoned" if entry.abandoned else ""
    return (
        f"{partition.name} (id {partition.partition_id}) "
        f"[{partition.range_start}, {partition.range_end}) on {partition.broker_group}: "
        f"{partition.state}{end}{abandoned}"
    )


def show_parked(folder: str) -> None:
    """Show, before a cut-over, which messages it deletes without a row in their place, if any."""
    from ....spark.reprocess.folder import MANIFEST, OutputFolder

    output = OutputFolder(folder)
    manifest = None
    with suppress(JobError):  # the cut-over says so
        manifest = output.read(MANIFEST)
    if manifest is not None and (line := output.parked_text(manifest)):
        show_line(f"{line}; a cut-over deletes them, and no group will get them", errors=True)


async def publish_subject(
    meta: str,
    output: OutputFormat,
    hidden: str,
    subject: str,
    *,
    replace: bool,
    groups_from: str,
    wait: bool,
) -> None:
    """Publish a hidden subject, and show the result."""
    if groups_from and not replace:
        raise ConfigError("--groups-from needs --replace")
    async with open_admin(meta) as admin:
        starts = None
        if groups_from:
            from .cut_over import cut_over

            starts, answer = await cut_over(admin, meta, hidden, subject, groups_from, wait=wait)
        else:
            answer = await admin.publish_subject(hidden, subject, replace=replace, wait=wait)
    if output is OutputFormat.JSON:
        show_json(answer)
    elif answer.state is OperationState.DONE:
        for group, offsets in sorted((starts or {}).items()):
            places = ", ".join(f"{number}: {offset}" for number, offset in sorted(offsets.items()))
            show_line(f"{group} continues at (partition: offset) {places}")
        show_line(f"{hidden} is published in {subject}")
    elif answer.state is OperationState.CANCELED:
        show_line(
            f"the publication of {hidden} in {subject} was canceled: its messages are given up"
        )
    else:
        waits = f": {answer.problem}" if answer.problem else ""
        show_line(f"operation {answer.operation_id} publishes {hidden} in {subject}{waits}")

"""`keylane subject` create, set, list and describe."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ....admin import (
    Admin,
    OperationView,
    PartitionDescription,
    Retention,
    SubjectDescription,
    SubjectSummary,
    SubjectView,
)
from ....protocol.limits import MESSAGE_BYTES_MAX
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

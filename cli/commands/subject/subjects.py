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
from ....protocol.text import counted, format_rate, format_size
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import make_table, show_data, show_line, show_omitted, show_table
from ...status import showing

COLUMNS = ("id#", "partition", "logical", "broker group", "state", "address")


def show_created_subject(view: SubjectView) -> None:
    """Show the open partitions of a new subject."""
    ordered = sorted(view.route.open_partitions(), key=lambda partition: partition.range_start)
    title = _subject_title(view, view.route.version)
    show_table(make_table(title, COLUMNS, [_partition_cells(partition) for partition in ordered]))
    sealed_count = len(view.route.partitions) - len(ordered)
    if sealed_count:
        command = f"keylane subject describe {view.subject} --all"
        show_line(f"… and {counted(sealed_count, 'sealed partition')}: {command}")


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
    """Change settings of a subject. Shows the old and new values, and the new partitions."""

    async def start(admin: Admin) -> OperationView:
        change = await admin.set_subject(
            subject,
            order_strategy=order_strategy,
            retention=retention,
            message_bytes_max=message_bytes_max,
            dry_run=dry_run,
        )
        for name, old_value in change.before.items():
            new_value = change.after[name]
            change_text = old_value if new_value == old_value else f"{old_value} -> {new_value}"
            show_line(f"{subject}: {name} {change_text}", errors=output is not OutputFormat.TABLE)
        return change.operation

    from ..operations import change_partitions

    change_partitions(meta, output, start, planned=dry_run, wait=wait)


def show_subjects(subjects: Sequence[SubjectSummary]) -> None:
    """Show subjects and, for hidden ones, where they will be published."""
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


def _expiry(remaining_ms: int | None) -> str:
    if remaining_ms is None:
        return ""
    minutes = remaining_ms // 60_000
    remaining = f"{minutes // 60} h" if minutes >= 120 else f"{minutes} min"
    return f"; deleted in {remaining} unless it is filled or published"


async def describe_subject(
    meta: str, output: OutputFormat, *, subject: str, all_partitions: bool = False
) -> None:
    """
    Show a subject's partitions with their brokers, ranges, states, offsets, sizes and rates. Names
    hot partitions.

    A table omits sealed partitions that every group has drained, unless `all_partitions` is set.
    """
    undrained: set[int] = set()
    as_json = output is not OutputFormat.TABLE
    async with open_admin(meta) as admin:
        with showing(f"asking the brokers of {subject}"):
            description = await admin.describe_subject(subject, sizes=True)
        sealed = any(
            partition.state is PartitionState.SEALED for partition in description.partitions
        )
        if sealed and not all_partitions and not as_json:
            undrained = {partition.partition_id for partition in await admin.undrained(subject)}
    if output is not OutputFormat.TABLE:
        show_data(output, description)
        return
    rows = [
        (
            *_partition_cells(partition),
            partition.first_offset,
            partition.next_offset,
            format_size(partition.stored_bytes),
            format_rate(partition.messages_per_s),
            format_size(partition.bytes_per_s),
        )
        for partition in description.partitions
        if all_partitions or not _is_drained(partition, undrained)
    ]
    title = _subject_title(description, description.route_version)
    figures = ("first#", "next#", "stored#", "messages/s#", "bytes/s#")
    show_table(make_table(title, (*COLUMNS, *figures), rows))
    show_omitted(len(description.partitions) - len(rows))
    show_line(_totals_text(description.partitions))
    for partition in description.partitions:
        if partition.problem:
            show_line(f"offsets unknown: {partition.problem}")
        if partition.is_hot:
            show_line(_hot_text(description, partition))
        for hold in partition.holds:
            show_line(
                f"partition {partition.partition_id}: job {hold.job} holds messages from offset "
                f"{hold.from_offset} on, for {hold.left_ms // 1000} s more unless it renews the "
                "hold"
            )


def _totals_text(partitions: Sequence[PartitionDescription]) -> str:
    stored_bytes, messages, size_bytes = (
        sum(getattr(partition, name) or 0 for partition in partitions)
        for name in ("stored_bytes", "messages_per_s", "bytes_per_s")
    )
    return (
        f"stored: about {format_size(stored_bytes)}; {format_rate(messages)} messages/s, "
        f"{format_size(size_bytes)}/s"
    )


def _hot_text(subject: SubjectDescription, partition: PartitionDescription) -> str:
    """Name a hot partition, and say what helps."""
    split = (
        f"keylane subject grow {subject.subject} --queue {partition.queue}"
        if subject.static
        else f"keylane subject split {partition.partition_id}"
    )
    messages, size = format_rate(partition.messages_per_s), format_size(partition.bytes_per_s)
    return (
        f"partition {partition.partition_id} is hot: it stores {messages} messages/s, "
        f"{size}/s, far more than the others. If many keys share it, split it: {split}. A single "
        "hot key cannot be split: let the producers distribute its messages over several keys"
    )


def _is_drained(partition: PartitionDescription, undrained: Collection[int]) -> bool:
    """Return True if the partition is sealed and no longer needed by any group or job."""
    return (
        partition.state is PartitionState.SEALED
        and partition.partition_id not in undrained
        and not partition.problem
        and not partition.holds
    )


def _partition_cells(partition: Partition | PartitionDescription) -> Sequence[object]:
    return (
        partition.partition_id,
        partition.name,
        f"[{partition.range_start}, {partition.range_end})",
        partition.broker_group,
        partition.state,
        partition.address,
    )


def _subject_title(subject: SubjectView | SubjectDescription, version: int) -> str:
    parts = [subject.order_strategy.value]
    if subject.static:
        parts.append("static")
    if subject.retention is not Retention.ACKED:
        parts.append(f"retention {subject.retention}")
    if subject.message_bytes_max < MESSAGE_BYTES_MAX:
        parts.append(f"messages of at most {subject.message_bytes_max} bytes")
    return f"{subject.subject}: {', '.join(parts)}, route version {version}"


def show_history(history: SubjectHistory) -> None:
    """Show every partition that a subject has ever had."""
    show_line(f"{history.subject}: route version {history.route_version}")
    for line in lineage(history.partitions):
        show_line(line)


def lineage(partitions: list[PartitionHistory]) -> list[str]:
    """
    Return lines that draw the partitions as trees, with parents above their children.

    A partition with several parents is drawn below the oldest one; the others refer to it.
    """
    children: dict[int, list[PartitionHistory]] = {}
    for entry in partitions:
        for parent in entry.partition.parents:
            children.setdefault(parent, []).append(entry)
    lines: list[str] = []
    roots = [entry for entry in partitions if not entry.partition.parents]
    # (parent id, partition, prefix of its line, prefix of the lines below it)
    stack = [
        (0, entry, "", "")
        for entry in sorted(roots, key=lambda entry: entry.partition.range_start, reverse=True)
    ]
    while stack:
        parent_id, entry, prefix, child_prefix = stack.pop()
        partition = entry.partition
        if parent_id and min(partition.parents) != parent_id:
            lines.append(f"{prefix}{partition.name}, shown elsewhere")
            continue
        lines.append(f"{prefix}{_describe_entry(entry)}")
        child_entries = children.get(partition.partition_id, [])
        for child in reversed(child_entries):
            branch, extension = ("└─ ", "   ") if child is child_entries[-1] else ("├─ ", "│  ")
            stack.append(
                (
                    int(partition.partition_id),
                    child,
                    child_prefix + branch,
                    child_prefix + extension,
                )
            )
    return lines


def _describe_entry(entry: PartitionHistory) -> str:
    partition = entry.partition
    end = "" if entry.end_offset is None else f" at {entry.end_offset}"
    abandoned = ", abandoned" if entry.abandoned else ""
    return (
        f"{partition.name} (id {partition.partition_id}) "
        f"[{partition.range_start}, {partition.range_end}) on {partition.broker_group}: "
        f"{partition.state}{end}{abandoned}"
    )


def show_parked(folder: str) -> None:
    """Warn before a cut-over about parked messages, which it deletes without replacing them."""
    from ....spark.reprocess.folder import MANIFEST, OutputFolder

    output = OutputFolder(folder)
    manifest = None
    with suppress(JobError):  # the cut-over will report it
        manifest = output.read(MANIFEST)
    if manifest is not None and (line := output.describe_parked(manifest)):
        show_line(f"{line}; a cut-over deletes them, and no group will get them", errors=True)


async def publish_subject(
    meta: str,
    output: OutputFormat,
    hidden_subject: str,
    subject: str,
    *,
    replace: bool,
    groups_from: str,
    wait: bool,
) -> None:
    """Publish a hidden subject and show the result."""
    if groups_from and not replace:
        raise ConfigError("--groups-from needs --replace")
    async with open_admin(meta) as admin:
        starts = None
        if groups_from:
            from .cut_over import cut_over

            with showing(f"cutting the groups of {subject} over to {hidden_subject}"):
                starts, publication = await cut_over(
                    admin, meta, hidden_subject, subject, groups_from, wait=wait
                )
        else:
            with showing(f"publishing {hidden_subject} in {subject}"):
                publication = await admin.publish_subject(
                    hidden_subject, subject, replace=replace, wait=wait
                )
    if output is not OutputFormat.TABLE:
        show_data(output, publication)
    elif publication.state is OperationState.DONE:
        for group, offsets in sorted((starts or {}).items()):
            offsets_text = ", ".join(
                f"{number}: {offset}" for number, offset in sorted(offsets.items())
            )
            show_line(f"{group} continues at (partition: offset) {offsets_text}")
        show_line(f"{hidden_subject} is published in {subject}")
    elif publication.state is OperationState.CANCELED:
        show_line(
            f"the publication of {hidden_subject} in {subject} was canceled: its messages are "
            "given up"
        )
    else:
        waiting = f": {publication.problem}" if publication.problem else ""
        show_line(
            f"operation {publication.operation_id} publishes {hidden_subject} in {subject}{waiting}"
        )

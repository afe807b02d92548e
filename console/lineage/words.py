"""What the picture says in words: changes, partitions, groups, operations. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ...protocol.operations import OperationView, StepAction
from ...protocol.routing import PartitionState
from ...protocol.text import counted
from .bands import Band, Bands
from .progress import acked_share, lag_on
from .sheet import Sheet, short_name


def say_changes(bands: Bands) -> list[str]:
    """Return what happened at each moment, in a few words."""
    words: list[str] = []
    count = 0
    for started, ended in bands.by_moment():
        before, count = count, count + len(started) - len(ended)
        if not words:
            words.append(counted(count, "partition"))
        elif count != before:
            words.append(f"{before} → {count}")
        else:
            words.append(_say_move(started, ended))
    return words


def _say_move(started: Sequence[Band], ended: Sequence[Band]) -> str:
    broker_groups = {
        (band.partition.range_start, band.partition.range_end): band.partition.broker_group
        for band in ended
    }
    moved = [
        band.partition
        for band in started
        if broker_groups.get((band.partition.range_start, band.partition.range_end))
        not in {None, band.partition.broker_group}
    ]
    targets = {partition.broker_group for partition in moved}
    if not moved:
        return f"{len(started)} continued"
    what = short_name(moved[0]) if len(moved) == 1 else str(len(moved))
    return f"{what} to {targets.pop()}" if len(targets) == 1 else f"{what} moved"


def _say_state(band: Band) -> str:
    if band.entry.lost:
        return "lost with its disk"
    if band.partition.state is PartitionState.EXPIRED:
        return "expired, its messages are removed"
    if band.partition.state is PartitionState.OPEN:
        return "open"
    return "sealed without its broker" if band.entry.abandoned else "sealed"


def say_band(sheet: Sheet, band: Band) -> str:
    """Return what is known of a partition, and which groups have not acked all of it."""
    partition = band.partition
    count = sheet.messages_in(band)
    messages = "" if count is None else f", {say_count(count, 'message')}"
    since = sheet.times[band.start] or "an unknown time"
    until = "now" if band.end is None else sheet.times[band.end] or "an unknown time"
    words = (
        f"{short_name(partition)} (id {partition.partition_id}) on {partition.broker_group}, "
        f"{_say_state(band)}{messages}; logical partitions {partition.range_start} to "
        f"{partition.range_end - 1}, from {since} to {until}"
    )
    description = sheet.descriptions.get(partition.partition_id)
    if description is None:
        return words
    if description.problem:
        words += f"; {description.problem}"
    for group in sheet.facts.groups:
        share = acked_share(band, description, group)
        if share is not None and share < 1:
            words += f"; {group} has acked {100 * share:.0f} %"
    return words


def say_count(count: int, noun: str) -> str:
    """Return a count with its noun: "1,024 messages"."""
    return counted(count, noun).replace(str(count), f"{count:,}", 1)


def summary_of(sheet: Sheet) -> str:
    """Return what the picture shows, in words."""
    changes = [
        f"{time or 'at an unknown time'}: {change}"
        for time, change in zip(sheet.times, say_changes(sheet.bands), strict=False)
    ]
    open_bands = [band for band in sheet.bands.bands if band.end is None]
    broker_groups = sorted({band.partition.broker_group for band in open_bands})
    return "; ".join(changes[-20:]) + (
        f". Now {counted(len(open_bands), 'open partition')} on {', '.join(broker_groups)}. "
        + " ".join(f"{say_group(sheet, group)}." for group in sheet.facts.groups)
        + "".join(f" There is {say_operation(each)}." for each in sheet.facts.operations)
    )


def say_group(sheet: Sheet, group: str) -> str:
    """Return how far a group is behind."""
    lags = [lag_on(each, group) for each in sheet.descriptions.values()]
    total = sum(lag or 0 for lag in lags)
    behind, unknown = sum(bool(lag) for lag in lags), lags.count(None)
    words = f"{group} has acked everything"
    if total:
        at_least = "at least " if unknown else ""
        words = (
            f"{group} is {at_least}{say_count(total, 'message')} behind, in "
            f"{counted(behind, 'partition')}"
        )
    elif unknown == len(lags) > 0:
        return f"how far {group} has read is not known (dotted)"
    elif unknown:
        words += f" on {len(lags) - unknown} of {counted(len(lags), 'partition')}"
    if unknown:
        words += f"; of the other{'s' if unknown > 1 else ''} it is not known (dotted)"
    return words


def say_operation(operation: OperationView) -> str:
    """Return the progress of an operation, and the reason why it waits."""
    seals = [step for step in operation.steps if step.action is StepAction.SEAL]
    done = sum(step.done for step in seals)
    words = f"operation {operation.operation_id} ({operation.kind}) in state {operation.state}"
    if seals:
        words += f", {done} of {counted(len(seals), 'partition')} sealed"
    return f"{words}; it waits: {operation.problem}" if operation.problem else words

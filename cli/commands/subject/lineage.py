"""`keylane subject history`: draws every partition that a subject ever had, as trees."""

from __future__ import annotations

from ....admin import PartitionHistory, SubjectHistory
from ...screen import show_line


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

"""`keylane subject history`: every partition a subject ever had, drawn as trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..options import META_DEFAULT, MetaOption, OutputFormat, OutputOption, SubjectArgument

if TYPE_CHECKING:
    from ...protocol.operations import PartitionHistory


def history(
    subject: SubjectArgument,
    meta: MetaOption = META_DEFAULT,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Draw the lineage of a subject's partitions: which continues which."""
    from ..screen import run

    run(output, _show_history(meta, output, subject))


async def _show_history(meta: str, output: OutputFormat, subject: str) -> None:
    from ...protocol.ids import check_name
    from ..connection import connect
    from ..screen import show_json, show_line

    check_name("subject", subject)
    async with connect(meta) as (client, _network):
        found = await client.history(subject)
    if output is OutputFormat.JSON:
        show_json(found)
        return
    show_line(f"{found.subject}: route version {found.route_version}")
    for line in lineage(found.partitions):
        show_line(line)


def lineage(partitions: list[PartitionHistory]) -> list[str]:
    """
    The partitions as trees, parents above their children.

    A partition with several parents stands under the oldest of them; the others name it.
    """
    children: dict[int, list[PartitionHistory]] = {}
    for one in partitions:
        for parent in one.partition.parents:
            children.setdefault(parent, []).append(one)
    drawn: list[str] = []
    roots = [one for one in partitions if not one.partition.parents]
    # What is to be drawn, the next one last: who it stands under, itself, what its line and those below it begin with.
    left = [
        (0, one, "", "")
        for one in sorted(roots, key=lambda one: one.partition.range_start, reverse=True)
    ]
    while left:
        above, one, first, rest = left.pop()
        partition = one.partition
        if above and min(partition.parents) != above:
            drawn.append(f"{first}{partition.name}, drawn once, elsewhere")
            continue
        drawn.append(f"{first}{_described(one)}")
        below = children.get(partition.partition_id, [])
        for child in reversed(below):
            branch, under = ("└─ ", "   ") if child is below[-1] else ("├─ ", "│  ")
            left.append((int(partition.partition_id), child, rest + branch, rest + under))
    return drawn


def _described(one: PartitionHistory) -> str:
    partition = one.partition
    end = "" if one.end_offset is None else f" at {one.end_offset}"
    abandoned = ", abandoned" if one.abandoned else ""
    return (
        f"{partition.name} (id {partition.partition_id}) "
        f"[{partition.range_start}, {partition.range_end}) on {partition.broker_group}: "
        f"{partition.state}{end}{abandoned}"
    )

"""Finds where a stream starts that continues after a backfill.

    start="manifest:DIR" ─▶ a partition of the backfill: the backfill's end
                            a partition that was opened later: its first message
                            a partition of rows that replace messages in the backfill: its end

Invariants
    Messages that were stored after the backfill but removed before the stream read them are
    reported as lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...arrow.selection import ReadBound, ReadOptions
from ...protocol.errors import JobError, Reason
from ...protocol.reprocess.manifest import build_group_start
from ...protocol.reprocess.replaced import ends_behind_rows
from ..reprocess.folder import MANIFEST, OutputFolder
from .batches import LostRange
from .lineage import View


def resolve_backfill_start(options: ReadOptions) -> ReadOptions:
    """
    If the start names a backfill, replace it with the ends of the backfill. Return other options
    unchanged.

    This blocks.

    Raises:
        JobError: there is no manifest, it is incomplete, or it belongs to another subject.
    """
    if not options.start.manifest:
        return options
    (subject,) = options.subjects
    folder = OutputFolder(options.start.manifest)
    manifest = folder.read(MANIFEST)
    if manifest is None:
        raise JobError(Reason.MANIFEST, f"{folder.path} has no manifest", path=str(folder.path))
    ends = build_group_start(manifest, subject=subject, where=str(folder.path)).cursors or {}
    return replace(options, start=replace(options.start, by_partition=ends))


def rows_to_skip(view: View, start: ReadBound) -> dict[int, int]:
    """
    Return the ends of the partitions whose rows replace messages in the backfill, by partition id.

    Raises:
        JobError: a partition also has rows that replace other messages.
    """
    if not start.manifest:
        return {}
    lineage = view.lineage
    ends = {partition_id: view.end_of(partition_id) for partition_id in lineage.branches}
    cursors = {
        partition_id: end
        for partition_id, end in start.by_partition.items()
        if partition_id in ends and isinstance(end, int)
    }
    return ends_behind_rows(lineage.replaced, lineage.parents, ends, cursors)


def lost_after_start(view: View, start: ReadBound) -> Iterator[LostRange]:
    """Yield the ranges that the start requests by offset, from a backfill or the option, but whose
    partitions have been removed.
    """
    named_ids = start.by_partition.keys()
    replaced = frozenset().union(*view.lineage.replaced.values()) if start.manifest else frozenset()
    for partition_id, branch in view.lineage.branches.items():
        # A partition that opened after the backfill continues one that is in the backfill.
        is_requested = partition_id in named_ids or (
            start.manifest and named_ids & view.lineage.ancestors(partition_id)
        )
        if (
            not branch.is_gone or not is_requested or partition_id in replaced
        ):  # other rows replace its messages
            continue
        start_offset = start.by_partition.get(partition_id, 0)
        # A time or a group's cursor cannot be resolved in a removed partition.
        if isinstance(start_offset, int) and (branch.end is None or start_offset < branch.end):
            yield LostRange(partition_id, start_offset, branch.end)

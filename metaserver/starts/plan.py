"""Plans the offsets at which a new consumer group starts on each partition. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...protocol.errors import InvalidRequestError, OffsetOutOfRangeError
from ...protocol.groups import GroupStart, StartAt
from ...protocol.operations import PartitionHistory
from ...protocol.progress import ResetGroup, ResetTo
from ...protocol.reprocess.replaced import ends_behind_rows, replaced_by_rows
from ..resets.cursors import PartitionOffsets, compute_cursors


def check_start(start: GroupStart) -> None:
    """Check that a start has a time or cursors if, and only if, its kind requires them. Raises
    InvalidRequestError.
    """
    if (start.at in {StartAt.TIME, StartAt.CURSORS}) != (start.at_ms is not None):
        raise InvalidRequestError("at_ms goes with at = time or cursors, and only with them")
    if (start.at is StartAt.CURSORS) != bool(start.cursors):
        raise InvalidRequestError("cursors go with at = cursors, and only with it")


def compute_start_cursors(
    start: GroupStart,
    all_offsets: Sequence[PartitionOffsets],
    *,
    static: bool,
    expired_ends: Mapping[int, int | None] | None = None,
    history: Sequence[PartitionHistory] = (),
) -> dict[int, int]:
    """
    Return a dict that maps each partition id to the offset of the first message that the group
    reads. An empty dict means the first message of each partition.

    If brokers have already seen tokens of the group, it is not new: the database has lost it, and
    it continues where it was.

    Args:
        expired_ends: maps the id of each partition whose data is gone to its end offset.
        history: all partitions the subject has ever had; only needed for a start at cursors.

    Raises:
        PartitionUnknownError: a cursor refers to a partition that the subject never had.
        JobError: a publication replaced messages on both sides of a cursor.
        OffsetOutOfRangeError: messages after a cursor have been removed, or a cursor is beyond the
            end of its partition.
    """
    if start.at is StartAt.EARLIEST or any(offsets.fence for offsets in all_offsets):
        return {}
    if start.at is StartAt.CURSORS:
        return _backfill_cursors(
            start.cursors or {}, all_offsets, expired_ends or {}, history, static=static
        )
    request = ResetGroup(to=ResetTo(start.at.value), at_ms=start.at_ms)
    return compute_cursors(request, all_offsets, static=static)


def _backfill_cursors(
    cursors: Mapping[int, int],
    all_offsets: Sequence[PartitionOffsets],
    expired_ends: Mapping[int, int | None],
    history: Sequence[PartitionHistory],
    *,
    static: bool,
) -> dict[int, int]:
    """Like `compute_start_cursors`, but for a group that continues where a backfill ended, so that
    no message in between is missing or repeated.
    """
    parents = {int(entry.partition.partition_id): entry.partition.parents for entry in history}
    end_offsets = {int(entry.partition.partition_id): entry.end_offset for entry in history}
    ids_replaced_by_rows = replaced_by_rows(parents)
    newest_id = max(cursors)
    cursors = {**cursors, **ends_behind_rows(ids_replaced_by_rows, parents, end_offsets, cursors)}
    cursors_of_later = {
        partition_id: 0
        for partition_id, end in expired_ends.items()
        if end and partition_id > newest_id
    }
    ids_with_rows = frozenset().union(*ids_replaced_by_rows.values())
    for partition_id, cursor in sorted({**cursors_of_later, **cursors}.items()):
        if partition_id in ids_with_rows:
            continue
        if partition_id in expired_ends and cursor != expired_ends[partition_id]:
            raise OffsetOutOfRangeError(
                f"partition {partition_id} has expired, and the messages from offset "
                f"{cursor} on with it",
                partition_id=partition_id,
                offset=cursor,
            )
    later_offsets = [
        offsets for offsets in all_offsets if offsets.partition.partition_id > newest_id
    ]
    for offsets in later_offsets:
        if offsets.first_offset and offsets.partition.partition_id not in cursors:
            raise OffsetOutOfRangeError(
                f"retention has removed the first messages of partition "
                f"{offsets.partition.partition_id}, which was opened "
                "after the backfill was planned",
                partition_id=offsets.partition.partition_id,
                offset=0,
                first_offset=offsets.first_offset,
                next_offset=offsets.next_offset,
            )
    stored_cursors = {
        partition_id: cursor
        for partition_id, cursor in cursors.items()
        if partition_id not in expired_ends
    }
    if not stored_cursors:
        return {}
    return compute_cursors(
        ResetGroup(to=ResetTo.CURSORS, cursors=stored_cursors), all_offsets, static=static
    )

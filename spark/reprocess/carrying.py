"""Carries consumer groups over to replacement messages: finds where each group continues in the
rows that replace the messages of a subject. Works on Arrow columns, and does no I/O.

    row: stored at (partition, offset), made of (source partition, source offset)
    group: cursor of each source partition ─▶ in each new partition, the first row made of a message
                                              that the group has not handled

Invariants
    No row is skipped: every row made from an unhandled message is at or after the group's position.
    Rows after the position may be made from handled messages, which are then delivered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...protocol.errors import JobError, Reason
from ...protocol.reprocess.manifest import SOURCE, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOffsets:
    """The offsets `[first, end)` that are stored in a source partition."""

    partition_id: int
    first: int
    end: int


def positions(
    cursors: Mapping[str, Mapping[int, int]],
    batches: Iterable[pa.RecordBatch],
    ends: Mapping[int, int],
) -> dict[str, dict[int, int]]:
    """
    Return where each consumer group continues: the first offset in each new partition whose row was
    made from a message that the group has not handled.

    Args:
        cursors: the offset of the first message that a group has not handled, by consumer group and
            source partition. The group has handled all messages in partitions that are missing.
        batches: the new rows, with the columns partition, offset and properties. The rows of each
            partition are in order.
        ends: the offset after the last row of each new partition.

    Raises:
        JobError: a row does not name the message that it was made from.
    """
    first_offsets = {group: dict(ends) for group in cursors}
    for batch in batches:
        new_partitions, offsets = (
            _to_int64(batch.column("partition")),
            _to_int64(batch.column("offset")),
        )
        source_partitions, source_offsets = parse_sources(batch.column("properties"))
        for group, by_source in cursors.items():
            is_unhandled = np.zeros(len(source_offsets), bool)
            for partition_id, cursor in by_source.items():
                is_unhandled |= (source_partitions == partition_id) & (source_offsets >= cursor)
            for new_partition in np.unique(new_partitions[is_unhandled]).tolist():
                first = int(offsets[is_unhandled & (new_partitions == new_partition)].min())
                first_offsets[group][new_partition] = min(
                    first_offsets[group][new_partition], first
                )
    return first_offsets


def check_manifest_covers(
    manifest: Manifest,
    stored_offsets: Sequence[SourceOffsets],
    cursors: Mapping[str, Mapping[int, int]],
) -> None:
    """
    Check that the rows of a job can replace all messages that are stored.

    Raises:
        JobError: there are messages after the job's ranges, or a group has not handled all messages
            before them.
    """
    ranges = {each.partition_id: each for each in manifest.ranges}
    for each in stored_offsets:
        if each.first >= each.end:
            continue  # retention has removed all messages
        job_range = ranges.get(each.partition_id)
        first_offset, end = (0, 0) if job_range is None else (job_range.start, job_range.end)
        if each.end > end:
            raise JobError(
                Reason.CUT_OVER,
                f"partition {each.partition_id} has {each.end - max(end, each.first)} messages "
                f"from offset {end} on, which are not in the backfill: reprocess the subject to "
                "its latest message, into a new folder and another hidden subject",
                partition_id=each.partition_id,
            )
        for group, by_source in cursors.items():
            cursor = max(by_source.get(each.partition_id, each.end), each.first)
            if cursor < first_offset:
                raise JobError(
                    Reason.CUT_OVER,
                    f"consumer group {group!r} has not handled {first_offset - cursor} messages of "
                    f"partition {each.partition_id}, [{cursor}, {first_offset}), which are not in "
                    "the backfill: let the group continue, or reprocess from an earlier start",
                    partition_id=each.partition_id,
                )


def _to_int64(column: pa.Array) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = column.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def parse_sources(properties: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """
    Return the source partition and the source offset of each row, from its properties.

    Raises:
        JobError: a row has no valid source property.
    """
    if not len(properties):
        empty = np.zeros(0, np.int64)
        return empty, empty
    texts = pc.map_lookup(properties, pa.scalar(SOURCE), "last")
    try:
        if texts.null_count:
            raise pa.ArrowInvalid("it is missing")
        parts = pc.split_pattern(texts, "/")
        pairs = pc.cast(parts.flatten(), pa.int64()).to_numpy(zero_copy_only=False)
        pairs = pairs.reshape(len(texts), 2)
    except (pa.ArrowInvalid, ValueError) as error:
        raise JobError(
            Reason.CUT_OVER,
            f"a row has no usable property {SOURCE}, which names the message it was made of: the "
            f"job has to keep the column offset ({error})",
        ) from None
    return pairs[:, 0], pairs[:, 1]

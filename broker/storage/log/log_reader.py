"""Reads the recovered log: batches that the index finds, and the headers of a segment's records.
Does disk I/O through `Files`.

Invariants
    Before a batch is served, its checksum is verified, and its header is compared with its unit in
    the index. Batches that are adjacent in the log are read with one call.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....protocol.errors import CorruptLogError
from ....protocol.record import HEADER_BYTES, Header, Kind, is_batch, read_header
from ..files import Files
from ..index.interface import ConsumeQueues, Unit
from .commit_log import CommitLog, segment_path
from .recovery import intact_records
from .trail import TrailCursor

WINDOW_BYTES = 1 << 16
_DESCRIBING = (Kind.PARTITION, Kind.STATE)


def read_segment_headers(files: Files, base: int, *, start: int = 0) -> Iterator[Header]:
    """
    Yield the headers of the segment that begins at `base`, in order. Damaged records are skipped;
    bodies are not read.

    Args:
        start: the position of the first record to read; 0 is the beginning of the segment.
    """
    path = segment_path(base)
    size = files.size(path) or 0
    position = max(start - base, 0)
    while position < size:
        data = files.pread(path, position, WINDOW_BYTES)
        start = 0
        while start + HEADER_BYTES <= len(data):
            header = read_header(data, start)
            if not isinstance(header, Header) or header.position != base + position + start:
                break
            yield header
            start += header.length
        if start:
            position += start
            continue
        next_header = next(intact_records(files, base, base + position + 1), None)
        if next_header is None:
            return
        position = next_header.position - base


def list_described_partitions(files: Files, base: int, *, end: int) -> set[int] | None:
    """
    Return the ids of partitions that have a PARTITION or STATE record in the segment `[base, end)`,
    including damaged records.

    Returns:
        The ids, or None if there are damaged records that the trail does not have.
    """
    partition_ids: set[int] = set()
    trail = TrailCursor(files, base)
    position = base
    for header in read_segment_headers(files, base):
        if not _add_damaged(trail, position, header.position, partition_ids):
            return None
        _add_described(header, partition_ids)
        position = header.position + header.length
    return partition_ids if _add_damaged(trail, position, end, partition_ids) else None


def _add_damaged(trail: TrailCursor, start: int, end: int, partition_ids: set[int]) -> bool:
    """Add the partitions that are described by damaged records in `[start, end)`. Return False if
    the trail does not have all of these records.
    """
    if start == end:
        return True
    for header, _ in trail.entries_between(start, end):
        if header.position != start:
            return False
        _add_described(header, partition_ids)
        start += header.length
    return start == end


def _add_described(header: Header, described: set[int]) -> None:
    if header.kind in _DESCRIBING:
        described.add(header.partition_id)


class BatchReader:
    """Reads batches by offset, through the index."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues) -> None:
        self._log = log
        self._queues = queues

    def read(self, partition_id: int, offset: int, end: int, bytes_max: int) -> tuple[bytes, int]:
        """
        Read up to `bytes_max` bytes of batches, but at least one batch.

        The first batch contains the message at `offset`; the last begins before offset `end`.

        Returns:
            The batches up to the first damaged one, and the offset that follows their last message.

        Raises:
            CorruptLogError: the first batch is damaged. The error's details contain the batch's
                offsets.
        """
        units = self._queues.find(partition_id, offset, end=end, bytes_max=bytes_max)
        if not units or units[0].base_offset > offset:
            raise CorruptLogError(
                f"the index of partition {partition_id} does not have offset {offset}",
                partition_id=partition_id,
            )
        parts: list[bytes] = []
        next_offset = offset
        runs = list(self._adjacent_runs(units))
        ranges = [(run[0].position, run[-1].end_position - run[0].position) for run in runs]
        for run, data in zip(runs, self._log.read_ranges(ranges), strict=True):
            start = run[0].position
            for unit in run:
                if not _is_batch_of_unit(data, unit.position - start, partition_id, unit):
                    parts.append(data[: unit.position - start])
                    if next_offset == offset:
                        raise CorruptLogError(
                            f"the batch at position {unit.position} is damaged",
                            position=unit.position,
                            partition_id=partition_id,
                            offset=unit.base_offset,
                            end_offset=unit.next_offset,
                        )
                    return b"".join(parts), next_offset
                next_offset = unit.next_offset
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts), next_offset

    def _adjacent_runs(self, units: list[Unit]) -> Iterator[list[Unit]]:
        """Yield runs of units whose batches are adjacent in a segment."""
        first = 0
        while first < len(units):
            limit = self._log.segment_end(units[first].position)
            last = first + 1
            while (
                last < len(units) and units[last - 1].end_position == units[last].position < limit
            ):
                last += 1
            yield units[first:last]
            first = last


def _is_batch_of_unit(data: bytes, start: int, partition_id: int, unit: Unit) -> bool:
    # Times are not compared, because the index may have raised them so that they never decrease.
    return is_batch(
        data,
        start,
        length=unit.length,
        count=unit.message_count,
        partition_id=partition_id,
        base_offset=unit.base_offset,
        position=unit.position,
    )

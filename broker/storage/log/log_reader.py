"""Reads the log where it is known what stands there: batches that the index finds, and the headers
of a segment's records.  Disk, through `Files`.

Invariants
    Every batch is checked, and compared with its unit in the index, before it is served.
    Adjacent batches in the log are read with one call.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....protocol.errors import CorruptLogError
from ....protocol.record import HEADER_BYTES, Header, Kind, is_batch, read_header
from ..files import Files
from ..index.interface import ConsumeQueues, Unit
from .commit_log import CommitLog, segment_path
from .recovery import whole_records
from .trail import TrailCursor

WINDOW_BYTES = 1 << 16
_DESCRIBING = (Kind.PARTITION, Kind.STATE)


def segment_headers(files: Files, base: int, *, start: int = 0) -> Iterator[Header]:
    """
    Yield every header of the segment that begins at `base`, in order. Damaged records are skipped,
    and bodies are not read.

    Args:
        start: the position of the first record to read; 0 means the beginning of the segment.
    """
    path = segment_path(base)
    size = files.size(path) or 0
    at = max(start - base, 0)
    while at < size:
        data = files.pread(path, at, WINDOW_BYTES)
        start = 0
        while start + HEADER_BYTES <= len(data):
            header = read_header(data, start)
            if not isinstance(header, Header) or header.position != base + at + start:
                break
            yield header
            start += header.length
        if start:
            at += start
            continue
        following = next(whole_records(files, base, base + at + 1), None)
        if following is None:
            return
        at = following.position - base


def partitions_described(files: Files, base: int, *, end: int) -> set[int] | None:
    """
    Return the partitions that have a PARTITION or STATE record in the segment `[base, end)`,
    including damaged records.

    Returns:
        None if the segment is damaged and its trail does not have every lost record.
    """
    described: set[int] = set()
    trail = TrailCursor(files, base)
    at = base
    for header in segment_headers(files, base):
        if not _note_damaged(trail, at, header.position, described):
            return None
        _note(header, described)
        at = header.position + header.length
    return described if _note_damaged(trail, at, end, described) else None


def _note_damaged(trail: TrailCursor, start: int, end: int, described: set[int]) -> bool:
    """Add the partitions of the lost records in `[start, end)`. Return False if the trail does not
    have all of them.
    """
    if start == end:
        return True
    for header, _ in trail.between(start, end):
        if header.position != start:
            return False
        _note(header, described)
        start += header.length
    return start == end


def _note(header: Header, described: set[int]) -> None:
    if header.kind in _DESCRIBING:
        described.add(header.partition_id)


class BatchReader:
    """Reads batches by offset, with the index and the log."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues) -> None:
        self._log = log
        self._queues = queues

    def read(self, partition_id: int, offset: int, end: int, bytes_max: int) -> tuple[bytes, int]:
        """
        Read whole batches: at least one, and up to `bytes_max` bytes.

        The first batch contains the message at `offset`; the last begins below offset `end`.

        Returns:
            The batches, and the offset after their last message. They end before a damaged batch.

        Raises:
            CorruptLogError: the first batch is damaged. The details `offset` and `end_offset` are
                those of the batch.
        """
        units = self._queues.find(partition_id, offset, end=end, bytes_max=bytes_max)
        if not units or units[0].base_offset > offset:
            raise CorruptLogError(
                f"the index of partition {partition_id} lacks offset {offset}",
                partition_id=partition_id,
            )
        parts: list[bytes] = []
        upto = offset
        runs = list(self._runs(units))
        ranges = [(run[0].position, run[-1].end_position - run[0].position) for run in runs]
        for run, data in zip(runs, self._log.read_each(ranges), strict=True):
            start = run[0].position
            for unit in run:
                if not _matches(data, unit.position - start, partition_id, unit):
                    parts.append(data[: unit.position - start])
                    if upto == offset:
                        raise CorruptLogError(
                            f"the batch at position {unit.position} is damaged",
                            position=unit.position,
                            partition_id=partition_id,
                            offset=unit.base_offset,
                            end_offset=unit.next_offset,
                        )
                    return b"".join(parts), upto
                upto = unit.next_offset
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts), upto

    def _runs(self, units: list[Unit]) -> Iterator[list[Unit]]:
        """Yield runs of units that are adjacent in a segment."""
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


def _matches(data: bytes, start: int, partition_id: int, unit: Unit) -> bool:
    # Times are not compared: the index stores times that never fall.
    return is_batch(
        data,
        start,
        length=unit.length,
        count=unit.message_count,
        partition_id=partition_id,
        base_offset=unit.base_offset,
        position=unit.position,
    )

"""Reads the headers of a segment's records, and the partitions that they describe. Disk, through
`Files`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....protocol.record import HEADER_BYTES, Header, Kind, read_header
from ..files import Files
from .commit_log import segment_path
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

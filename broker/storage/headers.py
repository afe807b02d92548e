"""The headers of a segment's records, without reading their bodies.  Disk, through `Files`."""

from __future__ import annotations

from collections.abc import Iterator

from ...protocol.record import HEADER_BYTES, Header, read_header
from .commit_log import segment_path
from .files import Files
from .recovery import whole_records

WINDOW_BYTES = 1 << 16


def segment_headers(files: Files, base: int) -> Iterator[Header]:
    """Every header of the segment that begins at `base`, in order; damage is stepped over."""
    path = segment_path(base)
    size = files.size(path) or 0
    at = 0
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

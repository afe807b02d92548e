"""Decides from the bytes of batches which of them can have messages with wanted tags, without
splitting them into messages. Pure.

    batch ─▶ the properties at its end ─┬─ they contain a wanted tag, or are packed ─▶ may
        have some: it stays
                                        ╰─ they contain none ─▶ certainly has none: left out

Invariants
    A batch with a message of a wanted tag is never left out. A batch without one may stay, because
    the tag may be part of another text. The answer lists what is left out, as ranges of offsets;
    the reader counts these messages as handled.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...protocol.offsets import Range
from ...protocol.record import HEADER_BYTES, Compression, Header, read_header

RANGES_MAX = 1_000
"""The most ranges that one answer leaves out, so that its header stays small. Later batches stay.
"""


def may_have(data: bytes, start: int, header: Header, wanted: Sequence[bytes]) -> bool:
    """
    Return False if the batch certainly has no message with a wanted tag.

    Args:
        data: contains the batch, header and body, at `start`.
        wanted: the tags as UTF-8.
    """
    if header.compression != Compression.NONE:
        return True
    lengths: array[int] = array("I")
    first = start + HEADER_BYTES + 16 * header.count
    lengths.frombytes(data[first : first + 4 * header.count])
    end = start + header.length
    properties = end - sum(lengths)
    return any(data.find(tag, properties, end) >= 0 for tag in wanted)


def leave_out(data: bytes, offset: int, wanted: Sequence[bytes]) -> tuple[bytes, list[Range]]:
    """
    Remove the batches without a wanted tag from `data`.

    Args:
        data: whole batches, as they are stored.
        offset: the first offset that was asked for; the first batch may begin below it.

    Returns:
        The batches that stay, and the ranges of offsets, from `offset` on, of the batches that are
        left out.
    """
    view = memoryview(data)
    kept: list[memoryview] = []
    ranges: list[Range] = []
    start = 0
    while start < len(data):
        header = read_header(data, start)
        if not isinstance(header, Header):  # the reader of this data reports it
            return data, []
        end = start + header.length
        low = max(offset, header.base_offset)
        joins = bool(ranges) and ranges[-1][1] == low
        stays = len(ranges) >= RANGES_MAX and not joins
        if stays or may_have(data, start, header, wanted):
            kept.append(view[start:end])
        elif joins:
            ranges[-1] = (ranges[-1][0], header.next_offset)
        else:
            ranges.append((low, header.next_offset))
        start = end
    return (b"".join(kept) if ranges else data), ranges

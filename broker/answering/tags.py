"""Filters batches by tags, looking only at their bytes, not at individual messages. Pure.

    batch ─▶ its properties, at the end ─┬─ contain a wanted tag, or are compressed
                                         │      ─▶ the batch may have messages with the tag: kept
                                         ╰─ contain no wanted tag ─▶ it has none: left out

Invariants
    A batch that has a message with a wanted tag is never left out. A batch without one may be kept,
    because the tag may occur in another text. The reply contains the offset ranges of the batches
    that are left out; the reader treats their messages as handled.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...protocol.offsets import Range
from ...protocol.record import HEADER_BYTES, Compression, Header, read_header

RANGES_MAX = 1_000
"""The maximum number of ranges that one reply leaves out. It keeps the header small. Later batches
are kept.
"""


def may_contain(data: bytes, start: int, header: Header, tags: Sequence[bytes]) -> bool:
    """
    Return False if it is certain that no message of the batch has a wanted tag.

    Args:
        data: contains the batch, with its header, at `start`.
        tags: the tags as UTF-8.
    """
    if header.compression != Compression.NONE:
        return True
    lengths: array[int] = array("I")
    first = start + HEADER_BYTES + 16 * header.count
    lengths.frombytes(data[first : first + 4 * header.count])
    end = start + header.length
    properties = end - sum(lengths)
    return any(data.find(tag, properties, end) >= 0 for tag in tags)


def remove_unwanted_batches(
    data: bytes, offset: int, tags: Sequence[bytes]
) -> tuple[bytes, list[Range]]:
    """
    Remove the batches without a wanted tag from `data`.

    Args:
        data: stored batches, including their headers.
        offset: the first requested offset; the first batch may begin below it.
        tags: the tags as UTF-8.

    Returns:
        The batches that are kept, and the offset ranges of the others, beginning at `offset`.
    """
    view = memoryview(data)
    kept_batches: list[memoryview] = []
    ranges: list[Range] = []
    start = 0
    while start < len(data):
        header = read_header(data, start)
        if not isinstance(header, Header):  # the reader reports the damage
            return data, []
        end = start + header.length
        first = max(offset, header.base_offset)
        is_adjacent = bool(ranges) and ranges[-1][1] == first
        is_over_limit = len(ranges) >= RANGES_MAX and not is_adjacent
        if is_over_limit or may_contain(data, start, header, tags):
            kept_batches.append(view[start:end])
        elif is_adjacent:
            ranges[-1] = (ranges[-1][0], header.next_offset)
        else:
            ranges.append((first, header.next_offset))
        start = end
    return (b"".join(kept_batches) if ranges else data), ranges

"""Packs a column of properties in the MessagePack format of messages, without a Python object per
row. Pure.

    maps ─▶ a list of pieces: the map header, then for each entry the name header, the name,
            the value header, the value
         ─take─▶ the concatenated bytes, and the offset of each row

Invariants
    The bytes of a row equal those from `pack_properties`. If a row cannot be packed, the result is
    None, and the caller packs row by row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...protocol.limits import PROPERTIES_BYTES_MAX

I64 = npt.NDArray[np.int64]
HEADERS_MAX = 1 << 16
"""The number of string lengths for which headers are cached; longer strings exceed the limit for
properties.
"""
ENTRY_PIECES = 4
_ENTRY = pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())])


def pack_maps(maps: Any) -> Any | None:
    """
    Return the packed properties of each row as a binary array.

    Args:
        maps: an array of maps from string to string; rows may be null.

    Returns:
        The packed rows, or None if a string is null or too long, or a row has the same name twice.
    """
    try:
        entries = maps.cast(pa.map_(pa.string(), pa.string())).cast(pa.list_(_ENTRY))
    except pa.ArrowException:
        return None
    counts = np.diff(_to_int64(entries.offsets))
    if entries.null_count:  # `value_lengths` has nulls, for which numpy would import pandas
        missing = entries.is_null()
        bits = np.frombuffer(missing.buffers()[1], np.uint8)
        bits = np.unpackbits(bits, bitorder="little")[missing.offset :][: len(missing)]
        counts[bits == 1] = 0
    flat = entries.flatten()
    names, texts = flat.field(0), flat.field(1)
    if names.null_count or texts.null_count or counts.max(initial=0) >= HEADERS_MAX:
        return None
    name_lengths, text_lengths = _lengths(names), _lengths(texts)
    longest = int(max(name_lengths.max(initial=0), text_lengths.max(initial=0)))
    if longest >= HEADERS_MAX or _has_duplicate_names(names, counts):
        return None
    headers, largest_map = _text_headers().slice(0, longest + 1), int(counts.max(initial=0))
    pool = [
        headers,
        _map_headers().slice(0, largest_map + 1),
        names.cast(pa.binary()),
        texts.cast(pa.binary()),
    ]
    map_base, name_base = len(headers), len(headers) + largest_map + 1
    # A row has one piece for its map header, and four for each entry. The header of a row without
    # entries is empty.
    ends = np.cumsum(1 + ENTRY_PIECES * counts)
    begins = ends - (1 + ENTRY_PIECES * counts)
    pieces = np.empty(int(ends[-1]) if len(ends) else 0, np.int64)
    pieces[begins] = map_base + counts
    numbers = np.arange(len(names))
    first = numbers * ENTRY_PIECES + 1 + np.repeat(np.arange(len(counts)), counts)
    pieces[first] = name_lengths
    pieces[first + 1] = name_base + numbers
    pieces[first + 2] = text_lengths
    pieces[first + 3] = name_base + len(names) + numbers
    edges, blob = _offsets_and_data(pa.concat_arrays(pool).take(_to_arrow(pieces)))
    edges = edges[np.concatenate([begins, [len(pieces)]])]
    if int(np.diff(edges).max(initial=0)) > PROPERTIES_BYTES_MAX:
        return None
    return pa.Array.from_buffers(pa.large_binary(), len(counts), [None, pa.py_buffer(edges), blob])


def _has_duplicate_names(names: Any, counts: I64) -> bool:
    """Return True if a row has the same name twice."""
    encoded = names.dictionary_encode()
    rows = np.repeat(np.arange(len(counts)), counts)
    pairs = rows * max(len(encoded.dictionary), 1) + _to_int64(encoded.indices)
    return len(np.unique(pairs)) < len(pairs)


def _lengths(array: Any) -> I64:
    return np.diff(_offsets_and_data(array)[0])


def _offsets_and_data(array: Any) -> tuple[I64, Any]:
    """Return the offsets of an array's strings, and the buffer of their bytes."""
    _, edges, blob = array.buffers()
    if edges is None or not len(array):
        return np.zeros(len(array) + 1, np.int64), pa.py_buffer(b"")
    begins = np.frombuffer(edges, np.int32, len(array) + 1, 4 * array.offset)
    return begins.astype(np.int64), pa.py_buffer(b"") if blob is None else blob


def _to_int64(array: Any) -> I64:
    if not len(array):
        return np.zeros(0, np.int64)
    # `to_numpy` would import pandas.
    numbers = np.frombuffer(array.buffers()[1], np.int32, len(array), 4 * array.offset)
    return numbers.astype(np.int64)


def _to_arrow(numbers: I64) -> Any:
    # `pa.array(numbers)` would import pandas.
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


@cache
def _text_headers() -> Any:
    """Return the MessagePack string header for each length."""
    short = [bytes([0xA0 | length]) for length in range(32)]
    middle = [bytes([0xD9, length]) for length in range(32, 256)]
    long = [b"\xda" + length.to_bytes(2, "big") for length in range(256, HEADERS_MAX)]
    return _binary_array([*short, *middle, *long])


@cache
def _map_headers() -> Any:
    """Return the MessagePack map header for each size. It is empty for size 0, because a message
    without properties has no bytes for them.
    """
    short = [b"", *(bytes([0x80 | size]) for size in range(1, 16))]
    long = [b"\xde" + size.to_bytes(2, "big") for size in range(16, HEADERS_MAX)]
    return _binary_array([*short, *long])


def _binary_array(texts: list[bytes]) -> Any:
    edges = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.binary(), len(texts), buffers)

"""The file index's encoding of units: 32 bytes each, little-endian, 127 in a block. Pure.

┌─────────────────┬──────────────┬────────────────────┬────────────┬───────────┐
│ base_offset  u64│ position  u64│ appended_at_ms  i64│ length  u32│ count  u32│
└─────────────────┴──────────────┴────────────────────┴────────────┴───────────┘
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from .interface import Unit

UNIT_BYTES = 32
BLOCK_UNITS = 127
UNITS_BYTES = BLOCK_UNITS * UNIT_BYTES
_UNIT = struct.Struct("<QQqII")
assert _UNIT.size == UNIT_BYTES

pack_unit = _UNIT.pack


def unit_at(data: bytes | bytearray, index: int) -> Unit:
    """Return the unit at this index."""
    base_offset, position, appended_at_ms, length, count = _UNIT.unpack_from(
        data, index * UNIT_BYTES
    )
    return Unit(base_offset, count, position, length, appended_at_ms)


def find_first(data: bytes | bytearray, predicate: Callable[[Unit], bool]) -> int:
    """Return the index of the first unit that satisfies the predicate, or the number of units if
    there is none. All units after a unit that satisfies it must do so, too.
    """
    low, high = 0, len(data) // UNIT_BYTES
    while low < high:
        middle = (low + high) // 2
        if predicate(unit_at(data, middle)):
            high = middle
        else:
            low = middle + 1
    return low

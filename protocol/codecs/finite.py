"""Checks for numbers that JSON does not have: encoders write NaN and infinity as null, which no
decoder turns back into a number. Pure.
"""

from __future__ import annotations

import math
import re

import msgspec

NOT_IN_JSON = "JSON has no NaN or infinity, and they would be stored as null: send None, or text"


_pack = msgspec.msgpack.Encoder().encode
_packed_so = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search
"""Finds the first bytes of NaN and infinity in MessagePack; a text may contain these bytes as well.
"""


def may_lack_json(value: object) -> bool:
    """
    Return False if a value that has JSON surely contains neither NaN nor infinity; this takes a
    tenth of the time of `all_finite`.

    Values with None are common, and a look at each part of them would cost more than encoding them.
    """
    try:
        return _packed_so(_pack(value)) is not None
    except (OverflowError, RecursionError, TypeError, ValueError):
        # It has JSON but no MessagePack, for example a number of 65 bits.
        return True


def all_finite(value: object) -> bool:
    """Return True if a value of dicts, lists, texts and numbers contains neither NaN nor
    infinity.
    """
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, float):
            if not math.isfinite(each):
                return False
        elif isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            left.extend(each)
    return True


def is_null_in(value: object, in_json: object) -> bool:
    """Return True if a number in a value of dicts, lists, texts and numbers is null in its JSON,
    which `in_json` has decoded.
    """
    left = [(value, in_json)]
    while left:
        each, stored = left.pop()
        if isinstance(each, float):
            if stored is None:
                return True
        elif isinstance(each, dict) and isinstance(stored, dict):
            left.extend((inner, stored.get(name)) for name, inner in each.items() if name in stored)
        elif isinstance(each, list) and isinstance(stored, list):
            left.extend(zip(each, stored, strict=False))
    return False

"""Numbers that JSON does not have: encoders write null for NaN and infinity, which no decoder makes
a number of.  Pure.
"""

from __future__ import annotations

import math
import re

import msgspec

NOT_IN_JSON = "NaN and infinity have no JSON, and would be stored as null: send None, or text"


_pack = msgspec.msgpack.Encoder().encode
_packed_so = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search
"""How MessagePack begins NaN and infinity; a text may have these bytes as well."""


def may_lack_json(value: object) -> bool:
    """
    False if there is neither NaN nor infinity in a value that has JSON; in a tenth of the time of
    `all_finite`.

    Values with None are common, and a look at each part of them would cost more than their JSON.
    """
    try:
        return _packed_so(_pack(value)) is not None
    except (OverflowError, RecursionError, TypeError, ValueError):
        # It has JSON and no MessagePack, as a number of 65 bits.
        return True


def all_finite(value: object) -> bool:
    """True if there is neither NaN nor infinity in a value of dicts, lists, texts and numbers."""
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
    """True if a number of a value, of dicts, lists, texts and numbers, is null in its JSON, as that
    was read.
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

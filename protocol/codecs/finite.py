"""Numbers that JSON does not have: encoders write null for NaN and infinity, which no decoder makes a number of.  Pure."""

from __future__ import annotations

import math

NOT_IN_JSON = "NaN and infinity have no JSON, and would be stored as null: send None, or text"


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

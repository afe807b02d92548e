"""Numbers that JSON does not have: encoders write null for NaN and infinity, which no decoder makes a number of.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

NOT_IN_JSON = "NaN and infinity have no JSON, and would be stored as null: send None, or text"


def all_finite(value: object) -> bool:
    """True if there is neither NaN nor infinity in a value of dicts, lists, texts and numbers."""
    return all(math.isfinite(each) for each in _leaves(value) if isinstance(each, float))


def nulls(value: object) -> int:
    """How often None is in a value of dicts, lists, texts and numbers."""
    return sum(1 for each in _leaves(value) if each is None)


def _leaves(value: object) -> Iterator[object]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            left.extend(each)
        else:
            yield each

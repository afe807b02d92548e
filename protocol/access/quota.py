"""How much a principal may use of each server, and how many bytes a second a subject takes at each broker.  Pure.

0 stands for no limit.  A quota is a rate: who is over it waits, and is told for how long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from ..errors import InvalidRequestError

BYTES_PER_S_MIN: Final = 256 << 10
"""A message of the largest size is then let through within some seconds."""
MAX: Final = 1 << 40
EVERYBODY: Final = "*"
"""The principal whose quota all have that have none of their own."""
SUBJECT_LIMITS_MAX: Final = 1_000


class Quota(Struct, frozen=True, array_like=True):
    """What a principal may use of one server."""

    bytes_per_s: int = 0
    """Of messages, sent and received together."""
    requests_per_s: int = 0
    connections: int = 0
    """Of the data plane, at a time."""


NO_QUOTA: Final = Quota()


def check_quota(quota: Quota) -> Quota:
    """Raises InvalidRequestError: it limits nothing, or a limit cannot be."""
    lows = (BYTES_PER_S_MIN, 1, 1)
    names = ("bytes_per_s", "requests_per_s", "connections")
    values = (quota.bytes_per_s, quota.requests_per_s, quota.connections)
    if not any(values):
        raise InvalidRequestError(f"a quota limits one of {', '.join(names)}")
    for name, value, low in zip(names, values, lows, strict=True):
        if value and not low <= value <= MAX:
            raise InvalidRequestError(f"{name} is 0, or a number from {low} to {MAX}, not {value}")
    return quota


def limit_of(subject: str, limits: Mapping[str, int]) -> int:
    """The bytes a second of a subject: by its name, else by the longest pattern that means it; 0: no limit."""
    if subject in limits:
        return limits[subject]
    fitting = [
        pattern for pattern in limits if pattern.endswith("*") and subject.startswith(pattern[:-1])
    ]
    return limits[max(fitting, key=len)] if fitting else 0

"""Quotas: rate limits of principals at each server, and of subjects at each broker. Pure.

0 means no limit. A quota is a rate, so the error for a caller that exceeds it says how long to
wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from ..errors import InvalidRequestError
from .rights import matches

BYTES_PER_S_MIN: Final = 256 << 10
"""The minimum rate, at which even the largest message takes only a few seconds."""
MAX: Final = 1 << 40
EVERYBODY: Final = "*"
"""The principal whose quota applies to every principal that has no quota of its own."""
SUBJECT_LIMITS_MAX: Final = 1_000


class Quota(Struct, frozen=True, array_like=True):
    """The rate limits of a principal on one server."""

    bytes_per_s: int = 0
    """The message bytes per second, sent and received together."""
    requests_per_s: int = 0
    connections: int = 0
    """The number of open connections of the data plane."""


NO_QUOTA: Final = Quota()


def check_quota(quota: Quota) -> Quota:
    """Return the quota if it limits anything and its limits are in range. Raises
    InvalidRequestError otherwise.
    """
    lows = (BYTES_PER_S_MIN, 1, 1)
    names = ("bytes_per_s", "requests_per_s", "connections")
    values = (quota.bytes_per_s, quota.requests_per_s, quota.connections)
    if not any(values):
        raise InvalidRequestError(f"a quota limits one of {', '.join(names)}")
    for name, value, low in zip(names, values, lows, strict=True):
        if value and not low <= value <= MAX:
            raise InvalidRequestError(f"{name} is 0, or a number from {low} to {MAX}, not {value}")
    return quota


def matching_limits(subject: str, limits: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the limits that apply to a subject, each with its name or pattern. All subjects that
    match a pattern share its limit.
    """
    return [(name, limit) for name, limit in limits.items() if limit and matches(name, subject)]


def check_shared_limits(
    name: str, subjects: int, scheduled_bytes: int, *, of_subjects: bool
) -> None:
    """
    Check the limits that all subjects that match a name or pattern share.

    Args:
        of_subjects: True if `name` is a subject or a pattern of subjects, False if it is a
            principal.

    Raises:
        InvalidRequestError: a limit is out of range, or does not apply to such a name.
    """
    if not of_subjects and (subjects or scheduled_bytes):
        raise InvalidRequestError(
            "subjects and scheduled_bytes are limits of subjects, not of a principal"
        )
    for what, value in (("subjects", subjects), ("scheduled_bytes", scheduled_bytes)):
        if not 0 <= value <= MAX:
            raise InvalidRequestError(f"{what} is a number from 0 to {MAX}, not {value}")
    if subjects and not name.endswith("*"):
        raise InvalidRequestError(
            f"subjects limits a pattern such as shop.*, not the one name {name!r:.80}"
        )


def check_sessions(sessions: int, *, of_subjects: bool) -> None:
    """Check the limit for a principal's concurrent consumers. Raises InvalidRequestError if it is
    out of range or is set for subjects.
    """
    if of_subjects and sessions:
        raise InvalidRequestError("sessions is a limit of a principal, not of subjects")
    if not 0 <= sessions <= MAX:
        raise InvalidRequestError(f"sessions is a number from 0 to {MAX}, not {sessions}")


def subject_limit(subject: str, limits: Mapping[str, int]) -> int:
    """Return a subject's limit in bytes per second; 0 means no limit. A limit on its name takes
    precedence over a limit on a pattern, and a longer pattern takes precedence over a shorter one.
    """
    if subject in limits:
        return limits[subject]
    matching_patterns = [pattern for pattern in limits if matches(pattern, subject)]
    return limits[max(matching_patterns, key=len)] if matching_patterns else 0

"""Converts instants from programs and operators to milliseconds since 1970. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from ..errors import ConfigError, InvalidRequestError
from ..groups import GroupStart, StartAt
from ..text import format_time, is_not_a_time

_AGO = re.compile(r"-([0-9]{1,9})(ms|s|m|h|d|w)")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
GroupStartOption = str | datetime | timedelta
""""earliest", "latest", or an instant in the past."""
SKEW_MS = 1_000
"""How far an instant may be in the future, because the clocks of a cluster differ, in milliseconds.
It then counts as now.
"""
AHEAD_MS_MAX = 60_000
"""How far `at_ms` of a group's start or reset may be in the future, in milliseconds: it may be the
time of a message that was stored by a broker whose clock is ahead.
"""

SECONDS = range(1_000_000_000, 100_000_000_000)
"""Numbers that are probably seconds, in the years 2001 to 5138. As milliseconds, they would be in
1970 to 1973, before keylane existed.
"""
FINER_MIN = 100_000_000_000_000
"""The lowest number that is probably in micro- or nanoseconds, from 1973 on. As milliseconds, it
would be in 5138.
"""


def check_unit(name: str, at_ms: object) -> None:
    """
    Check that an instant is in milliseconds. Values that are not ints are ignored.

    Raises:
        InvalidRequestError: the instant is probably in seconds, or in micro- or nanoseconds.
    """
    if type(at_ms) is not int:
        return
    if at_ms in SECONDS:
        raise InvalidRequestError(
            f"{name} is milliseconds since 1970, and {at_ms} is seconds: use {at_ms * 1000}"
        )
    if at_ms >= FINER_MIN:
        raise InvalidRequestError(
            f"{name} is milliseconds since 1970, and {at_ms} is after the year 5137: are these "
            f"micro- or nanoseconds?"
        )


def check_not_ahead(at_ms: object, *, now_ms: int) -> None:
    """
    Check that the instant at which a group starts, or to which it is reset, is not in the future.
    Values that are not ints are ignored.

    Raises:
        InvalidRequestError: the instant is more than AHEAD_MS_MAX after `now_ms`, the current time
            by the caller's wall clock; the hint names the alternative.
    """
    if type(at_ms) is not int or at_ms <= now_ms + AHEAD_MS_MAX:
        return
    error = InvalidRequestError(
        f"{format_time(at_ms)} is in the future, as now is {format_time(now_ms)}: messages are "
        f"found by a time in the past"
    )
    error.hint = "Give 'latest' to get only messages that are sent from now on."
    raise error


def since_1970_ms(at: datetime) -> int:
    """
    Convert a datetime with a time zone to milliseconds since 1970, exactly.

    The float returned by `datetime.timestamp` is not exact: from 2038 on, a quarter of all results
    would be too low by one.
    """
    return (at - _BEGIN) // _MS


def parse_ago_ms(text: str) -> int | None:
    """Parse a time ago, such as "-1h" or "-30s", and return it in milliseconds. Return None for any
    other text.
    """
    match = _AGO.fullmatch(text)
    return None if match is None else int(match[1]) * _UNIT_MS[match[2]]


def parse_instant_ms(given: datetime | timedelta | str, *, now_ms: int) -> int:
    """
    Convert an instant in the past to milliseconds since 1970.

    Args:
        given: a datetime with a time zone, a negative timedelta, a time ago such as "-1h", "-15m"
            or "-2d", or an ISO 8601 time with a zone.
        now_ms: the current time by the caller's wall clock, in milliseconds since 1970.

    Raises:
        InvalidRequestError: `given` is some other value, has no time zone, is before 1970, or is in
            the future.
    """
    if is_not_a_time(given):
        raise InvalidRequestError(
            f"{given!r:.40} is not an instant: give a datetime with a time zone"
        )
    if isinstance(given, datetime):
        if given.utcoffset() is None:
            raise InvalidRequestError(
                f"{given.isoformat()} has no time zone: give datetime(…, tzinfo=UTC), or "
                f".astimezone()"
            )
        at_ms = since_1970_ms(given)
    elif isinstance(given, timedelta):
        at_ms = now_ms + given // _MS
    else:
        ago = parse_ago_ms(given)
        at_ms = since_1970_ms(_parse_iso_time(given)) if ago is None else now_ms - ago
    if at_ms < 0:
        raise InvalidRequestError(f"{given!s:.60} is before 1970")
    if at_ms > now_ms + SKEW_MS:
        raise InvalidRequestError(
            f"{given!s:.60} is {(at_ms - now_ms) / 1000:.0f} s in the future: messages are found "
            f"by a time in the past"
        )
    return min(at_ms, now_ms)


def _parse_iso_time(text: str) -> datetime:
    """Parse an ISO 8601 time with a zone. Raises InvalidRequestError."""
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(
            f"{text!r:.60} is not a time: give how long ago, such as -1h or -2d, or a time such as "
            f"2024-05-31T12:00:00Z"
        ) from None
    if given.utcoffset() is None:
        raise InvalidRequestError(f"{text!r:.60} has no time zone: add Z for UTC, or +02:00")
    return given


def group_start(given: GroupStartOption | GroupStart | None, *, now_ms: int) -> GroupStart | None:
    """
    Convert a start option to the GroupStart of a new group. None is returned unchanged.

    Raises:
        ConfigError: `given` is neither "earliest" nor "latest" nor an instant in the past.
    """
    if given is None or isinstance(given, GroupStart):
        return given
    if not isinstance(given, str | datetime | timedelta):
        raise ConfigError(f"start must be 'earliest', 'latest' or an instant, not {given!r:.40}")
    if given in {StartAt.EARLIEST, StartAt.LATEST}:
        return GroupStart(at=StartAt(str(given)))
    try:
        return GroupStart(at=StartAt.TIME, at_ms=parse_instant_ms(given, now_ms=now_ms))
    except InvalidRequestError as error:
        alternatives = "; or give 'earliest' or 'latest'" if isinstance(given, str) else ""
        raise ConfigError(f"start: {error.message}{alternatives}") from None

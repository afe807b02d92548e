"""Parses and checks the delivery times of scheduled messages. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ..errors import InvalidRequestError, Reason
from ..text import format_time, is_not_a_time, parse_number

AHEAD_MS_MAX = 366 * 86_400_000
"""How far ahead a delivery time may be, in milliseconds: one year, including a leap year."""
SECONDS_MAX = 100_000_000_000
"""The number below which a time is probably in seconds rather than milliseconds."""
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


def deliver_at_ms(given: object, *, now_ms: int) -> int:
    """
    Convert a delivery time to milliseconds since 1970, rounded up, and check it.

    Args:
        given: a datetime with a time zone, or a whole number of milliseconds.
        now_ms: the current time by the caller's wall clock, in milliseconds since 1970.

    Raises:
        InvalidRequestError: `given` is of another type, has no time zone, is not in the future, or
            is more than AHEAD_MS_MAX ahead.
    """
    return check_deliver_at(_instant_ms(given), now_ms=now_ms)


def _instant_ms(given: object) -> int:
    if isinstance(given, datetime):
        if is_not_a_time(given):
            raise InvalidRequestError(Reason.DELIVER_AT, f"deliver_at is not a time: {given!r:.40}")
        if given.utcoffset() is None:
            raise InvalidRequestError(
                Reason.DELIVER_AT,
                f"deliver_at has no time zone: {given.isoformat()}; give datetime(…, tzinfo=UTC), "
                f"or .astimezone()",
            )
        return -((_BEGIN - given) // _MS)
    if type(given) is int:
        return given
    raise InvalidRequestError(
        Reason.DELIVER_AT,
        f"deliver_at is a datetime or milliseconds, not {type(given).__name__} {given!r:.40}",
    )


def check_deliver_at(at_ms: int, *, now_ms: int, latest_ms: int | None = None) -> int:
    """
    Check that `at_ms` is in the future, but not too far ahead, and return it.

    Args:
        latest_ms: the current time by another clock, not earlier than `now_ms`. Either of the two
            may be right.

    Raises:
        InvalidRequestError: `at_ms` is not later than `now_ms`, or is more than AHEAD_MS_MAX ahead
            of both.
    """
    if at_ms <= now_ms:
        seconds = " (seconds since 1970?  milliseconds are needed)" if at_ms < SECONDS_MAX else ""
        raise InvalidRequestError(
            Reason.DELIVER_AT,
            f"deliver_at has passed: {format_time(at_ms)}{seconds}; now is {format_time(now_ms)}",
            deliver_at_ms=_wire_int(at_ms),
            now_ms=now_ms,
        )
    if at_ms > (now_ms if latest_ms is None else latest_ms) + AHEAD_MS_MAX:
        raise InvalidRequestError(
            Reason.DELIVER_AT,
            f"deliver_at is over 366 days ahead: {format_time(at_ms)}; now is "
            f"{format_time(now_ms)}",
            deliver_at_ms=_wire_int(at_ms),
            now_ms=now_ms,
        )
    return at_ms


def read_deliver_at(text: str, *, now_ms: int) -> int:
    """Parse and check a delivery time, which is given in milliseconds or as an ISO 8601 time with a
    zone. Raises InvalidRequestError.
    """
    return check_deliver_at(read_instant_ms(text), now_ms=now_ms)


def read_instant_ms(text: str) -> int:
    """Parse a time without checking that it is in the future. Raises InvalidRequestError if it is
    not a time or has no zone.
    """
    number = parse_number(text.removeprefix("-"))
    if number is not None:
        return -number if text.startswith("-") else number
    try:
        # An unescaped plus sign in a URL arrives as a space.
        given = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
    except ValueError:
        raise InvalidRequestError(
            Reason.DELIVER_AT,
            f"deliver_at is milliseconds since 1970 or a time such as 2030-01-31T08:00:00Z, not "
            f"{text!r:.60}",
        ) from None
    return _instant_ms(given)


def _wire_int(at_ms: int) -> int | None:
    """Return the number if it can be sent on the wire, otherwise None."""
    return at_ms if abs(at_ms) < 2**63 else None

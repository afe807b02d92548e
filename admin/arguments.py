"""Validates the arguments of calls against the types that are sent over the wire. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

import msgspec

from ..protocol.access.principals import check_principal
from ..protocol.access.rights import AccessGrant, Rights, check_grant, check_granted
from ..protocol.errors import InvalidRequestError
from ..protocol.groups import GroupStart, StartAt
from ..protocol.http.access import ChangeGrant
from ..protocol.reading.instants import (
    GroupStartOption,
    check_not_ahead,
    check_unit,
    group_start,
    since_1970_ms,
)
from ..protocol.text import describe_invalid_value, invalid_unicode_text, is_not_a_time

T = TypeVar("T")


def convert_argument(target_type: type[T], value: object, **arguments: str) -> T:
    """
    Convert an argument, or the fields of a request, to the type that is sent over the wire.

    Args:
        arguments: maps each field whose argument has a different name to that argument, which the
            error message then names.

    Raises:
        InvalidRequestError: the value does not fit the type.
    """
    try:
        return msgspec.convert(value, target_type)
    except msgspec.ValidationError as error:
        text = describe_invalid_value(error, target_type)
        for field, argument in arguments.items():
            text = text.replace(f"`$.{field}`", argument)
        raise InvalidRequestError(text) from None
    except UnicodeEncodeError as error:
        raise InvalidRequestError(invalid_unicode_text(error)) from None


def check_position_keyword(name: str, value: object, **arguments: str) -> None:
    """
    Check an argument whose value is a keyword, such as "earliest", "offset" or "time".

    Args:
        name: name of the argument.
        arguments: maps each keyword to the name of the argument that takes the position.

    Raises:
        InvalidRequestError: the caller passed the position itself; the hint names the argument that
            takes it.
    """
    for keyword, position_types in _POSITION_TYPES:
        if (
            keyword in arguments
            and isinstance(value, position_types)
            and not isinstance(value, bool)
        ):
            break
    else:
        if not isinstance(value, str) or not value.isdecimal() or "offset" not in arguments:
            return
        keyword = "offset"
    keywords = ", ".join(repr(each) for each in ("earliest", "latest", *arguments))
    error = InvalidRequestError(f"{name} is one of {keywords}, not {value!r:.60}")
    position = "milliseconds since 1970" if isinstance(value, datetime) else f"{value!s:.60}"
    argument = arguments[keyword]
    error.hint = f"Pass the position as {argument}=: {name}={keyword!r}, {argument}={position}."
    raise error


def build_group_start(start: object, at_ms: object, cursors: object, *, now_ms: int) -> GroupStart:
    """
    Build the start of a new group from the arguments of `Admin.create_group`.

    Raises:
        ConfigError: `start` is neither a keyword nor an instant in the past.
        InvalidRequestError: another argument is invalid, or does not go with `start`.
    """
    if not isinstance(start, str | datetime | timedelta):
        check_position_keyword("start", start, time="at_ms", cursors="cursors")
    check_unit("at_ms", at_ms)
    if start is None or (isinstance(start, str) and start in set(StartAt)):
        if start == StartAt.TIME:
            check_not_ahead(at_ms, now_ms=now_ms)
        offsets = None if cursors is None else convert_mapping("cursors", cursors)
        fields = {"at": start, "at_ms": at_ms, "cursors": offsets}
        return convert_argument(GroupStart, fields, at="start")
    if (at_ms, cursors) != (None, None):
        raise InvalidRequestError(f"start={start!s:.60} goes without at_ms= and cursors=")
    built = group_start(cast(GroupStartOption, start), now_ms=now_ms)  # it checks the type
    assert built is not None
    return built


_POSITION_TYPES: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("offset", int),
    ("time", (int, datetime)),
    ("cursors", Mapping),
)
"""Maps each keyword to the types of the positions that callers pass by mistake instead of the
keyword.
"""


def convert_mapping(name: str, value: object) -> dict[Any, Any]:
    """Return the argument `name` as a dict. Raises InvalidRequestError if it is not a mapping."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} must be a mapping, not {value!r:.60}")
    return dict(value)


def build_change_grant(
    principal: str, right: Rights | str, subject: str, group: str
) -> ChangeGrant:
    """Build the body of a request that grants or revokes a right. Raises InvalidRequestError."""
    check_principal(principal)
    check_granted(right)
    fields = {"right": right, "subject": subject, "group": group}
    return ChangeGrant(
        principal=principal, grant=check_grant(convert_argument(AccessGrant, fields))
    )


def build_principal_query(principal: str | None) -> dict[str, str] | None:
    """Build the query for one principal, or for all if None. Raises InvalidRequestError."""
    return None if principal is None else {"principal": check_principal(principal)}


def to_epoch_ms(name: str, time: datetime | None) -> int:
    """
    Convert the argument `name` to milliseconds since 1970; None becomes 0.

    Raises:
        InvalidRequestError: the argument is not a datetime with a time zone.
    """
    if time is None:
        return 0
    if not isinstance(time, datetime) or is_not_a_time(time):
        raise InvalidRequestError(f"{name} must be a datetime with a time zone, not {time!r:.60}")
    if time.utcoffset() is None:
        raise InvalidRequestError(f"{name} needs a time zone: {time.isoformat()}")
    return since_1970_ms(time)

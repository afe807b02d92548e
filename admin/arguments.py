"""Checks the arguments of calls against the types that go over the wire. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from ..protocol.access.principals import check_principal
from ..protocol.access.rights import AccessGrant, Rights, check_grant, check_granted
from ..protocol.errors import InvalidRequestError
from ..protocol.http.access import ChangeGrant
from ..protocol.reading.instants import since_1970_ms
from ..protocol.text import bad_text, is_not_a_time, refused_value

T = TypeVar("T")


def checked(kind: type[T], given: object, **arguments: str) -> T:
    """
    Convert an argument to the type that goes over the wire.

    Args:
        arguments: field name → argument name, where the two differ; the error text names the
            argument.

    Raises:
        InvalidRequestError
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        text = refused_value(error, kind)
        for field, argument in arguments.items():
            text = text.replace(f"`$.{field}`", argument)
        raise InvalidRequestError(text) from None
    except UnicodeEncodeError as error:
        raise InvalidRequestError(bad_text(error)) from None


def check_where(name: str, given: object, **arguments: str) -> None:
    """
    Check an argument that takes a keyword for a position, such as "earliest", "offset" or "time".

    Args:
        name: name of the argument.
        arguments: keyword → name of the further argument that it needs.

    Raises:
        InvalidRequestError: the caller passed the position itself; the hint names the
            argument for it.
    """
    for word, kinds in _PLACES:
        if word in arguments and isinstance(given, kinds) and not isinstance(given, bool):
            break
    else:
        if not isinstance(given, str) or not given.isdecimal() or "offset" not in arguments:
            return
        word = "offset"
    words = ", ".join(repr(each) for each in ("earliest", "latest", *arguments))
    error = InvalidRequestError(f"{name} is one of {words}, not {given!r:.60}")
    place = "milliseconds since 1970" if isinstance(given, datetime) else f"{given!s:.60}"
    error.hint = (
        f"Give the place itself as {arguments[word]}=: {name}={word!r}, {arguments[word]}={place}."
    )
    raise error


_PLACES: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("offset", int),
    ("time", (int, datetime)),
    ("cursors", Mapping),
)
"""Word → types of a value that callers pass by mistake in place of the word."""


def mapping_of(name: str, given: object) -> dict[Any, Any]:
    """Return the argument `name` as a dict. Raises InvalidRequestError: it is not a mapping."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{name} must be a mapping, not {given!r:.60}")
    return dict(given)


def grant_change(principal: str, right: Rights | str, subject: str, group: str) -> ChangeGrant:
    """Build the body of a call that grants or revokes a right. Raises InvalidRequestError."""
    check_principal(principal)
    check_granted(right)
    fields = {"right": right, "subject": subject, "group": group}
    return ChangeGrant(principal=principal, grant=check_grant(checked(AccessGrant, fields)))


def principal_query(principal: str | None) -> dict[str, str] | None:
    """Return the query that selects one principal; None selects all. Raises InvalidRequestError."""
    return None if principal is None else {"principal": check_principal(principal)}


def instant_ms(name: str, at: datetime | None) -> int:
    """
    Convert the argument `name` to milliseconds since 1970; None becomes 0.

    Raises:
        InvalidRequestError: it is not a datetime with a time zone.
    """
    if at is None:
        return 0
    if not isinstance(at, datetime) or is_not_a_time(at):
        raise InvalidRequestError(f"{name} must be a datetime with a time zone, not {at!r:.60}")
    if at.utcoffset() is None:
        raise InvalidRequestError(f"{name} needs a time zone: {at.isoformat()}")
    return since_1970_ms(at)

"""The arguments of calls, checked against the types that go over the wire.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ..protocol.errors import InvalidRequestError
from ..protocol.text import bad_text, refused_value

T = TypeVar("T")


def checked(kind: type[T], given: object, **arguments: str) -> T:
    """
    What a caller gave, as the type that goes over the wire.

    Args:
        arguments: the argument of each field that has another name than its argument.

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


def mapping_of(name: str, given: object) -> dict[Any, Any]:
    """The mapping that a caller gave as the argument `name`.  Raises InvalidRequestError: it is none."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{name} must be a mapping, not {given!r:.60}")
    return dict(given)

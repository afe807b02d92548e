"""The arguments of calls, checked against the types that go over the wire.  Pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..protocol.errors import InvalidRequestError
from ..protocol.text import refused_value

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

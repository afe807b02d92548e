"""Encodes the JSON bodies of calls, and checks their strings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ..errors import InvalidRequestError
from ..ids import check_name
from ..text import invalid_unicode_text


def _to_plain_type(value: object) -> str | int | float:
    """Convert an instance of a subclass of str, int or float, such as numpy's types, which msgspec
    does not encode.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be sent in JSON")


encode_json = msgspec.json.Encoder(enc_hook=_to_plain_type).encode


def encode_body(body: object) -> bytes:
    """Encode a call's body, or return b"" for None. Raises InvalidRequestError if a string in the
    body is not valid Unicode.
    """
    try:
        return b"" if body is None else encode_json(body)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(invalid_unicode_text(error)) from None


NAMES = frozenset({"subject", "group", "broker_group", "instance"})
"""The parameters and fields whose values are names."""


def check_no_nul(call: str, body: bytes, params: Mapping[str, str]) -> None:
    """
    Check that no string of a call contains U+0000, which PostgreSQL cannot store. SQLite could
    store it, but both must accept the same calls.

    Args:
        body: JSON, or b"".
        params: the parameters from the path, the query and the headers.

    Raises:
        InvalidRequestError: a string contains it. The text names the first such field.
    """
    given: object = params
    # JSON can contain it only as an escape. This may also match an escaped backslash before u0000.
    if b"\\u0000" in body:
        given = [params, msgspec.json.decode(body)]
    for field, text in _texts_with_nul(given, ""):
        if field in NAMES:
            check_name(field.replace("_", " "), text)
        raise InvalidRequestError(f"{call}: {field[:80]!r} has the character U+0000")


def _texts_with_nul(value: object, field: str) -> Iterator[tuple[str, str]]:
    """Yield the field name and the value of each string that contains U+0000."""
    if isinstance(value, str):
        if "\0" in value:
            yield field, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts_with_nul(name, "name of a field")
            yield from _texts_with_nul(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_with_nul(item, field)

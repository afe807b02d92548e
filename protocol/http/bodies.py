"""Encoding and checks of the JSON in calls and answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ..errors import InvalidRequestError
from ..ids import check_name
from ..text import bad_text


def _plain(value: object) -> str | int | float:
    """Return the plain value of an object whose class derives from text or a number, for example
    numpy's; the packer knows no such class.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no type of the wire")


encode_json = msgspec.json.Encoder(enc_hook=_plain).encode


def encode_body(body: object) -> bytes:
    """Return the bytes of a call's body, b"" for None. Raises InvalidRequestError if a text in it
    is not valid Unicode.
    """
    try:
        return b"" if body is None else encode_json(body)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(bad_text(error)) from None


NAMES = frozenset({"subject", "group", "broker_group", "instance"})
"""Parameters and fields whose values are names."""


def check_no_nul(call: str, body: bytes, params: Mapping[str, str]) -> None:
    """
    Check that no text of a call contains U+0000: PostgreSQL cannot store it, and both databases
    take the same calls.

    Args:
        body: JSON, or b"".
        params: parameters from path, query and headers.

    Raises:
        InvalidRequestError: names the first place that contains it.
    """
    given: object = params
    # JSON has it as an escape alone; an escaped backslash may stand before such letters.
    if b"\\u0000" in body:
        given = [params, msgspec.json.decode(body)]
    for place, text in _texts_with_nul(given, ""):
        if place in NAMES:
            check_name(place.replace("_", " "), text)
        raise InvalidRequestError(f"{call}: {place[:80]!r} has the character U+0000")


def _texts_with_nul(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield the field's name and the text of each text that contains it."""
    if isinstance(value, str):
        if "\0" in value:
            yield place, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts_with_nul(name, "name of a field")
            yield from _texts_with_nul(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_with_nul(item, place)

"""JSON as calls and answers carry it.  Pure."""

from __future__ import annotations

import msgspec

from ..errors import InvalidRequestError
from ..text import bad_text


def _plain(value: object) -> str | int | float:
    """The value of a class that derives from text or a number, as those of numpy do; the packer knows none of them."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no type of the wire")


encode_json = msgspec.json.Encoder(enc_hook=_plain).encode


def encode_body(body: object) -> bytes:
    """What a call carries, b"" for None.  Raises InvalidRequestError: a text in it is none of Unicode."""
    try:
        return b"" if body is None else encode_json(body)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(bad_text(error)) from None

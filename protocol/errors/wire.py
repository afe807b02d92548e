"""Errors as they cross a wire: cut to size, text in what every peer can decode, and back again.  Pure."""

from __future__ import annotations

from typing import Any

from . import KeylaneError, RefusedError, kind_of

TEXT_CHARS_MAX = 4_096
"""An error that quotes its input stays smaller than the frame it is answered in."""


def wire_text(text: str) -> str:
    """`text` as every peer can take it: cut, and without half surrogates."""
    return text[:TEXT_CHARS_MAX].encode("utf-8", "replace").decode()


def wire_details(error: KeylaneError) -> dict[str, Any]:
    """The details of `error` as both JSON and msgpack carry them: numbers, and text for the rest."""
    return {
        wire_text(name): value
        if isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**64)
        else wire_text(str(value))
        for name, value in error.details.items()
    }


def error_from_wire(code: int, message: str, details: dict[str, Any]) -> KeylaneError:
    """The error a peer sent, as the class of its code; an unknown code is a plain RefusedError."""
    kind = kind_of(code) or RefusedError
    return kind(message, **details)

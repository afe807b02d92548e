"""Errors to and from their form on the wire: texts are cut to size and valid in every peer.  Pure."""

from __future__ import annotations

from typing import Any

from . import KeylaneError, RefusedError, kind_of

TEXT_CHARS_MAX = 4_096
"""An error that quotes its input stays smaller than a frame."""


def wire_text(text: str) -> str:
    """`text` as every peer can decode it: at most TEXT_CHARS_MAX characters, without lone surrogates."""
    return text[:TEXT_CHARS_MAX].encode("utf-8", "replace").decode()


def wire_details(error: KeylaneError) -> dict[str, Any]:
    """The details of `error` as JSON and msgpack carry them: numbers, and every other value as text."""
    return {
        wire_text(name): value
        if isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**64)
        else wire_text(str(value))
        for name, value in error.details.items()
    }


def error_from_wire(code: int, message: str, details: dict[str, Any]) -> KeylaneError:
    """The error that a peer sent, of its code's class; a plain RefusedError if the code is unknown."""
    kind = kind_of(code) or RefusedError
    return kind(message, **details)

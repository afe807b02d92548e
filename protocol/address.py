"""Addresses as users give them.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import ConfigError


def addresses_of(meta: object) -> list[str]:
    """
    The addresses in `meta`: `host:port`, or several.  Whether anybody is there is for the connection to find out.

    Raises:
        ConfigError: none, or something that is no text.
    """
    given = [meta] if isinstance(meta, str) or not isinstance(meta, Iterable) else list(meta)
    found = [one for one in given if isinstance(one, str) and one]
    if not found or len(found) < len(given):
        raise ConfigError(f"meta is host:port of a metaserver, or several, not {meta!r:.80}")
    return found

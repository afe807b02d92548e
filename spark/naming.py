"""Explains an unknown option: it suggests the intended name, or lists all names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

_NAMES_ELSEWHERE = {
    "bootstrap.servers": "meta",
    "kafka.bootstrap.servers": "meta",
    "service.url": "meta",
    "nameserver": "meta",
    "topic": "subject",
    "topics": "subject",
    "subscribe": "subject",
    "assign": "partitions",
    "startingoffsets": "start",
    "startingtimestamp": "start",
    "startingtime": "start",
    "endingoffsets": "end",
    "endingtimestamp": "end",
    "endingtime": "end",
}
"""Names of other data sources for our options."""
_OPTION_ADVICE = (
    "a token is no option, because Spark shows options in plans and logs; write it into a file, "
    "and give tokenFile"
)


def advice(name: str, names: Sequence[str]) -> str:
    """
    Return the text about an unknown option.

    Args:
        names: the names of all options.
    """
    if name.lower() == "token":
        return _OPTION_ADVICE
    meant = _NAMES_ELSEWHERE.get(name.lower())
    if meant not in names:
        known = {each.lower(): each for each in names}
        near = get_close_matches(name.lower(), list(known), n=1)
        meant = known[near[0]] if near else None
    return f"unknown; did you mean {meant}?" if meant else f"unknown; there are {', '.join(names)}"

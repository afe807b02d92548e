"""What is said of an option that there is not: the name that was meant, or all names.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

_OF_OTHERS = {
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
"""The names that other sources have for these options."""
_OF_SECRETS = (
    "a token is no option, because Spark shows options in plans and logs; write it into a file, "
    "and give tokenFile"
)


def advice(name: str, names: Sequence[str]) -> str:
    """
    What is said of an unknown option.

    Args:
        names: of all options that there are.
    """
    if name.lower() == "token":
        return _OF_SECRETS
    meant = _OF_OTHERS.get(name.lower())
    if meant not in names:
        known = {each.lower(): each for each in names}
        near = get_close_matches(name.lower(), list(known), n=1)
        meant = known[near[0]] if near else None
    return f"unknown; did you mean {meant}?" if meant else f"unknown; there are {', '.join(names)}"

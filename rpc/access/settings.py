"""The settings about access that server programs share.  Pure."""

from __future__ import annotations

from collections.abc import Mapping

ON, OFF = "on", "off"


def access_problems(values: Mapping[str, object], *files: str) -> list[str]:
    """
    The problems of the setting `access` and its files, as sentences.

    Args:
        files: the settings that name files with tokens, all needed where access is on.
    """
    access = values.get("access", OFF)
    if access not in (ON, OFF):
        return [f"access is {ON} or {OFF}, not {access!r:.40}"]
    if access != ON:
        return []
    return [f"{name} is missing; access = {ON} needs it" for name in files if not values.get(name)]

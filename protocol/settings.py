"""Checks of settings; an error lists every problem. Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from .errors import ConfigError, InvalidRequestError
from .ids import check_name

CALL_TIMEOUT_MS = (10, 600_000)
"""Least and most milliseconds for one call."""


def values_of(settings: Any) -> dict[str, object]:
    """Return the values of a dataclass by name."""
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def whole(value: object) -> int | None:
    """Return the int of a whole number of any type, such as numpy's or an IntEnum; None for a bool
    and anything else.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # an array has the method too, and raises it
        return None


def is_within(value: object, low: int, high: int) -> bool:
    """Return True for an int in `[low, high]`, False for a bool."""
    return type(value) is int and low <= value <= high


def range_problems(
    values: Mapping[str, object], ranges: Mapping[str, tuple[int, int]]
) -> list[str]:
    """Return the problems of whole numbers as sentences; `ranges` has the least and most value by
    name.
    """
    return [
        range_problem(name, values[name], low, high)
        for name, (low, high) in ranges.items()
        if name in values and not is_within(values[name], low, high)
    ]


def range_problem(name: str, value: object, low: int, high: int) -> str:
    """Return the problem of `value`, which is not within `[low, high]`, or is a whole number of
    another type than int.
    """
    number = whole(value)
    advice = f": use int({number})" if number is not None and low <= number <= high else ""
    return f"{name} must be a whole number from {low} to {high}, not {value!r:.40}{advice}"


def flag_problems(**flags: object) -> list[str]:
    """Return the problems of switches as sentences: "no" and 0 would count as True and False, and
    None as a default.
    """
    return [
        f"{name} must be True or False, not {value!r:.40}"
        for name, value in flags.items()
        if value is not True and value is not False
    ]


def kind_problems(values: Mapping[str, object], kinds: Mapping[str, type]) -> list[str]:
    """Return the problems of values that are not whole numbers as sentences; `kinds` has the class
    by name.
    """
    return [
        f"{name} must be {'text' if kind is str else f'a {kind.__name__}'}, not "
        f"{values[name]!r:.40}"
        for name, kind in kinds.items()
        if name in values and not isinstance(values[name], kind)
    ]


def cluster_problems(values: Mapping[str, object]) -> list[str]:
    """Return the problems of the setting `cluster` as sentences."""
    cluster = values.get("cluster", "")
    if cluster == "":
        return []
    try:
        check_name("cluster", cluster)
    except InvalidRequestError as error:
        return [f"cluster: {error.message}"]
    return []


def refuse(problems: Sequence[str]) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if problems:
        raise ConfigError("; ".join(problems), problems=len(problems))


def refuse_call(problems: Sequence[str]) -> None:
    """Raise InvalidRequestError with all problems of a call on an open client, if there are any."""
    if problems:
        raise InvalidRequestError("; ".join(problems))


def refuse_others(
    what: str, others: Iterable[str], settings: type, words: Mapping[str, str]
) -> None:
    """
    Refuse keyword arguments that a client does not have.

    Args:
        what: name of the client.
        settings: class of the client's settings, in which a name may be.
        words: advice for names that other systems have.

    Raises:
        TypeError: there is at least one.
    """
    for name in others:
        known = [field.name for field in fields(settings)]
        near = [field for field in known if field.startswith(f"{name}_")]
        near = near or get_close_matches(name, known, n=1, cutoff=0.8)
        advice = words.get(name) or (f"did you mean {near[0]}?" if near else "")
        if name in known:
            advice = f"it is a setting: settings={settings.__name__}({name}=...)"
        raise TypeError(
            f"{what}() got an unexpected keyword argument {name!r}" + (advice and f": {advice}")
        )

"""Checks of settings: whole numbers within limits, objects of a class.  Pure."""

from __future__ import annotations

from collections.abc import Mapping

CALL_TIMEOUT_MS = (10, 600_000)
"""The least and the most time for one call."""


def is_within(value: object, low: int, high: int) -> bool:
    """True for a whole number in `[low, high]`; a bool is none."""
    return type(value) is int and low <= value <= high


def kind_problems(settings: object, kinds: Mapping[str, type]) -> list[str]:
    """What is wrong with the attributes of `settings` that `kinds` names, each with its class."""
    return [
        f"{name} must be a {kind.__name__}, not {getattr(settings, name)!r:.40}"
        for name, kind in kinds.items()
        if not isinstance(getattr(settings, name), kind)
    ]


def range_problems(settings: object, ranges: Mapping[str, tuple[int, int]]) -> list[str]:
    """What is wrong with the attributes of `settings` that `ranges` names, each with the least and the most it may be."""
    return [
        f"{name} must be a whole number from {low} to {high}, not {getattr(settings, name)!r:.40}"
        for name, (low, high) in ranges.items()
        if not is_within(getattr(settings, name), low, high)
    ]

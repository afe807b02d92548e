"""Checks of settings that are whole numbers within limits.  Pure."""

from __future__ import annotations

from collections.abc import Mapping

CALL_TIMEOUT_MS = (10, 600_000)
"""The least and the most time for one call."""


def is_within(value: object, low: int, high: int) -> bool:
    """True for a whole number in `[low, high]`, False for a bool."""
    return type(value) is int and low <= value <= high


def range_problems(settings: object, ranges: Mapping[str, tuple[int, int]]) -> list[str]:
    """
    The problems of settings that must be whole numbers, as sentences.

    Args:
        ranges: name of an attribute of `settings` → its least and most value.
    """
    return [
        f"{name} must be a whole number from {low} to {high}, not {getattr(settings, name)!r:.40}"
        for name, (low, high) in ranges.items()
        if not is_within(getattr(settings, name), low, high)
    ]

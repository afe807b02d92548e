"""Finds hot partitions: those that store far more than the others of their subject. Pure."""

from __future__ import annotations

from collections.abc import Mapping

HOT_FACTOR = 3
"""A hot partition stores more than this many times what the others store on average."""
HOT_MESSAGES_PER_S = 100
HOT_BYTES_PER_S = 100_000
"""The rates below which no partition is hot, because any broker can store that."""


def find_hot(rates: Mapping[int, tuple[float, float]]) -> set[int]:
    """
    Return the ids of the hot partitions of a subject.

    Args:
        rates: maps the ids of its open partitions to messages and bytes a second.
    """
    floors = (HOT_MESSAGES_PER_S, HOT_BYTES_PER_S)
    hot: set[int] = set()
    for figure, floor in enumerate(floors):
        figures = {partition_id: rate[figure] for partition_id, rate in rates.items()}
        hot |= _find_outliers(figures, floor)
    return hot


def _find_outliers(figures: Mapping[int, float], floor: float) -> set[int]:
    total, others = sum(figures.values()), len(figures) - 1
    return {
        partition_id
        for partition_id, figure in figures.items()
        if others and figure > floor and figure * others > HOT_FACTOR * (total - figure)
    }

"""Partitions that continue others: what is known of a subject's lineage, past the partitions that
do not count.  Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

N = TypeVar("N", bound=int)


def nearest_ancestors(
    parents: Mapping[N, Iterable[N]], within: Collection[N]
) -> dict[N, frozenset[N]]:
    """
    Partition id → those of `within` that it continues, at once or through partitions that are not
    in it.

    Args:
        parents: partition id → the partitions that it continues at once, which have lower ids; one
            that is missing has none.
    """
    nearest: dict[N, frozenset[N]] = {}
    for number in sorted(parents):
        above: set[N] = set()
        for parent in parents[number]:
            above |= {parent} if parent in within else nearest.get(parent, frozenset())
        nearest[number] = frozenset(above)
    return nearest

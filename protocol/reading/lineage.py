"""The lineage of a subject, reduced to some of its partitions. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

N = TypeVar("N", bound=int)


def nearest_ancestors(
    parents: Mapping[N, Iterable[N]], within: Collection[N]
) -> dict[N, frozenset[N]]:
    """
    Return the partitions of `within` that each partition continues, directly or through partitions
    that are not in `within`.

    Args:
        parents: by partition id, the partitions that it continues directly, which have lower ids; a
            partition that is missing has none.
    """
    nearest: dict[N, frozenset[N]] = {}
    for number in sorted(parents):
        above: set[N] = set()
        for parent in parents[number]:
            above |= {parent} if parent in within else nearest.get(parent, frozenset())
        nearest[number] = frozenset(above)
    return nearest

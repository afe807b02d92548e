"""Places a point in time in partitions that continue one another, so that no unread message
precedes a read one in order. Pure.

    parent   0 1 2 3 4 5│        the point is at 4: messages are left
    child                0 1 2   its broker's clock was slow: by its own times the point is at 2
                         ╰─ the point is here: 0 and 1 are later in order than 4 and 5

Invariant
    Points that are in order in each partition are in order after they are placed: ranges `[a, b)`
    and `[b, c)` that are placed over the same partitions have neither a gap nor an overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnPlace:
    """The place of a point in a partition with the offsets `[first, end)`, by that partition's own
    times.
    """

    first: int
    end: int
    at: int
    """First message at or after the point; `end`: there is none."""


def place_in_order(
    own: Mapping[int, OwnPlace], parents: Mapping[int, Collection[int]]
) -> dict[int, int]:
    """
    Return the offset of a point by partition id: the first message if an ancestor has messages at
    or after the point, else its own place.

    Args:
        own: own place by partition id.
        parents: by partition id, the partitions that it continues, which have lower ids; partitions
            that are not in `own` are needed too, because lineage passes through them.
    """
    places: dict[int, int] = {}
    unfinished: set[int] = set()
    """Partitions that have messages after the point, and all that continue them."""
    for number in sorted(own.keys() | parents.keys()):
        waits = not unfinished.isdisjoint(parents.get(number, ()))
        place = own.get(number)
        if place is not None:
            places[number] = place.first if waits else place.at
        if waits or (place is not None and place.at < place.end):
            unfinished.add(number)
    return places

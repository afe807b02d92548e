"""Where a point is in partitions that continue one another, so that no message is passed over
behind one that is read.  Pure.

    parent   0 1 2 3 4 5│        the point is at 4: messages are left
    child                0 1 2   its broker's clock was behind: by its own times the point is at 2
                         ╰─ the point is here: 0 and 1 are later in order than 4 and 5

Invariant
    Points that are in order in each partition are in order when they are placed: ranges `[a, b)`
    and `[b, c)` meet that are placed over the same partitions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnPlace:
    """A point in a partition that has the offsets `[first, end)`, as that partition alone has
    it.
    """

    first: int
    end: int
    at: int
    """The first message at or behind the point; `end`: there is none."""


def place_in_order(
    own: Mapping[int, OwnPlace], parents: Mapping[int, Collection[int]]
) -> dict[int, int]:
    """
    Partition id → the offset of a point: the first message if an ancestor has messages at or behind
    the point, else its own.

    Args:
        own: by partition id.
        parents: partition id → the partitions that it continues, which have lower ids; also of
            those that are not in `own`, as theirs go through them.
    """
    places: dict[int, int] = {}
    unfinished: set[int] = set()
    """Those that have messages behind the point, and all that continue them."""
    for number in sorted(own.keys() | parents.keys()):
        waits = not unfinished.isdisjoint(parents.get(number, ()))
        place = own.get(number)
        if place is not None:
            places[number] = place.first if waits else place.at
        if waits or (place is not None and place.at < place.end):
            unfinished.add(number)
    return places

"""Bodies of the call that plans a read: first and end offsets of partitions, and the offsets of a
time or a group in them. Pure.

The lineage of a subject, reduced to some of its partitions.

Places a point in time in partitions that continue one another, so that no unread message precedes
a read one in order.

    parent   0 1 2 3 4 5│        the point is at 4: messages are left
    child                0 1 2   its broker's clock was slow: by its own times the point is at 2
                         ╰─ the point is here: 0 and 1 are later in order than 4 and 5

Invariant
    Points that are in order in each partition are in order after they are placed: ranges `[a, b)`
    and `[b, c)` that are placed over the same partitions have neither a gap nor an overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from ..ids import MAX_I64
from ..progress import AtMs

BOUNDS_AT_ONCE_MAX = 1_000
"""Most partitions in one call; more would block the event loop of the broker too long."""


class BoundsOf(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The question about one partition."""

    partition_id: Annotated[int, Meta(ge=1, le=MAX_I64)]
    at_ms: Annotated[tuple[AtMs, ...], Meta(max_length=2)] = ()
    """Times for which to find the first message stored at or after them: milliseconds since 1970.
    """
    groups: Annotated[tuple[str, ...], Meta(max_length=2)] = ()
    """Consumer groups whose cursors are wanted."""


class AskBounds(Struct, frozen=True, kw_only=True):
    """Ask for the bounds of partitions."""

    partitions: Annotated[list[BoundsOf], Meta(max_length=BOUNDS_AT_ONCE_MAX)]


class PartitionBounds(Struct, frozen=True, kw_only=True):
    """The messages that a partition stores: those with the offsets `[first_offset,
    next_offset)`.
    """

    partition_id: int
    first_offset: int
    next_offset: int
    first_at_ms: int | None = None
    """Time when the first of them was stored, in milliseconds since 1970; None: there is none."""
    removed_from_ms: int | None = None
    """Earliest time when retention may remove the first of them, in milliseconds since 1970, unless
    a group or a job needs it then; None: retention removes it neither by age nor by the size of the
    log.
    """
    message_bytes: int = 0
    """Approximate bytes of log for one message: the mean of the first batch."""
    offsets_at: tuple[int | None, ...] = ()
    """First offset stored at or after each wanted time; None: there is none."""
    cursors: tuple[int | None, ...] = ()
    """Durable cursor of each wanted group; None: it has not read here."""


class BoundsList(Struct, frozen=True, kw_only=True):
    """The bounds of those wanted partitions that the broker hosts, in the order of the question."""

    broker_group: str
    partitions: list[PartitionBounds]


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

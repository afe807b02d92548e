"""The bodies of the call that plans a read, and the bounds of a read in each partition. Pure.

`order_points` converts a point in time to an offset in each partition of a lineage. A read up to
these offsets contains no message without all earlier messages of its key.

    parent   0 1 2 3 4 5│        the point is at 4: messages remain after it
    child                0 1 2   its broker's clock was slow: by its own times the point is at 2
                         ╰─ the point moves to 0, because 0 and 1 follow 4 and 5 in order

Invariant
    The conversion preserves the order of points: between the ranges `[a, b)` and `[b, c)` of the
    same partitions, there is neither a gap nor an overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from ..ids import MAX_I64
from ..progress import AtMs

BOUNDS_AT_ONCE_MAX = 1_000
"""The maximum number of partitions in one call. More would block the broker's event loop for too
long.
"""


class BoundsOf(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A query for the bounds of one partition."""

    partition_id: Annotated[int, Meta(ge=1, le=MAX_I64)]
    at_ms: Annotated[tuple[AtMs, ...], Meta(max_length=2)] = ()
    """Times in milliseconds since 1970. For each, the first message stored at or after it is looked
    up.
    """
    groups: Annotated[tuple[str, ...], Meta(max_length=2)] = ()
    """The consumer groups whose cursors are requested."""


class AskBounds(Struct, frozen=True, kw_only=True):
    """Request the bounds of partitions."""

    partitions: Annotated[list[BoundsOf], Meta(max_length=BOUNDS_AT_ONCE_MAX)]


class PartitionBounds(Struct, frozen=True, kw_only=True):
    """The bounds of a partition that stores the offsets `[first_offset, next_offset)`."""

    partition_id: int
    first_offset: int
    next_offset: int
    first_at_ms: int | None = None
    """The time at which its first message was stored, in milliseconds since 1970; None if it has no
    messages.
    """
    removed_from_ms: int | None = None
    """The earliest time at which retention may remove its first message, in milliseconds since
    1970, unless a group or a job still needs that message; None if retention by age and by size is
    off.
    """
    message_bytes: int = 0
    """The approximate size of a message in the log, in bytes: the mean of the first batch."""
    offsets_at: tuple[int | None, ...] = ()
    """The first offset stored at or after each requested time; None if there is none."""
    cursors: tuple[int | None, ...] = ()
    """The durable cursor of each requested group; None if the group has not read the partition."""


class BoundsList(Struct, frozen=True, kw_only=True):
    """The bounds of the requested partitions that the broker hosts, in the order of the request."""

    broker_group: str
    partitions: list[PartitionBounds]


N = TypeVar("N", bound=int)


def nearest_ancestors(
    parents: Mapping[N, Iterable[N]], within: Collection[N]
) -> dict[N, frozenset[N]]:
    """
    Return the nearest ancestors of each partition that are in `within`.

    Args:
        parents: maps partition ids to parents, which have lower ids. A partition that is missing
            has no parents.
    """
    nearest: dict[N, frozenset[N]] = {}
    for partition_id in sorted(parents):
        ancestors: set[N] = set()
        for parent in parents[partition_id]:
            ancestors |= {parent} if parent in within else nearest.get(parent, frozenset())
        nearest[partition_id] = frozenset(ancestors)
    return nearest


@dataclass(frozen=True, slots=True)
class LocalPoint:
    """A point in time as an offset of one partition, which stores the offsets `[first, end)`,
    according to the partition's own clock.
    """

    first: int
    end: int
    at: int
    """The first message at or after the point, or `end` if there is none."""


def order_points(
    own_points: Mapping[int, LocalPoint], parents: Mapping[int, Collection[int]]
) -> dict[int, int]:
    """
    Return a dict that maps partition ids to the offset of a point: the first offset if an ancestor
    has messages at or after the point, otherwise `LocalPoint.at`.

    Args:
        own_points: maps partition ids to the point according to each partition's own clock.
        parents: maps partition ids to parents, which have lower ids. Also contains partitions that
            are not in `own_points`, because the lineage passes through them.
    """
    offsets: dict[int, int] = {}
    pending_ids: set[int] = set()
    """The partitions with messages at or after the point, and all their descendants."""
    for partition_id in sorted(own_points.keys() | parents.keys()):
        follows_unread = not pending_ids.isdisjoint(parents.get(partition_id, ()))
        point = own_points.get(partition_id)
        if point is not None:
            offsets[partition_id] = point.first if follows_unread else point.at
        if follows_unread or (point is not None and point.at < point.end):
            pending_ids.add(partition_id)
    return offsets

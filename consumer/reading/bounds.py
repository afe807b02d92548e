"""Parses the `start` and `stop` of a reader, and resolves them to offsets of a partition. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ...protocol.errors import InvalidRequestError, OffsetOutOfRangeError
from ...protocol.ids import check_offset
from ...protocol.reading.bounds import LocalPoint, order_points
from ...protocol.reading.instants import parse_instant_ms
from ...protocol.routing import Partition

Start = str | int | datetime | timedelta | Mapping[int, int] | Mapping[str, int]
"""
"earliest", "latest", a point in time, an offset in the one partition that is read, or a mapping
from partition ids to offsets.

The ids may also be strings, because JSON turns them into strings: `{"7": 1200}` is `{7: 1200}`.
"""
Stop = str | int | datetime | timedelta
"""\"latest\", an instant, or an offset in the one partition that is read."""

_ID = re.compile(r"0|[1-9][0-9]{0,18}")


class BoundKind(enum.Enum):
    """The kind of a bound."""

    EARLIEST = enum.auto()
    LATEST = enum.auto()
    TIME = enum.auto()
    OFFSETS = enum.auto()


@dataclass(frozen=True, slots=True)
class Bound:
    """The start or the stop of a reader, for all partitions."""

    kind: BoundKind
    at_ms: int = 0
    """The time of a TIME bound, in milliseconds since 1970."""
    offsets: Mapping[int, int] = field(default_factory=dict)
    """The offsets of an OFFSETS bound, by partition id; other partitions are read from their first
    message.
    """


def start_bound(start: Start, *, partition: int | None, now_ms: int) -> Bound:
    """
    Parse `start`, the point at which reading begins.

    Raises:
        InvalidRequestError: `start` is not a valid bound.
    """
    if isinstance(start, Mapping):
        return Bound(BoundKind.OFFSETS, offsets=_parse_offsets(start))
    if isinstance(start, str) and start == "earliest":
        return Bound(BoundKind.EARLIEST)
    return _parse_bound("start", start, partition, now_ms, keywords="'earliest', 'latest'")


def _parse_offsets(start: Mapping[int, int] | Mapping[str, int]) -> dict[int, int]:
    """Return the mapping with integer ids. Raises InvalidRequestError."""
    offsets: dict[int, int] = {}
    for key, offset in start.items():
        partition_id: object = key
        if isinstance(key, str) and _ID.fullmatch(key):
            partition_id = int(key)
        if type(partition_id) is not int:
            raise InvalidRequestError(
                f"start maps partition ids to offsets; {key!r:.40} is not a partition id"
            )
        if partition_id in offsets:
            raise InvalidRequestError(
                f"start has partition {partition_id} twice: as a number and as text"
            )
        check_offset(offset)
        offsets[partition_id] = offset
    return offsets


def stop_bound(stop: Stop, *, partition: int | None, now_ms: int) -> Bound:
    """
    Parse `stop`, the first message that is not read.

    Raises:
        InvalidRequestError: `stop` is not a valid bound.
    """
    return _parse_bound("stop", stop, partition, now_ms, keywords="'latest'")


def _parse_bound(
    name: str, value: Any, partition: int | None, now_ms: int, *, keywords: str
) -> Bound:
    if isinstance(value, str) and value == "latest":
        return Bound(BoundKind.LATEST)
    if isinstance(value, int) and not isinstance(value, bool):
        check_offset(value)
        if partition is None:
            raise InvalidRequestError(
                f"{name}={value} is an offset, which is relative to one partition: also pass "
                "`partition`"
            )
        return Bound(BoundKind.OFFSETS, offsets={partition: value})
    if not isinstance(value, str | datetime | timedelta):
        raise InvalidRequestError(
            f"{name} must be {keywords}, a datetime, how long ago (a negative timedelta, or "
            f"'-1h'), or an offset, not {value!r:.60}"
        )
    try:
        return Bound(BoundKind.TIME, at_ms=parse_instant_ms(value, now_ms=now_ms))
    except InvalidRequestError as error:
        hint = f"; or pass {keywords}" if isinstance(value, str) else ""
        raise InvalidRequestError(f"{name}: {error.message}{hint}") from None


def resolve_start(
    bound: Bound, partition_id: int, *, first: int, end: int, at_time: int | None
) -> int:
    """
    Return the offset of the first message to read from a partition.

    Args:
        first: the first stored offset.
        end: one past the last offset.
        at_time: for a TIME bound, the first offset stored at or after it; None if there is none.

    Raises:
        OffsetOutOfRangeError: the program passed an offset outside `[first, end]`.
    """
    if bound.kind is BoundKind.LATEST:
        return end
    if bound.kind is BoundKind.TIME:
        return end if at_time is None else max(first, at_time)
    offset = bound.offsets.get(partition_id)
    return first if offset is None else _check_stored(offset, partition_id, first, end)


def resolve_stop(
    bound: Bound, partition_id: int, *, first: int, end: int, at_time: int | None
) -> int:
    """Return one past the offset of the last message to read from a partition. The arguments and
    errors are those of `resolve_start`.
    """
    if bound.kind is BoundKind.TIME:
        return end if at_time is None else at_time
    offset = bound.offsets.get(partition_id)
    return end if offset is None else _check_stored(offset, partition_id, first, end)


@dataclass(frozen=True, slots=True)
class OffsetLookup:
    """A partition's stored offsets `[first, end)`, and the offsets that its time bounds resolve to;
    None where no message is that late.
    """

    partition: Partition
    first: int
    end: int
    start_at: int | None
    stop_at: int | None


def ranges_to_read(
    start: Bound,
    stop: Bound,
    partitions: Sequence[OffsetLookup],
    parents: Mapping[int, Collection[int]],
) -> list[tuple[int, int]]:
    """
    Return the offsets `[begin, end)` to read from each partition.

    Time bounds are adjusted along the lineage: if one lies within a partition, every message of the
    partition's children comes after it.

    Args:
        parents: the parents of every partition that may have wanted messages, by id.

    Raises:
        OffsetOutOfRangeError: the program passed an offset that is not stored.
    """
    begins, ends = {}, {}
    for entry in partitions:
        partition_id, first, end = int(entry.partition.partition_id), entry.first, entry.end
        begins[partition_id] = LocalPoint(
            first,
            end,
            resolve_start(start, partition_id, first=first, end=end, at_time=entry.start_at),
        )
        ends[partition_id] = LocalPoint(
            first,
            end,
            resolve_stop(stop, partition_id, first=first, end=end, at_time=entry.stop_at),
        )
    ranges = zip(
        _in_lineage_order(start, begins, parents),
        _in_lineage_order(stop, ends, parents),
        strict=True,
    )
    return list(ranges)


def _in_lineage_order(
    bound: Bound, own_offsets: Mapping[int, LocalPoint], parents: Mapping[int, Collection[int]]
) -> list[int]:
    if bound.kind is not BoundKind.TIME:
        return [position.at for position in own_offsets.values()]
    position_by_id = order_points(own_offsets, parents)
    return [position_by_id[partition_id] for partition_id in own_offsets]


def _check_stored(offset: int, partition_id: int, first: int, end: int) -> int:
    if not first <= offset <= end:
        raise OffsetOutOfRangeError(
            f"partition {partition_id} has offsets {first} to {end}, not {offset}",
            partition_id=partition_id,
            offset=offset,
            first_offset=first,
            next_offset=end,
        )
    return offset

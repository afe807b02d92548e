"""The places at which a reader begins and stops, as the program gives them, and the resulting
offsets of a partition. Pure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ...protocol.errors import InvalidRequestError, OffsetOutOfRangeError
from ...protocol.ids import check_offset
from ...protocol.reading.bounds import OwnPlace, place_in_order
from ...protocol.reading.instants import instant_ms
from ...protocol.routing import Partition

Start = str | int | datetime | timedelta | Mapping[int, int] | Mapping[str, int]
"""
\"earliest\", \"latest\", an instant, an offset of the one partition that is read, or offsets by
partition id.

JSON makes the ids text: `{"7": 1200}` is `{7: 1200}`.
"""
Stop = str | int | datetime | timedelta
"""\"latest\", an instant, or an offset of the one partition that is read."""

_ID = re.compile(r"0|[1-9][0-9]{0,18}")


class BoundKind(enum.Enum):
    """The kind of a bound."""

    EARLIEST = enum.auto()
    LATEST = enum.auto()
    TIME = enum.auto()
    OFFSETS = enum.auto()


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound over all partitions."""

    kind: BoundKind
    at_ms: int = 0
    """The time for TIME, in milliseconds since 1970."""
    offsets: Mapping[int, int] = field(default_factory=dict)
    """The offsets for OFFSETS, by partition id; every other partition is read from its first
    message.
    """


def start_bound(start: Start, *, partition: int | None, now_ms: int) -> Bound:
    """
    Return the bound that a program means by `start`.

    Raises:
        InvalidRequestError
    """
    if isinstance(start, Mapping):
        return Bound(BoundKind.OFFSETS, offsets=_offsets(start))
    if isinstance(start, str) and start == "earliest":
        return Bound(BoundKind.EARLIEST)
    return _bound("start", start, partition, now_ms, words="'earliest', 'latest'")


def _offsets(start: Mapping[int, int] | Mapping[str, int]) -> dict[int, int]:
    """Return the offsets by partition id. Raises InvalidRequestError."""
    offsets: dict[int, int] = {}
    for given, offset in start.items():
        partition_id: object = given
        if isinstance(given, str) and _ID.fullmatch(given):
            partition_id = int(given)
        if type(partition_id) is not int:
            raise InvalidRequestError(
                f"start maps partition ids to offsets; {given!r:.40} is no partition id"
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
    Return the bound that a program means by `stop`: the first message that is not read any more.

    Raises:
        InvalidRequestError
    """
    return _bound("stop", stop, partition, now_ms, words="'latest'")


def _bound(name: str, given: Any, partition: int | None, now_ms: int, *, words: str) -> Bound:
    if isinstance(given, str) and given == "latest":
        return Bound(BoundKind.LATEST)
    if isinstance(given, int) and not isinstance(given, bool):
        check_offset(given)
        if partition is None:
            raise InvalidRequestError(
                f"{name}={given} is an offset, which counts the messages of one partition: name it "
                f"with `partition`"
            )
        return Bound(BoundKind.OFFSETS, offsets={partition: given})
    if not isinstance(given, str | datetime | timedelta):
        raise InvalidRequestError(
            f"{name} is {words}, a datetime, how long ago (a negative timedelta, or "
            f"'-1h'), or an offset, "
            f"not {given!r:.60}"
        )
    try:
        return Bound(BoundKind.TIME, at_ms=instant_ms(given, now_ms=now_ms))
    except InvalidRequestError as error:
        hint = f"; or give {words}" if isinstance(given, str) else ""
        raise InvalidRequestError(f"{name}: {error.message}{hint}") from None


def first_to_read(
    bound: Bound, partition_id: int, *, first: int, end: int, at_time: int | None
) -> int:
    """
    Return the offset at which reading begins.

    Args:
        first: the first offset that is stored.
        end: the offset after the last message.
        at_time: for TIME, the first offset stored at or after it; None: there is none.

    Raises:
        OffsetOutOfRangeError: the program named an offset that is not in `[first, end]`.
    """
    if bound.kind is BoundKind.LATEST:
        return end
    if bound.kind is BoundKind.TIME:
        return end if at_time is None else max(first, at_time)
    offset = bound.offsets.get(partition_id)
    return first if offset is None else _checked(offset, partition_id, first, end)


def end_of_read(
    bound: Bound, partition_id: int, *, first: int, end: int, at_time: int | None
) -> int:
    """Return the offset after the last one to read; the arguments and errors are those of
    `first_to_read`.
    """
    if bound.kind is BoundKind.TIME:
        return end if at_time is None else at_time
    offset = bound.offsets.get(partition_id)
    return end if offset is None else _checked(offset, partition_id, first, end)


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The stored offsets `[first, end)` of a partition, and the offsets of the bounds that are
    times; None if there is no such message.
    """

    partition: Partition
    first: int
    end: int
    start_at: int | None
    stop_at: int | None


def ranges_to_read(
    start: Bound, stop: Bound, looked: Sequence[LookedUp], parents: Mapping[int, Collection[int]]
) -> list[tuple[int, int]]:
    """
    Return the offsets `[begin, end)` to read of each partition; bounds that are times are placed in
    order.

    Args:
        parents: the parents of every partition that may have wanted messages, by id.

    Raises:
        OffsetOutOfRangeError: the program named an offset that is not stored.
    """
    begins, ends = {}, {}
    for each in looked:
        number, first, end = int(each.partition.partition_id), each.first, each.end
        begins[number] = OwnPlace(
            first, end, first_to_read(start, number, first=first, end=end, at_time=each.start_at)
        )
        ends[number] = OwnPlace(
            first, end, end_of_read(stop, number, first=first, end=end, at_time=each.stop_at)
        )
    placed = zip(_placed(start, begins, parents), _placed(stop, ends, parents), strict=True)
    return list(placed)


def _placed(
    bound: Bound, own: Mapping[int, OwnPlace], parents: Mapping[int, Collection[int]]
) -> list[int]:
    if bound.kind is not BoundKind.TIME:
        return [place.at for place in own.values()]
    places = place_in_order(own, parents)
    return [places[number] for number in own]


def _checked(offset: int, partition_id: int, first: int, end: int) -> int:
    if not first <= offset <= end:
        raise OffsetOutOfRangeError(
            f"partition {partition_id} has offsets from {first} to {end}, and not {offset}",
            partition_id=partition_id,
            offset=offset,
            first_offset=first,
            next_offset=end,
        )
    return offset

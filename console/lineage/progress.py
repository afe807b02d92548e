"""How far a consumer group has read each logical partition: the lines through the picture. Pure.

A group reads the partitions of a logical partition one after the other, so it is in one of them at
a time: in the first that it has not drained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...admin.views import PartitionDescription
from ...protocol.limits import LOGICAL_PARTITIONS
from .bands import Band


@dataclass(frozen=True, slots=True)
class FrontStep:
    """The logical partitions `[range_start, range_end)`, whose messages a group reads in a band."""

    range_start: int
    range_end: int
    band: Band
    acked: float | None
    """The share of the band's messages that the group need not read any more, from 0 to 1; None if
    its broker does not say.
    """


def find_front(
    bands: Sequence[Band], descriptions: Mapping[int, PartitionDescription], group: str
) -> list[FrontStep]:
    """
    Return where a group is on every logical partition, in their order.

    Args:
        bands: all bands, in the order in which they begin.
        descriptions: the partitions that have data, by id.
    """
    place: list[tuple[Band, float | None] | None] = [None] * LOGICAL_PARTITIONS
    for band in reversed(bands):
        acked = acked_share(band, descriptions.get(band.partition.partition_id), group)
        low, high = band.partition.range_start, band.partition.range_end
        if acked != 1:
            place[low:high] = [(band, acked)] * (high - low)
        else:  # it has drained this one, and is in a later one wherever there is one
            done = (band, acked)
            place[low:high] = [each or done for each in place[low:high]]
    steps = []
    for at, run in groupby(range(LOGICAL_PARTITIONS), key=place.__getitem__):
        numbers = list(run)
        if at is not None:
            steps.append(FrontStep(numbers[0], numbers[-1] + 1, *at))
    return steps


def acked_share(band: Band, description: PartitionDescription | None, group: str) -> float | None:
    """Return the share of a band's messages that a group need not read any more; None if its broker
    does not say.
    """
    if band.entry.is_gone:
        return 1.0
    if description is None:  # it was opened after the brokers were asked
        return 0.0
    lag = lag_on(description, group)
    if lag is None:
        return None
    return 1 - lag / description.next_offset if description.next_offset else 1.0


def lag_on(description: PartitionDescription, group: str) -> int | None:
    """Return the number of stored messages that a group has not acked; None if the broker of the
    partition does not say.
    """
    for status in description.groups:
        if status.group == group:
            return status.lag
    if description.next_offset is None or description.first_offset is None:
        return None
    return description.next_offset - description.first_offset  # it has not asked for any yet

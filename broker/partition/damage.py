"""Describes damage for operators: problems in the log, and the messages lost from each partition.
Pure.
"""

from __future__ import annotations

from ...protocol.text import counted
from .partition import END_UNKNOWN, LOST_MAX, HostedPartition
from .state import BrokerState

PARTITIONS_MAX = 100
"""The maximum number of partitions that are listed. Further ones are only counted."""


def describe_damage(state: BrokerState) -> list[str]:
    """Return one line for each problem in the log, and one for each of the first PARTITIONS_MAX
    damaged partitions.
    """
    lines = list(state.problems)
    damaged_ids = sorted(state.damaged)
    for partition_id in damaged_ids[:PARTITIONS_MAX]:
        partition = state.partitions.get(partition_id)
        if partition is not None and partition.lost:
            lines.append(_describe(partition))
    if len(damaged_ids) > PARTITIONS_MAX:
        lines.append(f"{len(damaged_ids) - PARTITIONS_MAX} more partitions have lost messages")
    return lines


def _describe(partition: HostedPartition) -> str:
    lost = partition.lost
    first = lost[0]
    count = sum(
        lost_range.end - lost_range.start for lost_range in lost if lost_range.end != END_UNKNOWN
    )
    text = (
        f"{counted(count, 'message')} in {counted(len(lost), 'range')} of offsets, the first from "
        f"{first.start} on"
    )
    if len(lost) >= LOST_MAX:
        text = f"at least {text}"
    if lost[-1].end == END_UNKNOWN:
        text = f"its offsets from {lost[-1].start} on, an unknown number of messages"
        if len(lost) > 1 or count:
            text += f", and {counted(count, 'message')} before them from {first.start} on"
    elif len(lost) == 1:
        text = f"its offsets from {first.start} to {first.end}"
    return (
        f"partition {partition.partition_id} has lost {text} "
        f"(position {first.position}): it takes no messages"
    )

"""Infers which partitions a publication has replaced from those that brokers have dropped. Pure.

The partitions that brokers have dropped show which hidden subjects were published:

    P sealed, H hidden and child of P, C child of P and H
        no parent of H is dropped       H is given up: the messages from which it was made exist
        a parent of H is dropped        H is published: its remaining parents are dropped too

Invariants
    Brokers drop partitions of a live subject only after a publication has replaced them.
    Original messages are given up only if a publication has replaced them; if that is unknown, the
    hidden subject's messages are given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ...protocol.control import PartitionStatus
from ...protocol.ids import PartitionId
from ...protocol.routing import PartitionState
from .rows import RebuiltPartition


def was_replaced(statuses: Sequence[PartitionStatus], last_id: int) -> bool:
    """Return True if a subject still exists in partitions that continue the dropped ones, which are
    those up to `last_id`.
    """
    return any(
        status.partition_id > last_id
        and any(parent <= last_id for parent in status_parents(status))
        for status in statuses
    )


def build_replaced_rows(
    statuses: Sequence[PartitionStatus], last_id: int
) -> list[RebuiltPartition]:
    """Return the rows of partitions that a publication has replaced but that brokers have not
    dropped yet.
    """
    return [
        RebuiltPartition(
            partition=msgspec.structs.replace(
                status.facts.partition, state=PartitionState.EXPIRED, parents=()
            ),
            replaced=True,
        )
        for status in statuses
        if status.partition_id <= last_id and status.facts is not None
    ]


def remaining_lineage(statuses: Sequence[PartitionStatus], last_id: int) -> list[PartitionStatus]:
    """Return the partitions above `last_id`, with dropped parents removed."""
    by_id = {status.partition_id: status for status in statuses}
    return [
        _with_parents(
            status,
            tuple(
                each
                for each in status_parents(status)
                if each > last_id and (each in by_id or not is_dropped(each, status, by_id))
            ),
        )
        for status in statuses
        if status.partition_id > last_id
    ]


def is_dropped(parent: int, status: PartitionStatus, by_id: Mapping[int, PartitionStatus]) -> bool:
    """
    Return True if a parent that no broker has belonged to a deleted hidden subject.

    This is inferred if a partition's other parents cover its whole range, because the missing
    parent must then be the hidden one of a cut.
    """
    if status.facts is None:
        return False
    covered_count = 0
    for each in status_parents(status):
        facts = by_id[each].facts if each in by_id and each != parent else None
        if facts is not None and not facts.hidden:
            start = max(facts.partition.range_start, status.facts.partition.range_start)
            end = min(facts.partition.range_end, status.facts.partition.range_end)
            covered_count += max(0, end - start)
    child = status.facts.partition
    return covered_count >= child.range_end - child.range_start


def unpublished_partitions(statuses: Sequence[PartitionStatus]) -> set[int]:
    """Return the ids of unpublished hidden partitions, which are those that other partitions
    continue and whose own parents still exist.
    """
    existing_ids = {status.partition_id for status in statuses}
    continued_ids = {parent for status in statuses for parent in status_parents(status)}
    return {
        status.partition_id
        for status in statuses
        if status.facts is not None
        and status.facts.hidden
        and status.partition_id in continued_ids
        and existing_ids.intersection(status_parents(status))
    }


def exclude_partitions(statuses: Sequence[PartitionStatus], ids: set[int]) -> list[PartitionStatus]:
    """Return the partitions that are not in `ids`, with `ids` removed from their parents."""
    return [
        _with_parents(status, tuple(each for each in status_parents(status) if each not in ids))
        for status in statuses
        if status.partition_id not in ids
    ]


def status_parents(status: PartitionStatus) -> tuple[PartitionId, ...]:
    """Return the ids of a partition's parents, or as many as its broker has reported."""
    return () if status.facts is None else status.facts.partition.parents


def _with_parents(status: PartitionStatus, parents: tuple[PartitionId, ...]) -> PartitionStatus:
    if status.facts is None or parents == status.facts.partition.parents:
        return status
    partition = msgspec.structs.replace(status.facts.partition, parents=parents)
    return msgspec.structs.replace(
        status, facts=msgspec.structs.replace(status.facts, partition=partition)
    )

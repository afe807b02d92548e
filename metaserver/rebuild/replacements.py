"""Infers, from the partitions that brokers have dropped, which hidden subjects had replaced
messages. Pure.

    P sealed, H hidden and child of P, C child of P and H
        no parent of H is dropped       H is given up: the messages from which it was made exist
        a parent of H is dropped        H is published: what is left of its parents is dropped too

Invariants
    Brokers drop partitions of a live subject only after a publication has replaced them.
    Messages are given up only if the database had them replaced; where that is unknown, the hidden
    subject's rows are given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ...protocol.control import PartitionStatus
from ...protocol.ids import PartitionId
from ...protocol.routing import PartitionState
from .rows import RebuiltPartition


def was_replaced(statuses: Sequence[PartitionStatus], last_id: int) -> bool:
    """Return whether a subject, of which partitions up to `last_id` were dropped, lives on in
    partitions that continued them.
    """
    return any(
        status.partition_id > last_id and any(parent <= last_id for parent in _parents(status))
        for status in statuses
    )


def replaced_rows(statuses: Sequence[PartitionStatus], last_id: int) -> list[RebuiltPartition]:
    """Return the rows of partitions that a publication replaced and that brokers have not dropped
    yet.
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


def lineage_left(statuses: Sequence[PartitionStatus], last_id: int) -> list[PartitionStatus]:
    """Return the other partitions, each with the parents that it still has."""
    known = {status.partition_id: status for status in statuses}
    return [
        _with_parents(
            status,
            tuple(
                each
                for each in _parents(status)
                if each > last_id and (each in known or not is_dropped(each, status, known))
            ),
        )
        for status in statuses
        if status.partition_id > last_id
    ]


def is_dropped(parent: int, status: PartitionStatus, known: Mapping[int, PartitionStatus]) -> bool:
    """
    Return whether a parent that no broker has belonged to a deleted hidden subject.

    If the ranges of a partition's other parents add up to its own, the missing parent is the hidden
    one of a cut.
    """
    if status.facts is None:
        return False
    covered = 0
    for each in _parents(status):
        facts = known[each].facts if each in known and each != parent else None
        if facts is not None and not facts.hidden:
            start = max(facts.partition.range_start, status.facts.partition.range_start)
            end = min(facts.partition.range_end, status.facts.partition.range_end)
            covered += max(0, end - start)
    own = status.facts.partition
    return covered >= own.range_end - own.range_start


def given_up(statuses: Sequence[PartitionStatus]) -> set[int]:
    """Return the partitions of unpublished hidden subjects: other partitions continue them, and
    their own parents still exist.
    """
    here = {status.partition_id for status in statuses}
    continued = {parent for status in statuses for parent in _parents(status)}
    return {
        status.partition_id
        for status in statuses
        if status.facts is not None
        and status.facts.hidden
        and status.partition_id in continued
        and here.intersection(_parents(status))
    }


def without(statuses: Sequence[PartitionStatus], ids: set[int]) -> list[PartitionStatus]:
    """Return the partitions except `ids`, which are also removed from the others' parents."""
    return [
        _with_parents(status, tuple(each for each in _parents(status) if each not in ids))
        for status in statuses
        if status.partition_id not in ids
    ]


def _parents(status: PartitionStatus) -> tuple[PartitionId, ...]:
    return () if status.facts is None else status.facts.partition.parents


def _with_parents(status: PartitionStatus, parents: tuple[PartitionId, ...]) -> PartitionStatus:
    if status.facts is None or parents == status.facts.partition.parents:
        return status
    partition = msgspec.structs.replace(status.facts.partition, parents=parents)
    return msgspec.structs.replace(
        status, facts=msgspec.structs.replace(status.facts, partition=partition)
    )

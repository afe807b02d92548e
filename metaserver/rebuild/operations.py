"""Infers from partitions and their lineage which operations were unfinished when the database was
lost. Pure.

    no parent sealed                    CANCELED: the children are sealed and never opened
    some parents sealed                 SEAL
    children in use, a parent open      FENCE: the parent was left behind
    all parents sealed                  DONE

Invariants
    At most one operation runs on a subject.
    Each operation in FENCE has a row of its own, so that the running operation opens only its own
    children.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import msgspec

from ...protocol.control import PartitionStatus
from ...protocol.operations import OperationState, StepAction
from ...protocol.routing import Partition, PartitionState
from ..operations.states import RULES
from .rows import RebuiltOperation, RebuiltPartition

SEALED = PartitionState.SEALED
NO_PARENT = 0
"""Stands for the parent of partitions without parents; ids begin at 1."""


def forget_canceled(statuses: Sequence[PartitionStatus], rows: dict[int, RebuiltPartition]) -> None:
    """
    Mark the children of canceled operations as EXPIRED: they were never opened.

    A child belongs to a canceled operation if it has no children, is unused, and one of these
    holds:

    - It is sealed and empty. A partition that was sealed to be continued has children, because
      these are hosted before the seal.
    - A younger partition has the same parent and a part of the same range. Only one operation runs
      at a time, and none begins on a parent whose children were opened.

    Partitions of a creation have no parents. If two of them share a range, the older one was left
    on a silent broker.
    """
    continued = {parent for row in rows.values() for parent in row.partition.parents}
    used = {status.partition_id for status in statuses if is_used(status)}
    by_parent: dict[int, list[Partition]] = defaultdict(list)
    for partition_id, row in sorted(rows.items(), reverse=True):
        partition = row.partition
        parents = partition.parents or (NO_PARENT,)
        younger = (other for parent in parents for other in by_parent[parent])
        replaced = any(
            other.range_start < partition.range_end and partition.range_start < other.range_end
            for other in younger
        )
        for parent in parents:
            by_parent[parent].append(partition)
        if partition_id in continued or partition_id in used:
            continue
        if replaced or (partition.parents and row.end_offset == 0):
            set_state(rows, partition_id, PartitionState.EXPIRED)


def is_used(status: PartitionStatus) -> bool:
    """Return whether a partition was opened: it has messages, or a consumer acquired it. Known
    groups alone prove nothing.
    """
    return status.next_offset > 0 or any(group.token for group in status.groups)


def canceled(rows: dict[int, RebuiltPartition]) -> RebuiltOperation | None:
    """Return the operation that seals EXPIRED children, to which a producer with an old route could
    still append; None if there are none.
    """
    steps = {
        partition_id: (StepAction.SEAL, row.end_offset is not None)
        for partition_id, row in sorted(rows.items())
        if row.partition.state is PartitionState.EXPIRED
    }
    return RebuiltOperation(state=OperationState.CANCELED, steps=steps) if steps else None


def operations(
    hosted: Sequence[PartitionStatus], rows: dict[int, RebuiltPartition]
) -> tuple[list[RebuiltOperation], RebuiltOperation | None]:
    """
    Infer the unfinished operations, and set the states of their partitions in `rows`.

    A child was opened if it has messages, was acquired by a group, or has children.

    Returns:
        The operations in FENCE, and the running operation or None.
    """
    statuses = {status.partition_id: status for status in hosted}
    opened: set[int] = {parent for row in rows.values() for parent in row.partition.parents}
    # A hidden subject's partitions have messages before they are published, which seals their
    # parents.
    opened |= {each.partition_id for each in hosted if is_used(each) and not _made_hidden(each)}
    fences: list[RebuiltOperation] = []
    running: dict[int, tuple[StepAction, bool]] = {}
    for parents, children in _generations(rows):
        sealed = {parent for parent in parents if parent not in statuses}  # gone
        sealed |= {
            parent for parent in parents & statuses.keys() if statuses[parent].state is SEALED
        }
        if sealed == parents:
            continue
        steps = dict.fromkeys(children, (StepAction.HOST, True))
        steps |= {parent: (StepAction.SEAL, parent in sealed) for parent in parents}
        if not children.isdisjoint(opened):
            # The children were opened while the brokers of these parents were silent, so that the
            # parents still have to be sealed.
            _set_states(rows, OperationState.FENCE, parents - sealed)
            for parent in parents - sealed:
                rows[parent].abandoned = True
            fences.append(RebuiltOperation(state=OperationState.FENCE, steps=steps))
        elif sealed:
            _set_states(rows, OperationState.SEAL, parents & rows.keys(), children)
            running |= steps
        else:
            _set_states(rows, OperationState.CANCELED, (), children)
    if not running:
        return fences, None
    return fences, RebuiltOperation(state=OperationState.SEAL, steps=running)


def _made_hidden(status: PartitionStatus) -> bool:
    return status.facts is not None and bool(status.facts.hidden)


def _set_states(
    rows: dict[int, RebuiltPartition],
    state: OperationState,
    parents: Collection[int],
    children: Collection[int] = (),
) -> None:
    """Give the rows of an operation's parents and children the partition states that belong to the
    operation's state.
    """
    for partition_id in parents:
        set_state(rows, partition_id, RULES[state].parents)
    for partition_id in children:
        set_state(rows, partition_id, RULES[state].children)


def set_state(rows: dict[int, RebuiltPartition], partition_id: int, state: PartitionState) -> None:
    """Set the state of a partition's row."""
    row = rows[partition_id]
    row.partition = msgspec.structs.replace(row.partition, state=state)


def _generations(rows: dict[int, RebuiltPartition]) -> list[tuple[set[int], set[int]]]:
    """Return (ids of parents, ids of children) of each operation; children that share a parent
    belong to one operation.
    """
    generations: list[tuple[set[int], set[int]]] = []
    for child, row in sorted(rows.items()):
        if not row.partition.parents or row.partition.state is PartitionState.EXPIRED:
            continue
        parents: set[int] = set(row.partition.parents)
        children = {child}
        apart = []
        for other in generations:
            if other[0] & parents:
                parents |= other[0]
                children |= other[1]
            else:
                apart.append(other)
        generations = [*apart, (parents, children)]
    return generations

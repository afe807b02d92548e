"""Which operations were under way when a database was lost, as partitions and their lineage show it.  Pure.

    no parent sealed                    canceled: its children are sealed, and never opened
    some sealed                         it runs, in SEAL
    children in use, a parent open      its source was given up: it is in FENCE, and keeps nobody off its subject
    all sealed                          done

Invariants
    At most one runs on a subject; each that fences is one of its own, so that what runs opens its own children alone.
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
"""Stands for the parent of those without any; ids begin at 1."""


def forget_canceled(found: Sequence[PartitionStatus], rows: dict[int, RebuiltPartition]) -> None:
    """
    Leave out the children of canceled operations: those that were never opened.

    Such a child is sealed, empty, and nothing continues it: for whatever is sealed to be continued has children,
    hosted before.  Or it is unused, and a younger one continues the same parent in its range: one operation runs at a
    time, and none begins on a parent whose children were opened.  So it is with partitions of a creation that have no
    parents: where two share a range, the older one was left on a broker that had gone silent.
    """
    continued = {one for row in rows.values() for one in row.partition.parents}
    used = {one.partition_id for one in found if is_used(one)}
    by_parent: dict[int, list[Partition]] = defaultdict(list)
    for partition_id, row in sorted(rows.items(), reverse=True):
        one = row.partition
        parents = one.parents or (NO_PARENT,)
        younger = (other for parent in parents for other in by_parent[parent])
        replaced = any(
            other.range_start < one.range_end and one.range_start < other.range_end
            for other in younger
        )
        for parent in parents:
            by_parent[parent].append(one)
        if partition_id in continued or partition_id in used:
            continue
        if replaced or (one.parents and row.end_offset == 0):
            set_state(rows, partition_id, PartitionState.EXPIRED)


def is_used(one: PartitionStatus) -> bool:
    """Was it open: it has messages, or a consumer came to it.  That it knows groups says nothing: it is told them before."""
    return one.next_offset > 0 or any(group.token for group in one.groups)


def canceled(rows: dict[int, RebuiltPartition]) -> RebuiltOperation | None:
    """What is left out has to be sealed: a producer that knows it from a route of before could store messages there."""
    steps = {
        partition_id: (StepAction.SEAL, row.end_offset is not None)
        for partition_id, row in sorted(rows.items())
        if row.partition.state is PartitionState.EXPIRED
    }
    return RebuiltOperation(state=OperationState.CANCELED, steps=steps) if steps else None


def operations(
    found: Sequence[PartitionStatus], rows: dict[int, RebuiltPartition]
) -> tuple[list[RebuiltOperation], RebuiltOperation | None]:
    """
    What was under way: its partitions are set to the states they had, and its steps answered.

    A child that has messages, was acquired by a group, or is continued by another was opened.

    Returns:
        Those that have only to fence a source that was given up, and the one that runs; None: none does.
    """
    statuses = {one.partition_id: one for one in found}
    opened: set[int] = {one for row in rows.values() for one in row.partition.parents}
    opened |= {one.partition_id for one in found if is_used(one)}
    fences: list[RebuiltOperation] = []
    running: dict[int, tuple[StepAction, bool]] = {}
    for parents, children in _generations(rows):
        sealed = {one for one in parents if one not in statuses}  # gone
        sealed |= {one for one in parents & statuses.keys() if statuses[one].state is SEALED}
        if sealed == parents:
            continue
        steps = dict.fromkeys(children, (StepAction.HOST, True))
        steps |= {one: (StepAction.SEAL, one in sealed) for one in parents}
        if not children.isdisjoint(opened):
            # The children were opened without the silent parents: these are still to be told.
            _set_states(rows, OperationState.FENCE, parents - sealed)
            for one in parents - sealed:
                rows[one].abandoned = True
            fences.append(RebuiltOperation(state=OperationState.FENCE, steps=steps))
        elif sealed:
            _set_states(rows, OperationState.SEAL, parents & rows.keys(), children)
            running |= steps
        else:
            _set_states(rows, OperationState.CANCELED, (), children)
    if not running:
        return fences, None
    return fences, RebuiltOperation(state=OperationState.SEAL, steps=running)


def _set_states(
    rows: dict[int, RebuiltPartition],
    state: OperationState,
    parents: Collection[int],
    children: Collection[int] = (),
) -> None:
    """Change the rows of partitions to what they are while an operation is in this state."""
    for partition_id in parents:
        set_state(rows, partition_id, RULES[state].parents)
    for partition_id in children:
        set_state(rows, partition_id, RULES[state].children)


def set_state(rows: dict[int, RebuiltPartition], partition_id: int, state: PartitionState) -> None:
    """Change a row's state."""
    row = rows[partition_id]
    row.partition = msgspec.structs.replace(row.partition, state=state)


def _generations(rows: dict[int, RebuiltPartition]) -> list[tuple[set[int], set[int]]]:
    """Parents and children that hang together, so that they are sealed and opened together."""
    found: list[tuple[set[int], set[int]]] = []
    for child, row in sorted(rows.items()):
        if not row.partition.parents or row.partition.state is PartitionState.EXPIRED:
            continue
        parents: set[int] = set(row.partition.parents)
        children = {child}
        apart = []
        for other in found:
            if other[0] & parents:
                parents |= other[0]
                children |= other[1]
            else:
                apart.append(other)
        found = [*apart, (parents, children)]
    return found

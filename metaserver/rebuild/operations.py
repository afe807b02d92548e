"""Infers from partitions and their lineage which operations had not finished when the database was
lost. Pure.

    no parent sealed                    CANCELED: the children are sealed and never opened
    some parents sealed                 SEAL
    children in use, a parent open      FENCE: the parent was abandoned
    all parents sealed                  DONE

Invariants
    At most one operation is running on a subject.
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
"""Placeholder for the parent id of partitions without parents; real ids start at 1."""


def expire_canceled(statuses: Sequence[PartitionStatus], rows: dict[int, RebuiltPartition]) -> None:
    """
    Mark the children of canceled operations as EXPIRED, because they were never opened.

    A child belongs to a canceled operation if it has no children, is unused, and one of the
    following is true:

    - It is sealed and empty. A partition that was sealed in order to be continued would have
      children, because these are hosted before the seal.
    - A newer partition has the same parent and an overlapping range. Only one operation runs at a
      time, and none begins on a parent whose children have been opened.

    The partitions of a new subject have no parents. If two of them have the same range, the older
    one was abandoned on a silent broker.
    """
    continued_ids = {parent for row in rows.values() for parent in row.partition.parents}
    used_ids = {status.partition_id for status in statuses if is_used(status)}
    by_parent: dict[int, list[Partition]] = defaultdict(list)
    for partition_id, row in sorted(rows.items(), reverse=True):
        partition = row.partition
        parents = partition.parents or (NO_PARENT,)
        newer_partitions = (other for parent in parents for other in by_parent[parent])
        is_replaced = any(
            other.range_start < partition.range_end and partition.range_start < other.range_end
            for other in newer_partitions
        )
        for parent in parents:
            by_parent[parent].append(partition)
        if partition_id in continued_ids or partition_id in used_ids:
            continue
        if is_replaced or (partition.parents and row.end_offset == 0):
            set_state(rows, partition_id, PartitionState.EXPIRED)


def is_used(status: PartitionStatus) -> bool:
    """Return True if a partition has been opened, which is the case if it has messages or a
    consumer has acquired it. The fact that its broker knows groups proves nothing.
    """
    return status.next_offset > 0 or any(group.token for group in status.groups)


def cancel_operation(rows: dict[int, RebuiltPartition]) -> RebuiltOperation | None:
    """Return an operation that seals the EXPIRED children, because a producer with an outdated
    route could still append to them. Return None if there are no such children.
    """
    steps = {
        partition_id: (StepAction.SEAL, row.end_offset is not None)
        for partition_id, row in sorted(rows.items())
        if row.partition.state is PartitionState.EXPIRED
    }
    return RebuiltOperation(state=OperationState.CANCELED, steps=steps) if steps else None


def infer_unfinished_operations(
    hosted_statuses: Sequence[PartitionStatus], rows: dict[int, RebuiltPartition]
) -> tuple[list[RebuiltOperation], RebuiltOperation | None]:
    """
    Infer the unfinished operations and set the states of their partitions in `rows`.

    A child counts as opened if it has messages, was acquired by a group, or has children.

    Returns:
        The operations in FENCE, and the running operation, if any.
    """
    statuses = {status.partition_id: status for status in hosted_statuses}
    opened_ids: set[int] = {parent for row in rows.values() for parent in row.partition.parents}
    # A hidden subject's partitions have messages even before the publication seals their parents.
    opened_ids |= {
        each.partition_id for each in hosted_statuses if is_used(each) and not _is_hidden(each)
    }
    fence_operations: list[RebuiltOperation] = []
    running_steps: dict[int, tuple[StepAction, bool]] = {}
    for parents, children in _group_by_operation(rows):
        sealed_ids = {parent for parent in parents if parent not in statuses}  # gone
        sealed_ids |= {
            parent for parent in parents & statuses.keys() if statuses[parent].state is SEALED
        }
        if sealed_ids == parents:
            continue
        steps = dict.fromkeys(children, (StepAction.HOST, True))
        steps |= {parent: (StepAction.SEAL, parent in sealed_ids) for parent in parents}
        if not children.isdisjoint(opened_ids):
            # The children were opened while the brokers of these parents were silent, so the
            # parents must still be sealed.
            _set_states(rows, OperationState.FENCE, parents - sealed_ids)
            for parent in parents - sealed_ids:
                rows[parent].abandoned = True
            fence_operations.append(RebuiltOperation(state=OperationState.FENCE, steps=steps))
        elif sealed_ids:
            _set_states(rows, OperationState.SEAL, parents & rows.keys(), children)
            running_steps |= steps
        else:
            _set_states(rows, OperationState.CANCELED, (), children)
    if not running_steps:
        return fence_operations, None
    return fence_operations, RebuiltOperation(state=OperationState.SEAL, steps=running_steps)


def _is_hidden(status: PartitionStatus) -> bool:
    return status.facts is not None and bool(status.facts.hidden)


def _set_states(
    rows: dict[int, RebuiltPartition],
    state: OperationState,
    parents: Collection[int],
    children: Collection[int] = (),
) -> None:
    """Set the states of an operation's parents and children according to the state of the
    operation.
    """
    for partition_id in parents:
        set_state(rows, partition_id, RULES[state].parent_state)
    for partition_id in children:
        set_state(rows, partition_id, RULES[state].child_state)


def set_state(rows: dict[int, RebuiltPartition], partition_id: int, state: PartitionState) -> None:
    """Set the state of a partition's row."""
    row = rows[partition_id]
    row.partition = msgspec.structs.replace(row.partition, state=state)


def _group_by_operation(rows: dict[int, RebuiltPartition]) -> list[tuple[set[int], set[int]]]:
    """Return (parent ids, child ids) for each operation. Children that share a parent belong to the
    same operation.
    """
    generations: list[tuple[set[int], set[int]]] = []
    for child, row in sorted(rows.items()):
        if not row.partition.parents or row.partition.state is PartitionState.EXPIRED:
            continue
        parents: set[int] = set(row.partition.parents)
        children = {child}
        other_generations = []
        for other_parents, other_children in generations:
            if other_parents & parents:
                parents |= other_parents
                children |= other_children
            else:
                other_generations.append((other_parents, other_children))
        generations = [*other_generations, (parents, children)]
    return generations

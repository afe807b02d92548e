"""Models the partitions that a stream reads and the order in which it must read them. Pure.

Partitions that the stream does not read are skipped, so that their children directly follow their
parents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from ...protocol.operations import PartitionHistory
from ...protocol.reprocess.replaced import replaced_by_rows
from ...protocol.routing import Partition, PartitionState


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A partition that the stream reads."""

    subject: str
    partition: Partition
    epoch: int = 0
    """The depth in the subject's lineage: 0 without parents, otherwise one more than that of the
    parents.
    """
    end: int | None = None
    """The offset after the last message; None if the partition is open, or its end is unknown."""
    abandoned: bool = False
    """True if the children were opened while the partition's broker did not respond."""
    lost: bool = False
    """True if an operator has accepted the loss of the partition."""

    @property
    def is_gone(self) -> bool:
        """True if the messages can no longer be read."""
        return self.lost or self.partition.state is PartitionState.EXPIRED


@dataclass(frozen=True, slots=True)
class StoredOffsets:
    """The offsets `[first, end)` that a broker stores for a partition."""

    first: int
    end: int
    sealed: bool = False
    """True if no more messages will follow."""


class Lineage:
    """
    The lineage of the partitions that a stream reads.

    Args:
        branches: all partitions of the subjects.
        is_selected: returns True for the partitions that the stream reads.
    """

    def __init__(
        self, branches: Iterable[Branch], is_selected: Callable[[Partition], bool] = lambda _: True
    ) -> None:
        all_branches = {int(branch.partition.partition_id): branch for branch in branches}
        order = TopologicalSorter(
            {
                partition_id: branch.partition.parents
                for partition_id, branch in all_branches.items()
            }
        )
        self.branches: dict[int, Branch] = {}
        """The branches by partition id, parents before their children."""
        self.parents: dict[int, frozenset[int]] = {}
        """The parents of each partition, by partition id."""
        self.children: dict[int, set[int]] = {}
        selected_ancestors: dict[int, frozenset[int]] = {}
        for partition_id in map(int, order.static_order()):
            branch = all_branches.get(partition_id)
            if branch is None:
                continue
            parents = frozenset[int]().union(
                *(selected_ancestors.get(int(each), ()) for each in branch.partition.parents)
            )
            if (
                is_selected(branch.partition)
                and branch.partition.state is not PartitionState.PLANNED
            ):
                self.branches[partition_id] = branch
                self.parents[partition_id] = parents
                self.children[partition_id] = set()
                for parent in parents:
                    self.children[parent].add(partition_id)
                parents = frozenset({partition_id})
            selected_ancestors[partition_id] = parents
        self.replaced = self._find_replaced(all_branches)
        """For each partition with rows that replace messages, the partitions that had these
        messages; see `ReplacingRows`.
        """

    def _find_replaced(self, all_branches: Mapping[int, Branch]) -> dict[int, frozenset[int]]:
        """Find the replaced partitions through direct parents; `self.parents` would skip partitions
        that the stream does not read.
        """
        parents = {
            partition_id: branch.partition.parents for partition_id, branch in all_branches.items()
        }
        selected_ids = self.branches.keys()
        return {
            rows_id: replaced_ids & selected_ids
            for rows_id, replaced_ids in replaced_by_rows(parents).items()
            if rows_id in selected_ids and replaced_ids & selected_ids
        }

    def required_parents(self, partition_id: int) -> frozenset[int]:
        """
        Return the partitions that must be read before this one.

        An abandoned parent whose end is unknown is replaced by its own parents.
        """
        partition_ids: set[int] = set()
        for parent in self.parents[partition_id]:
            partition_ids |= self.required_parents(parent) if self.is_bypassed(parent) else {parent}
        return frozenset(partition_ids)

    def is_bypassed(self, partition_id: int) -> bool:
        """Return True if the partition's children do not wait for it."""
        branch = self.branches[partition_id]
        return branch.abandoned and branch.end is None

    def bypassed_parents(self, partition_id: int) -> frozenset[int]:
        """Return the ancestors that this partition follows without waiting for them."""
        partition_ids: set[int] = set()
        for parent in self.parents[partition_id]:
            if self.is_bypassed(parent):
                partition_ids |= {parent} | self.bypassed_parents(parent)
        return frozenset(partition_ids)

    def ancestors(self, partition_id: int) -> frozenset[int]:
        """Return the direct and indirect parents of this partition."""
        ancestors: set[int] = set()
        pending = [partition_id]
        while pending:
            parents = self.parents[pending.pop()] - ancestors
            ancestors |= parents
            pending.extend(parents)
        return frozenset(ancestors)


def branches_of(subject: str, history: Collection[PartitionHistory]) -> list[Branch]:
    """Return a Branch for each partition that a subject has ever had."""
    epochs: dict[int, int] = {}
    parents = {int(entry.partition.partition_id): entry.partition.parents for entry in history}
    for partition_id in TopologicalSorter(parents).static_order():
        if partition_id in parents:
            epochs[partition_id] = max(
                (epochs.get(each, -1) + 1 for each in parents[partition_id]), default=0
            )
    return [
        Branch(
            subject=subject,
            partition=entry.partition,
            epoch=epochs[int(entry.partition.partition_id)],
            end=entry.end_offset,
            abandoned=entry.abandoned,
            lost=entry.lost,
        )
        for entry in history
    ]


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot of the lineage and of the readable messages."""

    lineage: Lineage
    stored: Mapping[int, StoredOffsets] = field(default_factory=dict)
    """The stored offsets by partition id. Removed partitions are missing, and so are abandoned ones
    whose broker does not respond.
    """

    def end_of(self, partition_id: int) -> int | None:
        """Return the end of a partition, or None if it is open or its end is unknown."""
        stored_offsets = self.stored.get(partition_id)
        if stored_offsets is not None and stored_offsets.sealed:
            return stored_offsets.end
        return self.lineage.branches[partition_id].end

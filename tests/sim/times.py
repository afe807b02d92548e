"""The rule of times over partitions that continue one another: none has a message from before the
last of its parents.

So the ranges of times `[a, b)` and `[b, c)` have every message once, also when a partition is moved
between two reads to a broker whose calendar is behind. A child's first message is compared with
the last one of each parent; the calendar of the parent's broker at the seal, which may be later, is
not known here. In a run where a metaserver gave up to tell one child's broker when its parents
ended, or could not know it, no child is judged.

What lies behind a cut takes messages while the rows before it are stored, so their times overlap:
decision 102. It is compared with what was sealed by the cut, and not with the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from keylane.broker.partition.partition import HostedPartition
from keylane.broker.store.store import Store
from keylane.protocol.batch import batch_starts

if TYPE_CHECKING:
    from sim.world import World


class Times:
    """Judges the times of the partitions on the brokers' disks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._first_ms: dict[int, int] = {}
        self._last_ms: dict[int, int] = {}
        self._parents: dict[int, tuple[int, ...]] = {}

    def note(self, store: Store, partition_id: int, partition: HostedPartition) -> None:
        """Note when a partition begins and ends, as it is on a disk."""
        self._parents[partition_id] = tuple(map(int, partition.facts.partition.parents))
        if partition.readable_offset:
            self._last_ms[partition_id] = partition.appended_at_ms
        if partition.readable_offset and not partition.first_offset:
            data, _ = store._reader.read(partition_id, 0, partition.readable_offset, 1)
            self._first_ms[partition_id] = batch_starts(data)[0][1].appended_at_ms

    @property
    def holds(self) -> bool:
        """Whether every child's broker was told when the parents ended."""
        world = self._world
        left = world.operator.abandoned or world.shelf.watches_losses or world.copier.exchanged
        return not left and not any(meta.untold for meta in world.metas)

    def problems(self) -> list[str]:
        """The children that begin before their parents end."""
        return early(self._first_ms, self._last_ms, self._parents) if self.holds else []


def early(
    first_ms: Mapping[int, int], last_ms: Mapping[int, int], parents: Mapping[int, Sequence[int]]
) -> list[str]:
    """
    The children that begin before their parents end, by the times of the first and the last
    messages.

    Args:
        parents: partition id → the partitions that it continues.
    """
    return [
        f"partition {child} begins at {begins_ms}, before {last_ms[parent]}, where its parent "
        f"{parent} ends"
        for child, begins_ms in sorted(first_ms.items())
        for parent in parents[child]
        if begins_ms < last_ms.get(parent, 0)
        # One that continues another parent has rows, which are stored while what is behind the cut
        # takes messages.
        and set(parents[child]).isdisjoint(parents.get(parent, ()))
    ]

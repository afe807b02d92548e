"""Hosted partitions by id: the used ones as objects, the others as images, so that a million take little memory.  Pure.

    use ──▶ warm: objects, WARM_MAX of them ──(the oldest, when it is quiet)──▶ cold: images

Invariants
    A partition is either warm or cold, and has one object at most: an object that cooled while it was referenced is
    found again by a weak reference.
    A partition cools only when it is quiet: a restart would find it as it is, all of it durable, no pull lock held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from weakref import WeakValueDictionary

from .image import image_of, partition_of
from .partition import HostedPartition

WARM_MAX = 8_000
"""A warm partition takes about a kilobyte, a cold one about two hundred bytes."""
COOL_AT_ONCE = 8


class PartitionTable(Mapping[int, HostedPartition]):
    """See the module; `now_ms` is the clock of the pull locks."""

    def __init__(self, now_ms: Callable[[], int] = lambda: 0, *, warm_max: int = WARM_MAX) -> None:
        self._now_ms = now_ms
        self._warm_max = warm_max
        self._warm: OrderedDict[int, HostedPartition] = OrderedDict()
        self._cold: dict[int, bytes] = {}
        self._held: WeakValueDictionary[int, HostedPartition] = WeakValueDictionary()
        self.dirty: set[int] = set()
        """Changed since the last snapshot was begun."""
        self.version = 0
        """Rises when a partition comes or goes."""

    def get(self, partition_id: int, default: object = None) -> HostedPartition | None:  # type: ignore[override]
        """The partition, or None."""
        return self._warm.get(partition_id) or self._thaw(partition_id)

    def __getitem__(self, partition_id: int) -> HostedPartition:
        found = self.get(partition_id)
        if found is None:
            raise KeyError(partition_id)
        return found

    def __contains__(self, partition_id: object) -> bool:
        return partition_id in self._warm or partition_id in self._cold

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids())

    def ids(self) -> list[int]:
        """The ids of all partitions now."""
        return [*self._warm, *self._cold]

    def __len__(self) -> int:
        return len(self._warm) + len(self._cold)

    def _thaw(self, partition_id: int) -> HostedPartition | None:
        image = self._cold.get(partition_id)
        if image is None:
            return None
        found = self._held.get(partition_id)
        if found is None:
            found = partition_of(partition_id, image)
        del self._cold[partition_id]
        self._warm[partition_id] = found
        self._cool()
        return found

    def _cool(self) -> None:
        """Turn some of the oldest into images, if there are too many objects."""
        for _ in range(min(COOL_AT_ONCE, len(self._warm) - self._warm_max)):
            partition_id, oldest = self._warm.popitem(last=False)
            if oldest.quiet(self._now_ms()):
                self._cold[partition_id] = image_of(oldest)
                self._held[partition_id] = oldest
            else:
                self._warm[partition_id] = oldest

    def add(self, partition: HostedPartition) -> None:
        """Keep a partition that is new."""
        assert partition.partition_id not in self
        self._warm[partition.partition_id] = partition
        self.dirty.add(partition.partition_id)
        self.version += 1
        self._cool()

    def load(self, partition_id: int, image: bytes) -> None:
        """Take a partition out of a snapshot, in place of what was known of it."""
        self._warm.pop(partition_id, None)
        self._cold[partition_id] = image
        self.version += 1

    def remove(self, partition_id: int) -> None:
        """Take back a new partition."""
        self._warm.pop(partition_id, None)
        self._cold.pop(partition_id, None)
        self._held.pop(partition_id, None)
        self.version += 1

    def image(self, partition_id: int) -> bytes | None:
        """The partition's image now, durable or not; None if there is none."""
        warm = self._warm.get(partition_id)
        return self._cold.get(partition_id) if warm is None else image_of(warm)

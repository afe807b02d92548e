"""Holds the hosted partitions by id: recently used ones as objects, and the others as images, which
take less memory. Pure.

    use ──▶ warm: up to WARM_MAX objects ──(the oldest, if it is quiet)──▶ cold: images

Invariants
    A partition is either warm or cold.
    A partition has at most one object: a weak reference finds the object of a cold partition that
    is still in use. A partition becomes cold only if it is quiet: its state is durable, and no
    pull lock is held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from weakref import WeakValueDictionary

from .image import decode_partition, encode_partition
from .partition import HostedPartition

WARM_MAX = 8_000
"""The maximum number of objects. An object takes about 1 kB of memory, an image about 200 bytes."""
COOL_AT_ONCE = 8


class PartitionTable(Mapping[int, HostedPartition]):
    """The hosted partitions by id. `now_ms` is the clock of the pull locks."""

    def __init__(self, now_ms: Callable[[], int] = lambda: 0, *, warm_max: int = WARM_MAX) -> None:
        self._now_ms = now_ms
        self._warm_max = warm_max
        self.warm: OrderedDict[int, HostedPartition] = OrderedDict()
        """The partitions that are objects, the least recently used first. Only this class may
        change it.
        """
        self._cold_images: dict[int, bytes] = {}
        self._referenced_partitions: WeakValueDictionary[int, HostedPartition] = (
            WeakValueDictionary()
        )
        self.dirty: set[int] = set()
        """The partitions that have changed since the last snapshot began."""
        self.version = 0
        """Incremented when a partition is added or removed."""

    def get(  # type: ignore[override]
        self, partition_id: int, default: object = None
    ) -> HostedPartition | None:
        """Return the partition, or None. It is made warm if needed."""
        return self.warm.get(partition_id) or self._decode_cold(partition_id)

    def peek(self, partition_id: int) -> HostedPartition | None:
        """Return the partition for reading only, or None. Unlike `get`, this leaves a cold
        partition cold.
        """
        warm = self.warm.get(partition_id) or self._referenced_partitions.get(partition_id)
        if warm is not None:
            return warm
        image = self._cold_images.get(partition_id)
        return None if image is None else decode_partition(partition_id, image)

    def __getitem__(self, partition_id: int) -> HostedPartition:
        partition = self.get(partition_id)
        if partition is None:
            raise KeyError(partition_id)
        return partition

    def __contains__(self, partition_id: object) -> bool:
        return partition_id in self.warm or partition_id in self._cold_images

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids())

    def ids(self) -> list[int]:
        """Return the ids of all partitions, in no particular order."""
        return [*self.warm, *self._cold_images]

    def __len__(self) -> int:
        return len(self.warm) + len(self._cold_images)

    def _decode_cold(self, partition_id: int) -> HostedPartition | None:
        image = self._cold_images.get(partition_id)
        if image is None:
            return None
        partition = self._referenced_partitions.get(partition_id)
        if partition is None:
            partition = decode_partition(partition_id, image)
        del self._cold_images[partition_id]
        self.warm[partition_id] = partition
        self._encode_oldest()
        return partition

    def _encode_oldest(self) -> None:
        """If there are too many objects, turn up to COOL_AT_ONCE of the oldest ones into images."""
        for _ in range(min(COOL_AT_ONCE, len(self.warm) - self._warm_max)):
            partition_id, oldest = self.warm.popitem(last=False)
            if oldest.is_quiet(self._now_ms()):
                self._cold_images[partition_id] = encode_partition(oldest)
                self._referenced_partitions[partition_id] = oldest
            else:
                self.warm[partition_id] = oldest

    def add(self, partition: HostedPartition) -> None:
        """Add a new partition."""
        assert partition.partition_id not in self
        self.warm[partition.partition_id] = partition
        self.dirty.add(partition.partition_id)
        self.version += 1
        self._encode_oldest()

    def load(self, partition_id: int, image: bytes) -> None:
        """Replace the state of a partition by an image from a snapshot."""
        self.warm.pop(partition_id, None)
        self._cold_images[partition_id] = image
        self.version += 1

    def remove(self, partition_id: int) -> None:
        """Remove a partition."""
        self.warm.pop(partition_id, None)
        self._cold_images.pop(partition_id, None)
        self._referenced_partitions.pop(partition_id, None)
        self.version += 1

    def image(self, partition_id: int) -> bytes | None:
        """Return the image of a partition's present state, durable or not, or None if the partition
        is not hosted.
        """
        warm = self.warm.get(partition_id)
        return self._cold_images.get(partition_id) if warm is None else encode_partition(warm)

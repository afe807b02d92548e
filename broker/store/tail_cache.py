"""Caches the newest batches of all partitions, so that consumers that keep up need no disk reads.
Pure.

Invariants
    The cache has durable batches only, with the same bytes as the log. It never exceeds its budget
    of bytes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..storage.append_file import Buffer

ENTRY_BYTES = 512
"""The memory in bytes, approximately, that a batch takes besides its own bytes."""
COPIED_BYTES_MAX = 4 << 10
"""
The largest body, in bytes, that is copied, which takes 0.1 µs.

Views of thousands of small batches, and the entries that hold them, would lengthen every full
garbage collection.
"""

_Cached = tuple[int, int, "Buffer", "Buffer"]
"""(next offset, length, header, body)."""


class TailCache:
    """Batches by partition and base offset; the oldest batch of all is dropped first."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max
        self._partitions: dict[int, dict[int, _Cached]] = {}
        self._ages: deque[tuple[int, int, int]] = deque()
        """(partition id, base offset, bytes), oldest first."""

    def add(
        self, partition_id: int, base_offset: int, next_offset: int, *, header: Buffer, body: Buffer
    ) -> None:
        """Add a batch that has just become durable."""
        length = len(header) + len(body)
        if len(body) <= COPIED_BYTES_MAX:
            body = bytes(body)
        batches = self._partitions.get(partition_id)
        if batches is None:
            batches = self._partitions[partition_id] = {}
        batches[base_offset] = (next_offset, length, header, body)
        self._ages.append((partition_id, base_offset, length + ENTRY_BYTES))
        self._left -= length + ENTRY_BYTES
        while self._left < 0:
            oldest_id, oldest_offset, freed = self._ages.popleft()
            batches = self._partitions[oldest_id]
            del batches[oldest_offset]
            if not batches:
                del self._partitions[oldest_id]
            self._left += freed

    def read(self, partition_id: int, offset: int, *, bytes_max: int) -> tuple[list[Buffer], int]:
        """
        Return the batches from the one that begins at `offset` on: at least one, and up to
        `bytes_max` bytes.

        Returns:
            Their headers and bodies in order, and the offset after their last message. If the cache
            lacks the first batch, an empty list and `offset`.
        """
        pieces: list[Buffer] = []
        batches = self._partitions.get(partition_id)
        if batches is None:
            return pieces, offset
        left = bytes_max
        while (batch := batches.get(offset)) is not None:
            next_offset, length, header, body = batch
            if pieces and length > left:
                break
            pieces += (header, body)
            left -= length
            offset = next_offset
        return pieces, offset

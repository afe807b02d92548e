"""Checks large packed batches in a thread before they are decided on. A later append to the
partition keeps its place.

    append ─▶ is the batch large when it is unpacked, or does an earlier one of its partition wait
        here?
                 no ─▶ decided at once; the store unpacks a small packed batch itself
                yes ─▶ after the earlier ones: unpacked by a thread, then decided

Invariants
    Appends to a partition leave in the order in which they arrived, so a producer's batches are
    decided in their order. The waiting batches are bounded: by their bytes, and by one unpacked
    batch for each thread.
"""

from __future__ import annotations

import asyncio

from ...protocol.batch import check_alone, unpacked_bytes
from ...protocol.errors import OverloadedError
from ...protocol.record import COMPRESSION_AT
from ..store.group_commit import RunBlocking

AT_ONCE_BYTES_MAX = 256 << 10
"""The largest unpacked size, in bytes, of a batch that is checked on the event loop, which takes
about 0.3 ms. A thread would cost as much.
"""
WAITING_BYTES_MAX = 32 << 20
"""The most bytes of batches, as they arrived, that wait for their check or for an earlier batch."""


class UnpackChecks:
    """
    The packed batches of a broker that are being checked.

    Args:
        run_blocking: runs the check of one batch.
    """

    def __init__(self, run_blocking: RunBlocking) -> None:
        self._run_blocking = run_blocking
        self._latest: dict[int, asyncio.Future[None]] = {}
        """Partition id → a future for the end of the last append that waits here. Partitions
        without a waiting append are absent.
        """
        self._waiting_bytes = 0

    @staticmethod
    def is_large(data: memoryview) -> bool:
        """Return True if the bytes claim to be a batch that has to be checked in a thread."""
        packed = len(data) > COMPRESSION_AT and data[COMPRESSION_AT]
        return bool(packed) and unpacked_bytes(data) > AT_ONCE_BYTES_MAX

    def waits(self, partition_id: int, data: memoryview) -> bool:
        """Return True if an append has to `wait`."""
        return partition_id in self._latest or self.is_large(data)

    async def wait(self, partition_id: int, data: memoryview) -> bool:
        """
        Wait for earlier appends to the partition and, if this append is large, for its check.

        The caller must then decide on the append, or begin to wait for room, before its next await.

        Returns:
            True if the batch was unpacked. False if the store has to unpack it, should it be
            packed.

        Raises:
            CorruptBatchError, UnpackError: see `check_alone`.
            OverloadedError: WAITING_BYTES_MAX bytes wait; nothing was done.
        """
        before, large = self._latest.get(partition_id), self.is_large(data)
        if before is None and not large:
            return False
        if self._waiting_bytes and self._waiting_bytes + len(data) > WAITING_BYTES_MAX:
            raise OverloadedError("too many packed batches wait for their check", retry_after_ms=10)
        ours: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._latest[partition_id] = ours
        self._waiting_bytes += len(data)

        def end(_before: object) -> None:
            ours.set_result(None)
            if self._latest[partition_id] is ours:
                del self._latest[partition_id]

        try:
            if before is not None:
                await asyncio.wait([before])  # cancelling the caller does not cancel it
            if large:
                await self._run_blocking(check_alone, data)
        finally:
            self._waiting_bytes -= len(data)
            if before is None or before.done():
                end(before)
            else:  # the caller has left: later appends still wait for the earlier ones
                before.add_done_callback(end)
        return large

"""Checks large packed batches in a thread before they are decided on; a later append to the
partition keeps its place.

    append ─▶ is the batch large when it is unpacked, or does an earlier one of its partition wait
        here?
                 no ─▶ decided at once; the store unpacks a small packed batch itself
                yes ─▶ after the earlier ones: unpacked by a thread, then decided

Invariants
    Appends to a partition leave in the order in which they came, so a producer's batches are
    decided in their order. What waits here is bounded, in bytes and by one unpacked batch for each
    thread.
"""

from __future__ import annotations

import asyncio

from ...protocol.batch import check_alone, unpacked_bytes
from ...protocol.errors import OverloadedError
from ...protocol.record import COMPRESSION_AT
from ..store.group_commit import RunBlocking

AT_ONCE_BYTES_MAX = 256 << 10
"""What unpacks to no more than this is checked on the event loop, in some 0.3 ms; a thread would
cost as much.
"""
WAITING_BYTES_MAX = 32 << 20
"""Bytes of batches, as they came, that wait for their check or behind others."""


class UnpackChecks:
    """
    The packed batches of a broker that are being checked.

    Args:
        run_blocking: runs the check of one batch.
    """

    def __init__(self, run_blocking: RunBlocking) -> None:
        self._run_blocking = run_blocking
        self._latest: dict[int, asyncio.Future[None]] = {}
        """Partition id → the end of the last append that waits here.  A partition without one is
        not in it.
        """
        self._waiting_bytes = 0

    @staticmethod
    def is_large(data: memoryview) -> bool:
        """True if the bytes say that they are a batch that is checked in a thread."""
        packed = len(data) > COMPRESSION_AT and data[COMPRESSION_AT]
        return bool(packed) and unpacked_bytes(data) > AT_ONCE_BYTES_MAX

    def waits(self, partition_id: int, data: memoryview) -> bool:
        """True if an append has to `wait`."""
        return partition_id in self._latest or self.is_large(data)

    async def wait(self, partition_id: int, data: memoryview) -> bool:
        """
        Wait for earlier appends to the partition, and for the check of this one, if it is large.

        The caller has to decide on it, or begin to wait for room, without another await in between.

        Returns:
            True if the batch was unpacked; False: the store has to, if it is packed.

        Raises:
            CorruptBatchError, UnpackError: as `check_alone`.
            OverloadedError: WAITING_BYTES_MAX wait; nothing was done.
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
                await asyncio.wait([before])  # which a cancelled caller does not cancel
            if large:
                await self._run_blocking(check_alone, data)
        finally:
            self._waiting_bytes -= len(data)
            if before is None or before.done():
                end(before)
            else:  # the caller has left: those behind still wait for the earlier ones
                before.add_done_callback(end)
        return large

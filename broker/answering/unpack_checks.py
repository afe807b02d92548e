"""Verifies in a thread that large compressed batches can be unpacked, before the broker decides
whether to store them. Keeps the order of a partition's appends.

    append ─▶ is the unpacked batch large, or does an earlier one of its partition wait here?
                 no ─▶ decided immediately; the store unpacks a small compressed batch itself
                yes ─▶ after the earlier ones: unpacked by a thread, then decided

Invariants
    A partition's appends leave in their order of arrival, so a producer's batches are decided in
    order. Memory is bounded: by the total size of the waiting batches, plus one unpacked batch per
    thread.
"""

from __future__ import annotations

import asyncio

from ...protocol.batch import check_whole_batch, unpacked_bytes
from ...protocol.errors import OverloadedError
from ...protocol.record import COMPRESSION_AT
from ..store.group_commit import RunBlocking

INLINE_BYTES_MAX = 256 << 10
"""The largest unpacked size, in bytes, of a batch that is unpacked on the event loop, which takes
about 0.3 ms: as long as handing it to a thread.
"""
WAITING_BYTES_MAX = 32 << 20
"""The maximum total size, in bytes as received, of the batches that wait for their check or for an
earlier batch.
"""


class UnpackChecks:
    """
    Keeps a queue per partition of the appends that wait while a large compressed batch is checked.

    Args:
        run_blocking: runs the check of one batch.
    """

    def __init__(self, run_blocking: RunBlocking) -> None:
        self._run_blocking = run_blocking
        self._latest: dict[int, asyncio.Future[None]] = {}
        """Maps a partition id to a future that is done when the last waiting append leaves.
        Partitions without waiting appends are absent.
        """
        self._waiting_bytes = 0

    @staticmethod
    def is_large(data: memoryview) -> bool:
        """Return True if, according to its header, the batch must be checked in a thread."""
        is_compressed = len(data) > COMPRESSION_AT and data[COMPRESSION_AT]
        return bool(is_compressed) and unpacked_bytes(data) > INLINE_BYTES_MAX

    def must_wait(self, partition_id: int, data: memoryview) -> bool:
        """Return True if an append must call `wait`."""
        return partition_id in self._latest or self.is_large(data)

    async def wait(self, partition_id: int, data: memoryview) -> bool:
        """
        Wait for earlier appends to the partition and, if this batch is large, for its check.

        The caller must then decide on the append, or begin to wait for room, before it awaits
        anything else.

        Returns:
            True if the batch was checked; False if the store must check it, in case it is
            compressed.

        Raises:
            CorruptBatchError, UnpackError: see `check_whole_batch`.
            OverloadedError: WAITING_BYTES_MAX bytes are already waiting.
        """
        previous, is_large = self._latest.get(partition_id), self.is_large(data)
        if previous is None and not is_large:
            return False
        if self._waiting_bytes and self._waiting_bytes + len(data) > WAITING_BYTES_MAX:
            raise OverloadedError(
                "too many compressed batches are waiting to be checked", retry_after_ms=10
            )
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._latest[partition_id] = done
        self._waiting_bytes += len(data)

        def leave(_previous: object) -> None:
            done.set_result(None)
            if self._latest[partition_id] is done:
                del self._latest[partition_id]

        try:
            if previous is not None:
                await asyncio.wait([previous])  # which the caller's cancellation does not cancel
            if is_large:
                await self._run_blocking(check_whole_batch, data)
        finally:
            self._waiting_bytes -= len(data)
            if previous is None or previous.done():
                leave(previous)
            else:  # the caller was cancelled: later appends must still wait for earlier ones
                previous.add_done_callback(leave)
        return is_large

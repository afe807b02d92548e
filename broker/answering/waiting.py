"""Long polls: pulls and reads wait until their partition has new messages, has ended, or has a
newer owner.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from functools import partial

from ...protocol.clock import round_to_tick
from ...protocol.errors import InvalidRequestError
from ...protocol.frames import Read
from ...protocol.limits import PULL_WAIT_MS_MAX
from ..partition.partition import HostedPartition


class LongPolls:
    """Keeps the waiting pulls and reads by partition, and wakes them."""

    def __init__(self) -> None:
        self._callbacks: dict[int, dict[Hashable, Callable[[], object]]] = {}
        """Maps each partition id to its waiting calls, in order of arrival, with their
        callbacks.
        """
        self._closed = False

    @property
    def count(self) -> int:
        """The number of waiting pulls and reads."""
        return sum(map(len, self._callbacks.values()))

    def add_listener(
        self, partition_id: int, key: Hashable, callback: Callable[[], object]
    ) -> None:
        """Call `callback` once when the partition is woken, unless `remove_listener` is called with
        `key` first. The callback must not raise.
        """
        callbacks = self._callbacks.get(partition_id)
        if callbacks is None:
            callbacks = self._callbacks[partition_id] = {}
        callbacks[key] = callback

    def remove_listener(self, partition_id: int, key: Hashable) -> None:
        """Remove a callback that was passed to `add_listener`, unless it has already been
        called.
        """
        callbacks = self._callbacks.get(partition_id, {})
        if callbacks.pop(key, None) is not None and not callbacks:
            del self._callbacks[partition_id]

    async def wait(self, partition_id: int, wait_ms: int) -> None:
        """Wait until the partition is woken, for at most `wait_ms` milliseconds."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        resolve = partial(_resolve, future)
        self.add_listener(partition_id, future, resolve)
        timer = loop.call_at(round_to_tick(wait_ms / 1000, loop.time()), resolve)
        try:
            await future
        finally:
            timer.cancel()
            self.remove_listener(partition_id, future)

    async def wait_to_read(
        self, request: Read, partition_of: Callable[[int], HostedPartition]
    ) -> HostedPartition:
        """
        Wait until there are messages at the offset of a read or the partition ends there, but at
        most `request.wait_ms`.

        Other changes of the partition, such as those of its consumer groups, do not end the wait.

        Returns:
            The partition after the wait.

        Raises:
            InvalidRequestError: `wait_ms` is out of range.
            Any error that `partition_of` raises: the partition no longer exists.
        """
        if not 0 <= request.wait_ms <= PULL_WAIT_MS_MAX:
            raise InvalidRequestError(f"cannot wait {request.wait_ms} ms")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_ms / 1000
        while True:
            partition = partition_of(request.partition_id)
            is_drained = partition.ended and request.offset == partition.next_offset
            remaining_ms = math.ceil((deadline - loop.time()) * 1000)
            if is_drained or self._closed or remaining_ms <= 0:
                return partition
            if request.offset != partition.readable_offset:
                return partition
            await self.wait(request.partition_id, remaining_ms)

    def wake(self, partition_id: int) -> None:
        """The end all waits on a partition."""
        callbacks = self._callbacks.pop(partition_id, None)
        if callbacks is not None:
            for callback in callbacks.values():
                callback()

    def wake_all(self) -> None:
        """End all waits, and make later ones return immediately."""
        self._closed = True
        for partition_id in list(self._callbacks):
            self.wake(partition_id)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

"""Keeps pulls and reads waiting until their partition has new messages, an end or a newer owner
(long polls).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from functools import partial

from ...protocol.clock import at_a_tick
from ...protocol.errors import InvalidRequestError
from ...protocol.frames import Read
from ...protocol.limits import PULL_WAIT_MS_MAX
from ..partition.partition import HostedPartition


class LongPolls:
    """The waiting pulls and reads, by partition."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[Hashable, Callable[[], object]]] = {}
        """Partition id → the waiting calls, in the order of arrival → the function that is called
        when the partition is woken.
        """
        self._ended = False

    @property
    def count(self) -> int:
        """The number of waiting pulls and reads."""
        return sum(map(len, self._waiting.values()))

    def listen(self, partition_id: int, who: Hashable, wake: Callable[[], object]) -> None:
        """Call `wake` once, when the partition is woken, unless `who` leaves earlier; `wake` must
        not raise.
        """
        waiting = self._waiting.get(partition_id)
        if waiting is None:
            waiting = self._waiting[partition_id] = {}
        waiting[who] = wake

    def leave(self, partition_id: int, who: Hashable) -> None:
        """Stop waiting."""
        waiting = self._waiting.get(partition_id, {})
        if waiting.pop(who, None) is not None and not waiting:
            del self._waiting[partition_id]

    async def wait(self, partition_id: int, wait_ms: int) -> None:
        """Wait until the partition is woken, but at most `wait_ms`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        finish = partial(_finish, future)
        self.listen(partition_id, future, finish)
        end = loop.call_at(at_a_tick(wait_ms / 1000, loop.time()), finish)
        try:
            await future
        finally:
            end.cancel()
            self.leave(partition_id, future)

    async def wait_to_read(
        self, request: Read, partition_of: Callable[[int], HostedPartition]
    ) -> HostedPartition:
        """
        Wait until there are messages at the offset of a read, or the partition ends there, but at
        most `request.wait_ms`.

        Other changes of the partition, such as those of its consumer groups, do not end the wait.

        Returns:
            The partition as it is then.

        Raises:
            InvalidRequestError: a broker does not wait for such a time.
            Any error of `partition_of`: the partition is gone.
        """
        if not 0 <= request.wait_ms <= PULL_WAIT_MS_MAX:
            raise InvalidRequestError(f"cannot wait {request.wait_ms} ms")
        loop = asyncio.get_running_loop()
        until = loop.time() + request.wait_ms / 1000
        while True:
            partition = partition_of(request.partition_id)
            drained = partition.ended and request.offset == partition.next_offset
            left_ms = math.ceil((until - loop.time()) * 1000)
            if drained or self._ended or left_ms <= 0:
                return partition
            if request.offset != partition.readable_offset:
                return partition
            await self.wait(request.partition_id, left_ms)

    def wake(self, partition_id: int) -> None:
        """End the waits on this partition."""
        waiting = self._waiting.pop(partition_id, None)
        if waiting is not None:
            for wake in waiting.values():
                wake()

    def wake_all(self) -> None:
        """End all waits. Later ones end at once."""
        self._ended = True
        for partition_id in list(self._waiting):
            self.wake(partition_id)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

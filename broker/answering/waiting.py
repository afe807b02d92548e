"""Long polls: pulls that wait until their partition has new messages, an end or a newer owner."""

from __future__ import annotations

import asyncio

from ...protocol.clock import at_a_tick


class LongPolls:
    """The waiting pulls, by partition."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[asyncio.Future[None], asyncio.TimerHandle]] = {}
        """Partition id → futures in the order of arrival, each with its end; the first is woken first."""

    @property
    def count(self) -> int:
        """The number of waiting pulls."""
        return sum(map(len, self._waiting.values()))

    def begin(self, partition_id: int, wait_ms: int) -> asyncio.Future[None]:
        """A future that is done when the partition is woken, or after about `wait_ms`; `leave` what was cancelled."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        waiting = self._waiting.setdefault(partition_id, {})
        waiting[future] = loop.call_at(
            at_a_tick(wait_ms / 1000, loop.time()), self._end, partition_id, future
        )
        return future

    async def wait(self, partition_id: int, wait_ms: int) -> None:
        """Wait until the partition is woken, `wait_ms` at most."""
        future = self.begin(partition_id, wait_ms)
        try:
            await future
        except asyncio.CancelledError:
            self.leave(partition_id, future)
            raise

    def leave(self, partition_id: int, future: asyncio.Future[None]) -> None:
        """Wait no longer."""
        waiting = self._waiting.get(partition_id, {})
        end = waiting.pop(future, None)
        if end is not None:
            end.cancel()
            if not waiting:
                del self._waiting[partition_id]

    def _end(self, partition_id: int, future: asyncio.Future[None]) -> None:
        self.leave(partition_id, future)
        _finish(future)

    def wake(self, partition_id: int) -> None:
        """End the waits on this partition."""
        waiting = self._waiting.pop(partition_id, None)
        if waiting is not None:
            for future, end in waiting.items():
                end.cancel()
                _finish(future)

    def wake_all(self) -> None:
        """End all waits."""
        for partition_id in list(self._waiting):
            self.wake(partition_id)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

"""Long polls: pulls that wait until their partition has new messages, an end or a newer owner."""

from __future__ import annotations

import asyncio


class LongPolls:
    """The waiting pulls, by partition."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[asyncio.Future[None], None]] = {}
        """Partition id → futures in the order of arrival; the first is woken first."""

    @property
    def count(self) -> int:
        """The number of waiting pulls."""
        return sum(map(len, self._waiting.values()))

    async def wait(self, partition_id: int, wait_ms: int) -> None:
        """Wait until the partition is woken, `wait_ms` at most."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(partition_id, {})[future] = None
        end = loop.call_later(wait_ms / 1000, _end, future)
        try:
            await future
        finally:
            end.cancel()
            left = self._waiting.get(partition_id)
            if left is not None:
                left.pop(future, None)
                if not left:
                    del self._waiting[partition_id]

    def wake(self, partition_id: int) -> None:
        """End the waits on this partition."""
        for future in self._waiting.pop(partition_id, ()):
            _end(future)

    def wake_all(self) -> None:
        """End all waits."""
        for partition_id in list(self._waiting):
            self.wake(partition_id)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

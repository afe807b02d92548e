"""Long polls: pulls that wait until their partition has new messages, an end or a newer owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from functools import partial

from ...protocol.clock import at_a_tick


class LongPolls:
    """The waiting pulls, by partition."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[Hashable, Callable[[], object]]] = {}
        """Partition id → who waits, in the order of arrival → what is called when the partition is woken."""
        self._of_owners: dict[Hashable, asyncio.Future[None]] = {}
        """What an owner waits with; its next wait ends it."""

    @property
    def count(self) -> int:
        """The number of waiting pulls."""
        return sum(map(len, self._waiting.values()))

    def listen(self, partition_id: int, who: Hashable, wake: Callable[[], object]) -> None:
        """Have `wake` called when the partition is woken, once, unless `who` leaves before; it must not raise."""
        waiting = self._waiting.get(partition_id)
        if waiting is None:
            waiting = self._waiting[partition_id] = {}
        waiting[who] = wake

    def leave(self, partition_id: int, who: Hashable) -> None:
        """Wait no longer."""
        waiting = self._waiting.get(partition_id, {})
        if waiting.pop(who, None) is not None and not waiting:
            del self._waiting[partition_id]

    async def wait(self, partition_id: int, wait_ms: int, owner: Hashable = None) -> None:
        """Wait until the partition is woken, or the `owner` waits anew if one is given; `wait_ms` at most."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if owner is not None:
            if (older := self._of_owners.get(owner)) is not None:
                _finish(older)
            self._of_owners[owner] = future
        finish = partial(_finish, future)
        self.listen(partition_id, future, finish)
        end = loop.call_at(at_a_tick(wait_ms / 1000, loop.time()), finish)
        try:
            await future
        finally:
            end.cancel()
            self.leave(partition_id, future)
            if self._of_owners.get(owner) is future:
                del self._of_owners[owner]

    def wake(self, partition_id: int) -> None:
        """End the waits on this partition."""
        waiting = self._waiting.pop(partition_id, None)
        if waiting is not None:
            for wake in waiting.values():
                wake()

    def wake_all(self) -> None:
        """End all waits."""
        for partition_id in list(self._waiting):
            self.wake(partition_id)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

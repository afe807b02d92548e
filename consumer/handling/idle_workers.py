"""Workers that have nothing to do: one of them wakes for what it can handle alone, all of them for what they share."""

from __future__ import annotations

import asyncio


class IdleWorkers:
    """
    The idle workers of a consumer.  The one that became idle last wakes first.

    Nothing is remembered for workers that are busy: a worker looks for messages before it waits, without a turn of the event
    loop between.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def wake_one(self) -> None:
        """Wake an idle worker."""
        while self._waiting:
            waiter = self._waiting.popitem()[0]
            if not waiter.done():
                waiter.set_result(None)
                return

    def wake_all(self) -> None:
        """Wake every idle worker."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until this worker is woken."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        except BaseException:
            if self._waiting.pop(waiter, waiter) is waiter:
                self.wake_one()  # what it was woken for is another's now
            raise

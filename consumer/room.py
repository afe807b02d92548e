"""How many messages of a partition are with handlers, and who waits for fewer.

One waits at a time: pulling for room, or, once it has ended, the hand-over for none.
"""

from __future__ import annotations

import asyncio

ROOM_SHARE = 2
"""Pulling goes on when less than 1/ROOM_SHARE of the limit is in use."""
NOBODY = -1


class Room:
    """Counts messages; `count` goes down with every handled one, so nothing else is done for each."""

    __slots__ = ("_event", "_shut", "count", "wake_at")

    def __init__(self) -> None:
        self.count = 0
        """Handed out, and neither done nor forgotten."""
        self.wake_at = NOBODY
        """At so few, or fewer, `wake` is to be called."""
        self._shut = False
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Have who waits look again."""
        self._event.set()

    def leave(self, count: int) -> None:
        """So many are no longer with handlers."""
        self.count -= count
        if self.count <= self.wake_at:
            self.wake()

    def shut(self) -> None:
        """There is no room, however few they are, until `reopen`."""
        self._shut = True

    def reopen(self) -> None:
        """The count alone says again whether there is room."""
        if self._shut:
            self._shut = False
            self.wake()

    def below(self, limit: int) -> bool:
        """There is room for more than the present ones."""
        return self.count < limit and not self._shut

    async def get_below(self, limit: int) -> None:
        """Wait until there is room; if there is none, until there is much."""
        while not self.below(limit):
            await self._down_to(limit // ROOM_SHARE)

    async def empty(self) -> None:
        """Wait until all are done or forgotten."""
        while self.count:
            await self._down_to(0)

    async def _down_to(self, count: int) -> None:
        self.wake_at = count
        self._event.clear()
        await self._event.wait()
        self.wake_at = NOBODY

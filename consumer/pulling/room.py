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

    __slots__ = ("_aside", "_aside_max", "_event", "_shut", "count", "wake_at")

    def __init__(self, *, aside_max: int = 0) -> None:
        self.count = 0
        """Handed out, and neither done nor forgotten."""
        self._aside = 0
        """Of these, so many wait for another try."""
        self._aside_max = aside_max
        """So many of them leave their room to others."""
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

    def set_aside(self, count: int) -> None:
        """So many more wait for another try; fewer if negative."""
        self._aside += count
        if count > 0 and self.wake_at != NOBODY:
            self.wake()

    def left(self, limit: int) -> int:
        """How many more there is room for; none below 1."""
        return limit - self.count + min(self._aside, self._aside_max)

    def below(self, limit: int) -> bool:
        """There is room for more than the present ones."""
        return self.left(limit) > 0 and not self._shut

    async def get_below(self, limit: int) -> None:
        """Wait until there is room; if there is none, until there is much."""
        while not self.below(limit):
            await self._down_to(limit // ROOM_SHARE + min(self._aside, self._aside_max))

    async def empty(self) -> None:
        """Wait until all are done or forgotten."""
        while self.count > 0:
            await self._down_to(0)

    async def _down_to(self, count: int) -> None:
        self.wake_at = count
        self._event.clear()
        await self._event.wait()
        self.wake_at = NOBODY

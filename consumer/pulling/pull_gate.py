"""Reasons to pull nothing of a partition for a while, as that the user has paused it."""

from __future__ import annotations

import asyncio

PAUSED = "resume"
"""What pulling waits for while the user has paused the partition."""


class PullGate:
    """Closed while there is a reason."""

    def __init__(self) -> None:
        self.reasons: set[str] = set()
        """For people: what pulling waits for."""
        self._open = asyncio.Event()
        self._open.set()

    def hold(self, why: str) -> None:
        """Pull nothing until `let_go` with the same reason."""
        self.reasons.add(why)
        self._open.clear()

    def let_go(self, why: str) -> None:
        """Pull again, unless there is another reason to wait."""
        self.reasons.discard(why)
        if not self.reasons:
            self._open.set()

    async def passed(self) -> None:
        """Wait until there is no reason."""
        await self._open.wait()

"""Holds the reasons to pull nothing from a partition for a while, for example that the user has
paused it.
"""

from __future__ import annotations

import asyncio

PAUSED = "resume"
"""The text that describes what pulling waits for while the user has paused the partition."""


class PullGate:
    """A gate that is closed while there is a reason to wait."""

    def __init__(self) -> None:
        self.reasons: set[str] = set()
        """The reasons: texts, for people, about what pulling waits for."""
        self._open = asyncio.Event()
        self._open.set()

    def hold(self, why: str) -> None:
        """Pull nothing until `let_go` is called with the same reason."""
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

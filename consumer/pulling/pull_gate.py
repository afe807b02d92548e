"""Stops pulling a partition while there is a reason to, for example because the user has paused
it.
"""

from __future__ import annotations

import asyncio

PAUSED = "resume"
"""The reason that applies while the user has paused the partition: pulling waits for `resume`."""


class PullGate:
    """A gate that is closed as long as it has reasons."""

    def __init__(self) -> None:
        self.reasons: set[str] = set()
        """The reasons, as texts for users."""
        self._open = asyncio.Event()
        self._open.set()

    def add(self, reason: str) -> None:
        """Close the gate until `remove` is called with the same reason."""
        self.reasons.add(reason)
        self._open.clear()

    def remove(self, reason: str) -> None:
        """Remove a reason, and open the gate if it was the last one."""
        self.reasons.discard(reason)
        if not self.reasons:
            self._open.set()

    async def wait_open(self) -> None:
        """Wait until the gate is open."""
        await self._open.wait()

"""Removes the rows of deletions, publications and done operations after `history_retention_ms`.
Shell around SQL.

deleted, published, done ─▶ found by a check ─▶ old enough: removed, a portion in each transaction
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.duties import take_duty
from .past_rows import count_age, note_ended, remove_ended

DUTY = "history"
LOOK_MS = 600_000


def _loop_ms() -> int:
    """Return the event loop's time in milliseconds, which unlike a calendar cannot be set."""
    return int(asyncio.get_running_loop().time() * 1000)


class PastExpirer:
    """
    Removes rows of the history that are older than `history_retention_ms`.

    Args:
        holder: id of this process, which no other metaserver has.
        now_ms: returns a time that only rises while this process runs.
    """

    def __init__(
        self,
        database: Database,
        settings: MetaserverSettings,
        *,
        holder: str,
        now_ms: Callable[[], int] = _loop_ms,
    ) -> None:
        self._database = database
        self._retention_ms = settings.history_retention_ms
        self._look_ms = min(LOOK_MS, settings.history_retention_ms // 10)
        self._lease_ms = 2 * (self._look_ms + settings.expire_ms)
        self._holder = holder
        self._now_ms = now_ms
        self._next_ms = 0
        self._counted_ms: int | None = None
        """Time up to which this metaserver has counted; None: another one may have counted
        since.
        """

    async def run_once(self) -> None:
        """Check the history, unless that was done a moment ago. Raises StorageError."""
        now_ms = self._now_ms()
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self._look_ms
        mine = await self._database.write(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        )
        if not mine:
            self._counted_ms = None
            return
        since_ms = now_ms if self._counted_ms is None else self._counted_ms
        # After a longer pause another metaserver may have counted, and returned the duty.
        elapsed_ms = min(now_ms - since_ms, self._lease_ms)
        self._counted_ms = None
        age_ms = await self._database.write(count_age, elapsed_ms)
        self._counted_ms = now_ms
        while await self._database.write(note_ended, age_ms):
            pass
        while await self._database.write(remove_ended, age_ms - self._retention_ms):
            pass

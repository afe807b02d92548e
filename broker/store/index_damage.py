"""Handles damage of the index while the broker serves: health reports it, and the next start
rebuilds the index.
"""

from __future__ import annotations

import logging

from ...protocol.errors import CorruptIndexError, StorageError
from ..partition.state import BrokerState
from ..storage.files import Files
from ..storage.index.kinds import mark
from .group_commit import RunBlocking

log = logging.getLogger("keylane.broker")


class IndexDamage:
    """Handles damage of one kind of index."""

    def __init__(
        self, state: BrokerState, files: Files, kind: str, *, run_blocking: RunBlocking
    ) -> None:
        self._state = state
        self._files = files
        self._kind = kind
        self._run_blocking = run_blocking

    async def report(self, error: CorruptIndexError) -> None:
        """Report the damage in health, and mark the index so that the next start rebuilds it."""
        if self._state.until_restart:
            return
        text = f"{error.message}; the next start rebuilds the index"
        log.error("%s", text)
        self._state.problems.append(text)
        self._state.until_restart.add(text)
        try:
            await self._run_blocking(mark, self._files, self._kind)
        except StorageError as failed:
            log.warning("cannot mark the index as damaged: %s", failed.message)

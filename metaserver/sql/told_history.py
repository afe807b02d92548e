"""Remembers beside an SQLite file how many changes of copies brokers may know of, so that a file
that somebody puts back is noticed. Does disk I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

log = logging.getLogger("keylane.metaserver")
FILE = "meta.history"


class ToldHistory:
    """The number in the file. A disk that takes no writes only weakens the check."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = asyncio.Lock()
        self.changes = 0
        """The number at the start; 0 if there was no file."""
        with contextlib.suppress(OSError, ValueError):
            self.changes = int(self._path.read_text())

    async def store(self, changes: int) -> None:
        """Store a higher number durably."""
        async with self._lock:  # in order
            try:
                await asyncio.to_thread(self._replace, changes)
            except OSError as error:
                log.warning("cannot write %s: %s", self._path, error)

    def _replace(self, changes: int) -> None:
        temporary = self._path.with_name(f"{FILE}.tmp")
        with temporary.open("w") as file:
            file.write(f"{changes}\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        descriptor = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""The reserve: a file that is removed when the disk is full, so that retention can write and free
space. Disk.

reserve      zeros: 4 MiB, at most a hundredth of the disk; it exists once the disk is half full
"""

from __future__ import annotations

import logging

from ...protocol.errors import StorageError
from .files import Files, replace_file

log = logging.getLogger("keylane.broker")

PATH = "reserve"
RESERVE_BYTES = 4 << 20
SHARE = 100
PLENTY_BYTES = 1 << 30
"""The number of free bytes above which no reserve is written, if more than half of the disk is free
as well.
"""


class Reserve:
    """The reserve of a data folder. Only one thread at a time may use it."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def keep(self) -> None:
        """Write the reserve if the disk is half full and has twice the reserve's size free."""
        try:
            total, free = self._files.total_bytes(), self._files.free_bytes()
            size = min(RESERVE_BYTES, total // SHARE)
            if free > max(total // 2, PLENTY_BYTES) or free < 2 * size:
                return
            if (self._files.size(PATH) or 0) < size:
                replace_file(self._files, PATH, bytes(size))
        except StorageError as error:
            log.warning("cannot write the reserve file: %s", error.message)

    def give_up(self) -> bool:
        """Remove the reserve, durably. Return False if it does not exist."""
        if self._files.size(PATH) is None:
            return False
        log.warning("the disk is full; removed the reserve file")
        self._files.remove(PATH)
        self._files.sync_folder()
        return True

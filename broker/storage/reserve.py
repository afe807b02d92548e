"""The reserve file, which is removed when the disk is full: retention needs to write before it can
free space. Does disk I/O through `Files`.

The file `reserve` contains zeros: 4 MiB, but at most a hundredth of the disk. It is written when
the disk becomes half full.
"""

from __future__ import annotations

import logging

from ...protocol.errors import StorageError
from .files import Files, replace_file

log = logging.getLogger("keylane.broker")

PATH = "reserve"
RESERVE_BYTES = 4 << 20
DISK_FRACTION = 100
"""The reserve takes at most 1 / DISK_FRACTION of the disk."""
PLENTY_FREE_BYTES = 1 << 30
"""No reserve is written while more than this many bytes, and more than half of the disk, are free.
"""


class Reserve:
    """The reserve file of a data folder. Only one thread at a time may use it."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def ensure(self) -> None:
        """Write the reserve file unless it exists, or most of the disk is free, or less than twice
        its size is free.
        """
        try:
            total, free = self._files.total_bytes(), self._files.free_bytes()
            size = min(RESERVE_BYTES, total // DISK_FRACTION)
            if free > max(total // 2, PLENTY_FREE_BYTES) or free < 2 * size:
                return
            if (self._files.size(PATH) or 0) < size:
                replace_file(self._files, PATH, bytes(size))
        except StorageError as error:
            log.warning("cannot write the reserve file: %s", error.message)

    def release(self) -> bool:
        """Remove the reserve file, durably. Return False if it does not exist."""
        if self._files.size(PATH) is None:
            return False
        log.warning("the disk is full; removed the reserve file")
        self._files.remove(PATH)
        self._files.sync_folder()
        return True

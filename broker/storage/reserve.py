"""The reserve file. It is removed when the disk is full, because retention must write before it can
free space. Does disk I/O through `Files`.

The file `reserve` contains 4 MiB of zeros, or a hundredth of the disk if that is less. It is
written when the disk becomes half full.
"""

from __future__ import annotations

import logging

from ...protocol.errors import StorageError
from .files import Files, replace_file

log = logging.getLogger("keylane.broker")

PATH = "reserve"
RESERVE_BYTES = 4 << 20
DISK_FRACTION = 100
"""The reserve occupies at most 1 / DISK_FRACTION of the disk."""
PLENTY_FREE_BYTES = 1 << 30
"""No reserve is written while more than this many bytes and more than half of the disk are free."""


def ensure_reserve(files: Files) -> None:
    """Write the reserve file, unless it exists, most of the disk is free, or less than twice its
    size is free. Only one thread at a time may call the functions of this module.
    """
    try:
        total_bytes, free_bytes = files.total_bytes(), files.free_bytes()
        size_bytes = min(RESERVE_BYTES, total_bytes // DISK_FRACTION)
        if free_bytes > max(total_bytes // 2, PLENTY_FREE_BYTES) or free_bytes < 2 * size_bytes:
            return
        if (files.size(PATH) or 0) < size_bytes:
            replace_file(files, PATH, bytes(size_bytes))
    except StorageError as error:
        log.warning("cannot write the reserve file: %s", error.message)


def release_reserve(files: Files) -> bool:
    """Remove the reserve file, durably. Return False if it does not exist."""
    if files.size(PATH) is None:
        return False
    log.warning("the disk is full; removed the reserve file")
    files.remove(PATH)
    files.sync_folder()
    return True

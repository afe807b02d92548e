"""Finds out whether the process can open more files, because SQLite's errors do not show it."""

from __future__ import annotations

import errno
import os

FILES_OF_DATABASE = 8
"""Number of files that must be free: a connection has up to 3, and closes those that it could open
before its error is reported, and connections are opened at the same time.
"""


def few_files_left() -> bool:
    """Return whether so few more files can be opened that a connection may have failed for that
    reason.
    """
    copies: list[int] = []
    try:
        first = os.open(os.devnull, os.O_RDONLY)
        copies.append(first)
        while len(copies) < FILES_OF_DATABASE:
            copies.append(os.dup(first))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    finally:
        for each in copies:
            os.close(each)
    return False

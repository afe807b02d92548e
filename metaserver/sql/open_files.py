"""Whether the process can open more files: SQLite says of none of its errors that it could not."""

from __future__ import annotations

import errno
import os

FILES_OF_DATABASE = 8
"""A connection has up to 3, and closes those that it could open before its error is told;
connections open at once.
"""


def few_files_left() -> bool:
    """Return whether so few more files may be open that a connection may have failed for that."""
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

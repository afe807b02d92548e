"""Checks whether the process can open more files, because this cannot be seen from SQLite's
errors.
"""

from __future__ import annotations

import errno
import os

FILES_OF_DATABASE = 8
"""Number of file descriptors that must be free. A connection needs up to 3, some of which it has
already closed by the time its error is reported, and several connections may be opened at the same
time.
"""


def lacks_file_descriptors() -> bool:
    """Return True if a connection may have failed because the process cannot open enough files."""
    descriptors: list[int] = []
    try:
        first_descriptor = os.open(os.devnull, os.O_RDONLY)
        descriptors.append(first_descriptor)
        while len(descriptors) < FILES_OF_DATABASE:
            descriptors.append(os.dup(first_descriptor))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return False

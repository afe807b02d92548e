"""What ends the reading of a subject.  Pure."""

from __future__ import annotations

from .base import Detail, KeylaneError


class ReadFilterError(KeylaneError):
    """The `where` of a reader failed for a message; the cause has what it raised."""

    code = 1280
    summary = "the reader's `where` failed"
    hint = "Mend `where`: a plain function of a message that returns True or False.  The next message follows if you go on."
    partition_id = Detail(int)
    offset = Detail(int)

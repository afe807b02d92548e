"""What ends the reading of a subject.  Pure."""

from __future__ import annotations

from .base import Detail, KeylaneError, RetryRule


class ReadFilterError(KeylaneError):
    """The `where` of a reader failed for a message; the cause has what it raised."""

    code = 1280
    summary = "the reader's `where` failed"
    hint = "Mend `where`: a plain function of a message that returns True or False.  The next message follows if you go on."
    partition_id = Detail(int)
    offset = Detail(int)


class RangeUnreadableError(KeylaneError):
    """A broker did not answer reads of a planned range for as long as a reader waits; the cause is the last error."""

    code = 1330
    retry = RetryRule.LATER
    summary = "the range could not be read"
    hint = "Is the broker of the partition running?  The rows of the range are fixed: the same read again gives them."
    subject = Detail(str)
    partition_id = Detail(int)
    start = Detail(int)
    end = Detail(int)
    offset = Detail(int)
    """The first one that did not come."""
    seconds = Detail(int)
    """For how long nothing came."""


class JsonValueError(KeylaneError):
    """A value is not JSON of the schema that a reader was given."""

    code = 1331
    summary = "a value is not JSON of the schema"
    hint = "Mend the schema, or read such values as null: bad_values=null."
    partition_id = Detail(int)
    offset = Detail(int)

"""What goes wrong in consumer groups: filters that fail, or differ between members.  Pure."""

from __future__ import annotations

from .base import Detail, KeylaneError, RetryRule
from .refusals import RefusedError


class FilterError(KeylaneError):
    """The `filter` of a consumer failed for a message; the cause has what it raised."""

    code = 1286
    summary = "the consumer's filter failed"
    hint = (
        "Mend `filter`: a plain function of a message that returns True or False.  The message is tried again, as after "
        "an error of a handler."
    )
    partition_id = Detail(int)
    offset = Detail(int)


class GroupFilterError(RefusedError):
    """Another consumer of the group leaves other messages out."""

    code = 1287
    retry = RetryRule.LATER
    summary = "the consumers of a group must have the same tags and filter"
    hint = (
        "Each message goes to one of them: give all the same, or this one a group of its own.  To change the filter of a "
        "group, stop the consumers with the old one first."
    )
    stored = Detail(str)
    """What the other consumer leaves out."""
    asked = Detail(str)
    client = Detail(str)
    """The name of the other consumer."""
